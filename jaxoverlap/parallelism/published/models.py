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


def _mpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=50368,
        sequence=2048,
        learned_positions=2048,
        biases=False,
        source="mosaicml/llm-foundry, scripts/train/yamls/pretrain",
    )


_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, table 3"
_VTRAIN = "Bang et al., vTrain, MICRO'24, data/ground_truth_multi.csv"
_LLAMA2 = "Touvron et al., arXiv 2307.09288"
_QWEN3 = "Qwen3 technical report, arXiv 2505.09388, table 2"
_LLAMA = "Dubey et al., arXiv 2407.21783, table 3"

_MODELS = {
    m.name: m
    for m in (
        _gpt("gpt-126m", 12, 768, 12, "Brown et al., arXiv 2005.14165, table 2.1"),
        _gpt("gpt-3.6b", 30, 3072, 32, _VTRAIN),
        _gpt("gpt-5b", 24, 4096, 32, "NVIDIA/dgxc-benchmarking, paxml/README_5b.md"),
        _gpt("gpt-18.4b", 40, 6144, 48, _VTRAIN),
        _gpt("gpt-22b", 48, 6144, 64, _KORTHIKANTI),
        _gpt("gpt-39.1b", 48, 8192, 64, _VTRAIN),
        _gpt("gpt-175b", 96, 12288, 96, _KORTHIKANTI),
        _gpt("gpt-530b", 105, 20480, 128, _KORTHIKANTI),
        _gpt("gpt-1t", 128, 25600, 160, _KORTHIKANTI),
        _mpt("mpt-125m", 12, 768, 12),
        _mpt("mpt-350m", 24, 1024, 16),
        _mpt("mpt-760m", 24, 1536, 12),
        _mpt("mpt-1b", 24, 2048, 16),
        _mpt("mpt-3b", 32, 2560, 20),
        _mpt("mpt-7b", 32, 4096, 32),
        _mpt("mpt-13b", 40, 5120, 40),
        _mpt("mpt-30b", 48, 7168, 56),
        _mpt("mpt-70b", 64, 8192, 64),
        Transformer(
            name="llama2-7b", layers=32, hidden=4096, heads=32, mlp=11008, vocab=32000,
            sequence=4096, gated=True, biases=False, tied=False, source=_LLAMA2,
        ),
        Transformer(
            name="llama2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, mlp=28672,
            vocab=32000, sequence=4096, gated=True, biases=False, tied=False, source=_LLAMA2,
        ),
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
        Transformer(
            name="qwen3-30b-a3b", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128,
            mlp=768, vocab=151936, sequence=4096, experts=128, choices=8, gated=True, biases=False,
            tied=False, source=_QWEN3,
        ),
        Transformer(
            name="qwen3-235b-a22b", layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128,
            mlp=1536, vocab=151936, sequence=4096, experts=128, choices=8, gated=True,
            biases=False, tied=False, source=_QWEN3,
        ),
        Transformer(
            name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128,
            mlp=25600, vocab=151936, sequence=4096, gated=True, biases=False, tied=False,
            source="Qwen3 technical report, arXiv 2505.09388, table 1",
        ),
        Transformer(
            name="mixtral-8x22b", layers=56, hidden=6144, heads=48, kv_heads=8, mlp=16384,
            vocab=32768, sequence=4096, experts=8, choices=2, gated=True, biases=False, tied=False,
            source="mistralai/Mixtral-8x22B-v0.1, config.json",
        ),
        Transformer(
            name="gpt-oss-20b", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64,
            mlp=2880, vocab=201088, sequence=4096, experts=32, choices=4, gated=True, tied=False,
            source="gpt-oss model card, arXiv 2508.10925; as of gpt-oss-120b",
        ),
        Transformer(
            name="gpt-oss-120b", layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64,
            mlp=2880, vocab=201088, sequence=4096, experts=128, choices=4, gated=True, tied=False,
            source="gpt-oss model card, arXiv 2508.10925; half of its layers attend to 128 tokens "
            "only, which is not represented",
        ),
        Transformer(
            name="grok-1", layers=64, hidden=6144, heads=48, kv_heads=8, head_dim=128, mlp=32768,
            vocab=131072, sequence=8192, experts=8, choices=2, gated=True, biases=False,
            source="xai-org/grok-1, model.py",
        ),
        Transformer(
            name="nemotron4-15b", layers=32, hidden=6144, heads=48, kv_heads=8, mlp=24576,
            vocab=256000, sequence=4096, biases=False, tied=False,
            source="Parmar et al., arXiv 2402.16819, table 1",
        ),
        Transformer(
            name="nemotron4-340b", layers=96, hidden=18432, heads=96, kv_heads=8, mlp=73728,
            vocab=256000, sequence=4096, biases=False, tied=False,
            source="Nemotron-4 340B technical report, arXiv 2406.11704, table 1",
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
