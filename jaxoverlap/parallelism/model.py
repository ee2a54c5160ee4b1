"""Describe a transformer as far as its size, its work and its traffic depend on it.

A layer is attention and an MLP, dense or of experts. DeepSeek's first layers are dense and its
attention is latent (arXiv 2412.19437); a hybrid's layers are attention, Mamba-2 (arXiv 2405.21060)
or an MLP alone.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxoverlap._util.limits import AtLeast0, AtLeast1, checked

ELEMENT = 2  # bytes of an activation, and of a gathered weight


@dataclass(frozen=True)
class Kind:
    """One kind of a model's layers.

    Attributes:
        mixer: what mixes tokens: "attention", "mamba", or "" for nothing.
        inner: inner size of a dense MLP; 0: none.
        experts: whether it has experts.
    """

    mixer: str = "attention"
    inner: int = 0
    experts: bool = False

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP, of experts or not."""
        return self.experts or self.inner > 0


@dataclass(frozen=True, kw_only=True)
@checked
class Transformer:
    """A decoder, dense or with a mixture of experts.

    Attributes:
        name: for people.
        layers, hidden, heads: as papers give them.
        sequence: tokens of a sequence.
        mlp: inner size of an MLP, of each expert's where there are experts; None: 4 x hidden.
        vocab: rows of the token embedding.
        kv_heads: heads of keys and values; None: as many as `heads`.
        head_dim: elements of a head; None: hidden / heads.
        experts: experts of a layer; 0: a dense model.
        choices: experts that a token goes to.
        shared_mlp: inner size of the expert that every token takes besides its choices; 0: none.
        gated: whether an MLP has three matrices (SwiGLU) and not two.
        biases: whether matmuls and norms have biases.
        learned_positions: rows of a learned table of positions; 0: rotary or none.
        tied: whether the head uses the embedding's table.
        dense_layers, dense_mlp: layers of a mixture that have no experts, and their MLP's size.
        query_rank, kv_rank, rope_dim, value_dim: of latent attention: ranks of the compressed
            queries, and of keys and values (0: it is not latent; queries may be uncompressed); of a
            head's elements those that are rotary; elements of a value's head, where a key's head
            has head_dim.
        mamba_layers, attention_layers: of a hybrid, layers that are Mamba-2 or attention alone;
            the others are MLPs, or experts, alone. 0 of both: each layer has attention and an MLP.
        mamba_heads, mamba_head_dim, mamba_groups, mamba_state: sizes of a Mamba-2 layer.
        expert_hidden: size of the tokens that experts get, where they are projected (LatentMoE);
            None: hidden.
        predictions: layers that predict further tokens, each with the head (MTP).
        source: where the sizes come from.
    """

    name: str
    layers: AtLeast1
    hidden: AtLeast1
    heads: AtLeast1
    sequence: AtLeast1
    mlp: AtLeast1 | None = None
    vocab: AtLeast1 = 51200
    kv_heads: AtLeast1 | None = None
    head_dim: AtLeast1 | None = None
    experts: AtLeast0 = 0
    choices: AtLeast0 = 0
    shared_mlp: AtLeast0 = 0
    gated: bool = False
    biases: bool = True
    learned_positions: AtLeast0 = 0
    tied: bool = True
    dense_layers: AtLeast0 = 0
    dense_mlp: AtLeast0 = 0
    query_rank: AtLeast0 = 0
    kv_rank: AtLeast0 = 0
    rope_dim: AtLeast0 = 0
    value_dim: AtLeast1 | None = None
    mamba_layers: AtLeast0 = 0
    attention_layers: AtLeast0 = 0
    mamba_heads: AtLeast0 = 0
    mamba_head_dim: AtLeast0 = 0
    mamba_groups: AtLeast0 = 0
    mamba_state: AtLeast0 = 0
    expert_hidden: AtLeast1 | None = None
    predictions: AtLeast0 = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} with heads={self.heads}: hidden must be a multiple of "
                "heads, or head_dim say how many elements a head has"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads={self.heads} with kv_heads={self.kv_heads}: heads must be a multiple of "
                "kv_heads"
            )
        if bool(self.experts) != bool(self.choices) or self.choices > self.experts:
            raise ValueError(
                f"experts={self.experts} with choices={self.choices}: give 0 of both, or 1 or more "
                "choices of as many experts or more"
            )
        if self.shared_mlp and not self.experts:
            raise ValueError(
                f"shared_mlp={self.shared_mlp} without experts: it is the size of an expert that "
                "every token takes; a dense model's MLP is mlp"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        """Raise `ValueError` for sizes of kinds of layers that do not go together."""
        for broken, message in (
            (
                bool(self.dense_layers) != bool(self.dense_mlp)
                or (self.dense_layers and not self.experts),
                f"dense_layers={self.dense_layers} with dense_mlp={self.dense_mlp}, "
                f"experts={self.experts}: give both for a model with experts, or neither",
            ),
            (
                self.dense_layers + self.mamba_layers + self.attention_layers > self.layers,
                f"dense_layers={self.dense_layers}, mamba_layers={self.mamba_layers} and "
                f"attention_layers={self.attention_layers} of layers={self.layers}: give fewer",
            ),
            (
                self.mamba_layers > 0
                and not (self.mamba_heads and self.mamba_head_dim and self.mamba_groups
                         and self.mamba_state),
                f"mamba_layers={self.mamba_layers}: give mamba_heads, mamba_head_dim, mamba_groups "
                "and mamba_state too",
            ),
            (
                bool(self.dense_layers) and bool(self.mamba_layers or self.attention_layers),
                "dense_layers with mamba_layers or attention_layers: layers of a hybrid are one "
                "block each; leave one of them out",
            ),
            (
                bool(self.rope_dim or self.query_rank) and not self.kv_rank,
                f"query_rank={self.query_rank}, rope_dim={self.rope_dim} without kv_rank: latent "
                "attention compresses keys and values; give their rank",
            ),
        ):  # fmt: skip
            if broken:
                raise ValueError(message)

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, Kind], ...]:
        """Return how many layers there are of each kind; those that predict further among them."""
        experts = bool(self.experts)
        own = Kind("attention", 0 if experts else self.inner, experts)
        if self.mamba_layers or self.attention_layers:
            alone = self.layers - self.mamba_layers - self.attention_layers
            counted = (
                (self.attention_layers, Kind("attention")),
                (self.mamba_layers, Kind("mamba")),
                (alone, replace(own, mixer="")),
                (self.predictions, own),
            )
        else:
            whole = self.layers - self.dense_layers + self.predictions
            counted = (whole, own), (self.dense_layers, Kind("attention", self.dense_mlp))
        return tuple((count, kind) for count, kind in counted if count)

    @property
    def value_size(self) -> int:
        """Elements of a head of values."""
        return self.value_dim or self.head_size

    @property
    def value_hidden(self) -> int:
        """Elements of what a token's attention gives, all heads together."""
        return self.heads * self.value_size

    @property
    def latent(self) -> int:
        """Elements of a token's compressed queries, keys and values; 0 without latent attention."""
        return self.query_rank + self.kv_rank + self.rope_dim

    @property
    def routed_hidden(self) -> int:
        """Elements of a token as its experts get it."""
        return self.expert_hidden or self.hidden

    @property
    def mamba_inner(self) -> int:
        """Elements of a token inside a Mamba-2 layer."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_columns(self) -> int:
        """Columns of a Mamba-2 layer's first matmul: z, x, B, C and dt."""
        return 2 * self.mamba_inner + 2 * self.mamba_groups * self.mamba_state + self.mamba_heads

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_hidden(self) -> int:
        """Elements of a token's queries, all heads together."""
        return self.heads * self.head_size

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
        """Inner size of an MLP, of each expert's where there are experts."""
        return self.mlp or 4 * self.hidden

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def active_inner(self) -> int:
        """Inner size of all the MLPs that a token goes through in a layer."""
        return max(self.choices, 1) * self.inner + self.shared_mlp

    @property
    def norm_params(self) -> int:
        """Elements of one norm."""
        return self.hidden * (2 if self.biases else 1)

    @functools.cache  # noqa: B019 # a search asks for the same few again and again
    def layer_params(self, model: int = 1, expert: int = 1) -> tuple[float, float]:
        """Count a layer's parameters on one device: outside experts, and of experts.

        Matrices, and biases of columns, are split over the tensor axis; norms and biases of rows
        are not. Experts are split over the expert axis too. Of a model with several kinds of layers
        it is the mean, and those that predict further tokens are in it.

        Args:
            model: size of the tensor axis.
            expert: size of the expert axis.
        """
        if len(self.kinds) == 1 and not self.predictions:
            return self._kind_params(self.kinds[0][1], model, expert)
        counted = [(n, self._kind_params(kind, model, expert)) for n, kind in self.kinds]
        dense, experts = (sum(n * part[i] for n, part in counted) for i in (0, 1))
        return dense / self.layers, experts / self.layers

    def _kind_params(self, kind: Kind, model: int, expert: int) -> tuple[int, int]:
        blocks = bool(kind.mixer) + kind.has_mlp
        dense = blocks * self.norm_params
        if kind.mixer == "mamba":
            columns, state = self.mamba_columns // model, self.mamba_inner // model
            convolved = state + 2 * self.mamba_groups * self.mamba_state // model
            dense += self.hidden * (columns + state) + 5 * convolved + state
        elif kind.mixer:
            dense += self._latent_params(model) if self.kv_rank else self._attention_params(model)
        if not kind.experts:
            return dense + self._mlp_params(kind.inner, self.hidden, model), 0
        dense += self.hidden * self.experts
        dense += self._mlp_params(self.shared_mlp, self.hidden, model)
        if self.expert_hidden:
            dense += 2 * self.hidden * self.expert_hidden // model
        one = self._mlp_params(self.inner, self.routed_hidden, model)
        return dense, one * self.experts // expert

    def _attention_params(self, model: int) -> int:
        kv = max(self.kv_hidden // model, self.head_size)
        biases = self.query_hidden // model + 2 * kv + self.hidden if self.biases else 0
        return 2 * self.hidden * (self.query_hidden // model + kv) + biases

    def _latent_params(self, model: int) -> int:
        into_queries = self.query_rank or self.hidden
        keys = self.heads * (self.head_size - self.rope_dim + self.value_size)
        split = into_queries * self.query_hidden + self.kv_rank * keys
        split += self.hidden * self.value_hidden
        return self.hidden * self.latent + split // model + self.query_rank + self.kv_rank

    def _mlp_params(self, inner: int, hidden: int, model: int) -> int:
        if not inner:
            return 0
        biases = (self.mlp_matrices - 1) * inner // model + hidden if self.biases else 0
        return self.mlp_matrices * hidden * inner // model + biases

    @property
    def params(self) -> int:
        """Parameters of the model, none counted twice."""
        tables = self.hidden * (self.vocab * (1 if self.tied else 2) + self.learned_positions)
        layers = sum(n * sum(self._kind_params(kind, 1, 1)) for n, kind in self.kinds)
        return layers + tables + self.norm_params

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Transformer:
        """Make a model of plain data, as a JSON file has it.

        Raises:
            ValueError: for a field that is unknown, missing, or of a value that no model has.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            near = [m for name in unknown for m in difflib.get_close_matches(name, known, 1, 0.5)]
            hint = f"; did you mean {', '.join(near)}?" if near else "."
            raise ValueError(
                f"unknown fields {', '.join(unknown)}{hint} Known are {', '.join(sorted(known))}"
            )
        wanted = ("name", "layers", "hidden", "heads", "sequence")
        if missing := [name for name in wanted if name not in given]:
            raise ValueError(f"missing fields: {', '.join(missing)}")
        return cls(**given)
