"""Name the published models that `configure` knows by name, each with its source."""

from __future__ import annotations

import difflib
from dataclasses import replace

from jaxoverlap.parallelism.model import Transformer


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
