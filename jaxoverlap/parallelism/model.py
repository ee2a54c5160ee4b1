"""Describe a transformer as far as its size, its work and its traffic depend on it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder, dense or with a mixture of experts in every layer.

    Attributes:
        name: for people.
        layers, hidden, heads: as papers give them; a head has hidden / heads elements.
        sequence: tokens of a sequence.
        mlp: inner size of an MLP, of each expert's where there are experts; None: 4 x hidden.
        vocab: rows of the token embedding.
        kv_heads: heads of keys and values; None: as many as `heads`.
        experts: experts of a layer; 0: a dense model.
        choices: experts that a token goes to.
        gated: whether an MLP has three matrices (SwiGLU) and not two.
        biases: whether matmuls and norms have biases.
        learned_positions: rows of a learned table of positions; 0: rotary or none.
        tied: whether the head uses the embedding's table.
        source: where the sizes come from.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    mlp: int | None = None
    vocab: int = 51200
    kv_heads: int | None = None
    experts: int = 0
    choices: int = 0
    gated: bool = False
    biases: bool = True
    learned_positions: int = 0
    tied: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        least = dict.fromkeys(("layers", "hidden", "heads", "sequence", "vocab"), 1)
        least |= {"mlp": 1, "kv_heads": 1, "experts": 0, "choices": 0, "learned_positions": 0}
        for name, at_least in least.items():
            value = getattr(self, name)
            if value is None and name in ("mlp", "kv_heads"):
                continue
            if type(value) is not int or value < at_least:
                raise ValueError(f"{name}={value!r}: expected a whole number, {at_least} or more")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} with heads={self.heads}: hidden must be a multiple of heads"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads={self.heads} with kv_heads={self.kv_heads}: heads must be a multiple of "
                "kv_heads"
            )
        if bool(self.experts) != bool(self.choices) or not 0 <= self.choices <= self.experts:
            raise ValueError(
                f"experts={self.experts} with choices={self.choices}: give 0 of both, or 1 or more "
                "choices of as many experts or more"
            )

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def kv_hidden(self) -> int:
        """Elements of a token's keys; its values have as many."""
        return self.key_heads * self.head_size

    @property
    def inner(self) -> int:
        """Inner size of an MLP."""
        return self.mlp or 4 * self.hidden

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def attention_params(self) -> int:
        """Elements of a layer's attention matrices."""
        return 2 * self.hidden * (self.hidden + self.kv_hidden)

    @property
    def mlp_params(self) -> int:
        """Elements of one MLP's matrices."""
        return self.mlp_matrices * self.hidden * self.inner

    @property
    def params(self) -> int:
        """Parameters of the whole model, none counted twice."""
        layer = self.attention_params + max(self.experts, 1) * self.mlp_params
        layer += self.hidden * self.experts  # the router
        layer += 2 * self.norm_params + (self.layer_bias_params if self.biases else 0)
        tables = self.hidden * (self.vocab * (1 if self.tied else 2) + self.learned_positions)
        return self.layers * layer + tables + self.norm_params

    @property
    def norm_params(self) -> int:
        """Elements of one norm."""
        return self.hidden * (2 if self.biases else 1)

    @property
    def layer_bias_params(self) -> int:
        """Elements of a layer's biases: q, k, v, the attention's result, and the MLPs'."""
        inner = (self.mlp_matrices - 1) * self.inner + self.hidden
        return 2 * self.hidden + 2 * self.kv_hidden + max(self.experts, 1) * inner

    @property
    def active_params(self) -> int:
        """Parameters of matmuls that a token meets, without its tables."""
        return self.layers * (self.attention_params + max(self.choices, 1) * self.mlp_params)


def _gpt(name: str, layers: int, hidden: int, heads: int, source: str) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=2048,
        learned_positions=2048,
        source=source,
    )


_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, table 3"
_VTRAIN = "Bang et al., vTrain, MICRO'24, data/ground_truth_multi.csv"
_LLAMA = "Dubey et al., arXiv 2407.21783, table 3"

_MODELS = {
    m.name: m
    for m in (
        _gpt("gpt-3.6b", 30, 3072, 32, _VTRAIN),
        _gpt("gpt-18.4b", 40, 6144, 48, _VTRAIN),
        _gpt("gpt-22b", 48, 6144, 64, _KORTHIKANTI),
        _gpt("gpt-39.1b", 48, 8192, 64, _VTRAIN),
        _gpt("gpt-175b", 96, 12288, 96, _KORTHIKANTI),
        _gpt("gpt-530b", 105, 20480, 128, _KORTHIKANTI),
        _gpt("gpt-1t", 128, 25600, 160, _KORTHIKANTI),
        Transformer(
            name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336,
            vocab=128256, sequence=8192, gated=True, biases=False, tied=False, source=_LLAMA,
        ),
        Transformer(
            name="llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, mlp=28672,
            vocab=128256, sequence=8192, gated=True, biases=False, tied=False, source=_LLAMA,
        ),
        Transformer(
            name="llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, mlp=53248,
            vocab=128256, sequence=8192, gated=True, biases=False, tied=False, source=_LLAMA,
        ),
        Transformer(
            name="mixtral-8x7b", layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336,
            vocab=32000, sequence=4096, experts=8, choices=2, gated=True, biases=False, tied=False,
            source="Jiang et al., arXiv 2401.04088, table 1",
        ),
    )
}  # fmt: skip


def models() -> tuple[Transformer, ...]:
    """The models that have a name, smallest of each family first."""
    return tuple(_MODELS.values())


def named_model(name: str, *, sequence: int | None = None) -> Transformer:
    """The model of a name such as "gpt-175b", with another length of sequences if given.

    Raises:
        ValueError: for a name that is not known, or a sequence below one.
    """
    model = _MODELS.get(name.lower())
    if model is None:
        near = difflib.get_close_matches(name.lower(), _MODELS, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown model {name!r}: {hint}Known are {', '.join(_MODELS)}; for another give a "
            "Transformer, or a file of its fields as JSON"
        )
    if sequence is None or sequence == model.sequence:
        return model
    positions = sequence if model.learned_positions else 0
    return replace(model, sequence=sequence, learned_positions=positions)
