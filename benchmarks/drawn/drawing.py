"""Random train steps."""

from __future__ import annotations

import math
import random
from typing import Any

from benchmarks.drawn.sketch import EXPERTS, LAYOUTS, Layout, Sketch, layer_shapes, weight_spec
from jaxoverlap.hardware.cluster import parse_cluster

CHIPS = ("h100-sxm", "a100-sxm-80", "h200", "b200")
GPUS_PER_HOST = 8
PLACES = ("stream", "hidden", "qkv", "attended", "logits")  # that a step may constrain

ANY_LAYOUT: tuple[Layout, ...] = (
    ("fsdp", "tp"), ("tp", "fsdp"), ("", "tp"), ("tp", ""), ("fsdp", ""), ("", "fsdp"), ("", ""),
)  # fmt: skip


def draw(seed: int) -> Sketch:
    """The sketch of a seed.

    Its weights divide evenly, and by a rough estimate it fits in the GPUs' memory.
    """
    rng = random.Random(f"step {seed}")
    while True:
        sketch = _draw(rng, seed)
        if _divides(sketch) and rough_bytes(sketch) < parse_cluster(sketch.pod).chip.memory_bytes:
            return sketch


def _divides(sketch: Sketch) -> bool:
    """Return whether every dim of every weight splits evenly over the axes that shard it."""
    shapes = layer_shapes(sketch) | {"embedding": (sketch.vocab, sketch.hidden)}
    return all(
        size % _devices(sketch, axes) == 0
        for name, shape in shapes.items()
        for size, axes in zip(shape, weight_spec(sketch, name, shape), strict=True)
    )


def _devices(sketch: Sketch, axes: str | tuple[str, ...] | None) -> int:
    """Count the devices over which a spec with these axes shards a dim."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(sketch.axes[name] for name in names)


def _draw(rng: random.Random, seed: int) -> Sketch:
    hosts = rng.choice((1, 1, 2, 4, 8))
    axes = _axes(rng, hosts)
    tp, shards = axes.get("tp", 1), math.prod(n for a, n in axes.items() if a != "tp")
    hidden = rng.choice((1024, 1536, 2048, 3072, 4096, 4096, 5120, 6144, 8192))
    heads = hidden // rng.choice((64, 128, 128))
    heads += -heads % 8 if hidden % (heads + -heads % 8) == 0 else 0
    gated = rng.random() < 0.5
    ratio = rng.choice((8 / 3, 3.5)) if gated else rng.choice((4, 4, 2))
    attention = rng.choice(("none", "einsum", "library", "library"))
    vocab = rng.choice((0, 32000, 32768, 50304, 128256)) if attention != "none" else 0
    constrained = _constrained(rng, attention != "none", vocab > 0)
    grouped = rng.random() < 0.3 and heads % (4 * tp) == 0
    return Sketch(
        seed=seed,
        pod=f"{rng.choice(CHIPS)}:{hosts}x{GPUS_PER_HOST}",
        axes=axes,
        layers=rng.randint(2, 8),
        hidden=hidden,
        mlp=math.ceil(hidden * ratio / 256) * 256,
        gated=gated,
        parallel=attention != "none" and rng.random() < 0.2,
        attention=attention,
        heads=heads,
        kv_heads=heads // 4 if grouped else heads,
        projection=rng.choice(("each", "each", "headwise") if grouped else _PROJECTIONS),
        sequence=rng.choice((1024, 2048, 2048, 4096, 4096, 8192)),
        batch=shards * rng.choice((1, 1, 2, 4)) if shards > 1 else rng.choice((1, 2, 4, 8)),
        vocab=vocab,
        tied=rng.random() < 0.3,
        loss=rng.choice(("labels", "one hot", "take")),
        dtype=rng.choice(("float32", "float32", "bfloat16")),
        scan=rng.random() < 0.5,
        remat=rng.choice(("none", "none", "all", "not matmuls")),
        optimizer=rng.choice(("sgd", "adamw", "clipped adam")),
        stream=rng.choice(("", "sequence", "features")) if tp > 1 else "",
        constrained=constrained,
        layout=rng.choice(("megatron", "megatron", *LAYOUTS, "mixed")),
        mixed={name: rng.choice(ANY_LAYOUT) for name in _MATRICES},
        donate=rng.random() < 0.7,
        stated=rng.choice(("nothing", "in", "in and out")),
        mixer=_mixer(seed, vocab),
    )


def _mixer(seed: int, vocab: int) -> Any:
    """Draw the mixer by a generator of its own, so that seeds keep what they had before it."""
    kinds = ("convolution", "cumsum", "fft", "experts", *(() if vocab else ("patches",)))
    rng = random.Random(f"mixer {seed}")
    return rng.choice(kinds) if rng.random() < 0.4 else "none"


_PROJECTIONS = ("each", "each", "fused", "headwise")
_MATRICES = ("q", "k", "v", "qkv", "out", "up", "gate", "down", "embedding", "head")


def _axes(rng: random.Random, hosts: int) -> dict[str, int]:
    """A mesh over some of dp, fsdp and tp; tp stays within a host."""
    devices = hosts * GPUS_PER_HOST
    kinds = [("dp",), ("fsdp",), ("fsdp", "tp"), ("dp", "tp"), ("dp", "fsdp"), ("dp", "fsdp", "tp")]
    names = rng.choice([*kinds, ("fsdp", "tp"), *([("tp",)] * 2 if hosts == 1 else [])])
    axes = dict.fromkeys(names, 1)
    if "tp" in names:
        most = GPUS_PER_HOST if names == ("tp",) else devices // 2 ** (len(names) - 1)
        axes["tp"] = most if names == ("tp",) else rng.choice([n for n in (2, 4, 8) if n <= most])
    others = devices // axes.get("tp", 1)
    if "dp" in names and "fsdp" in names:
        axes["dp"] = rng.choice([n for n in (2, 4, 8) if n < others])
        axes["fsdp"] = others // axes["dp"]
    elif names != ("tp",):
        axes[names[0]] = others
    return axes


def _constrained(rng: random.Random, attention: bool, vocab: bool) -> tuple[str, ...]:
    """The positions that are constrained: none, the stream, some or all."""
    there = [
        position
        for position in PLACES
        if (attention or position not in ("qkv", "attended")) and (vocab or position != "logits")
    ]
    kind = rng.choice(("nowhere", "stream", "stream", "some", "some", "everywhere"))
    some = [position for position in there if rng.random() < 0.5]
    return tuple({"nowhere": [], "stream": ["stream"], "some": some, "everywhere": there}[kind])


def rough_bytes(sketch: Sketch) -> float:
    """Estimate the bytes that a GPU needs at least, within a factor of two."""
    d, tp = sketch.hidden, sketch.axes.get("tp", 1)
    matrices = 2 * EXPERTS if sketch.mixer == "experts" else 2 + sketch.gated
    weights = sketch.layers * d * (matrices * sketch.mlp + 4 * d) + 2 * sketch.vocab * d
    size = 4 if sketch.dtype == "float32" else 2
    copies = 2 if sketch.optimizer == "sgd" else 4
    split = math.prod(n for axis, n in sketch.axes.items() if axis != "dp")
    state = weights * size * copies / (split if sketch.layout != "tp alone" else tp)
    rows = sketch.batch / math.prod(n for axis, n in sketch.axes.items() if axis != "tp")
    tokens = rows * sketch.sequence
    kept = sketch.layers if sketch.remat == "none" else 1
    layer = tokens * (8 * d + 3 * sketch.mlp / tp) * 2
    if sketch.attention != "none":
        layer += 3 * 4 * rows * sketch.heads / tp * sketch.sequence**2
    saved = 2 * tokens * d * sketch.layers
    return state + saved + kept * layer + 3 * 4 * tokens * sketch.vocab / tp
