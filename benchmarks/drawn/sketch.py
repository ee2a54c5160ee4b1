"""A train step as data: its parts, and the shardings of its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec as P

Layout = tuple[str, ...]  # of a weight: what shards each dim, "fsdp", "tp", "both" or ""

LAYOUTS: dict[str, tuple[Layout, Layout]] = {  # of weights into more features, and back to hidden
    "megatron": (("fsdp", "tp"), ("tp", "fsdp")),
    "both on features": (("", "both"), ("both", "")),
    "tp alone": (("", "tp"), ("tp", "")),
    "fsdp alone": (("fsdp", ""), ("fsdp", "")),
    "fsdp on hidden and features": (("", "fsdp"), ("", "fsdp")),
}
TAPS, EXPERTS, PATCH = 4, 8, 16  # of convolutions, of experts' layers, and a patch's side
_BACK = ("out", "down")  # weights from more features back to hidden


@dataclass(frozen=True)
class Sketch:
    """A train step of a decoder, or of a stack of MLPs; all sizes are global.

    Attributes:
        seed: that it was drawn with.
        pod: as `jaxoverlap.parse_cluster` takes it.
        axes: sizes of the mesh's axes (dp, fsdp, tp), slowest first.
        layers, hidden, mlp, gated, parallel: of the layers; parallel: attention and MLP read the
            same norm.
        attention: none; written with einsums; `jax.nn.dot_product_attention`; or cuDNN's by it.
        heads, kv_heads: of the attention.
        projection: whether queries, keys and values have a weight each, one together, or one each
            with heads as a dim of its own.
        sequence, batch: of the input.
        vocab: 0: the step reads and predicts vectors, and has no embedding and no head.
        tied: whether the head is the embedding.
        loss: how the cross-entropy picks its targets.
        dtype: of the weights; matmuls are in bfloat16.
        scan: whether layers are scanned, or else unrolled.
        remat: what a layer's backward pass computes again: nothing, all, or all but matmuls.
        optimizer: which.
        stream: of the residual stream, what tp shards: nothing, the sequence or the features.
        constrained: the places with a sharding constraint.
        layout: a name of LAYOUTS, or "mixed".
        mixed: by weight, where layout is "mixed".
        donate: whether the step donates its state.
        stated: what the jit states: nothing, in_shardings, or both in_shardings and out_shardings.
        mixer: what a layer has besides attention and MLP, or instead of the MLP: nothing; a causal
            depthwise convolution; a cumulative sum or an FFT over the sequence; patches of images,
            convolved before the first layer; experts that multiply their tokens in groups.
    """

    seed: int
    pod: str
    axes: dict[str, int]
    layers: int
    hidden: int
    mlp: int
    gated: bool
    parallel: bool
    attention: Literal["none", "einsum", "library", "cudnn"]
    heads: int
    kv_heads: int
    projection: Literal["each", "fused", "headwise"]
    sequence: int
    batch: int
    vocab: int
    tied: bool
    loss: Literal["labels", "one hot", "take"]
    dtype: Literal["float32", "bfloat16"]
    scan: bool
    remat: Literal["none", "all", "not matmuls"]
    optimizer: Literal["sgd", "adamw", "clipped adam"]
    stream: Literal["", "sequence", "features"]
    constrained: tuple[str, ...]
    layout: str
    mixed: dict[str, Layout]
    donate: bool
    stated: Literal["nothing", "in", "in and out"]
    mixer: Literal["none", "convolution", "cumsum", "fft", "patches", "experts"] = "none"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that shard the batch."""
        return tuple(axis for axis in self.axes if axis != "tp")

    def about(self) -> str:
        """The sketch in a line."""
        attention = {"none": "MLPs", "einsum": "einsum attention", "library": "attention"}
        attention["cudnn"] = "cuDNN's attention"
        parts = [
            f"{self.layers} x {self.hidden}, mlp {self.mlp}{' gated' * self.gated}",
            attention[self.attention] + (f" {self.projection}" if self.attention != "none" else ""),
            f"{self.batch} x {self.sequence}",
            f"vocab {self.vocab}" if self.vocab else "no vocab",
            *([self.mixer] if self.mixer != "none" else []),
            "scan" if self.scan else "unrolled",
            f"remat {self.remat}",
            f"{self.dtype} {self.optimizer}",
            f"weights {self.layout}",
            f"stream {self.stream or 'whole'}",
            f"pins {', '.join(self.constrained) or 'none'}",
            f"states {self.stated}",
        ]
        return "; ".join(parts)


def spec(sketch: Sketch, *dims: str) -> P:
    """Make a spec of the axes that shard each dim, where the mesh has such axes.

    Args:
        sketch: with the mesh.
        dims: "data", "fsdp", "tp", "both" (fsdp and tp), or "" for nothing.
    """
    groups = {"data": sketch.data, "fsdp": ("fsdp",), "tp": ("tp",), "both": ("fsdp", "tp"), "": ()}
    axes_of_dims = [tuple(axis for axis in groups[dim] if axis in sketch.axes) for dim in dims]
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in axes_of_dims))


def place_spec(sketch: Sketch, position: str) -> P:
    """Return the sharding to which the activations at a position are constrained."""
    return {
        "stream": spec(
            sketch,
            "data",
            "tp" if sketch.stream == "sequence" else "",
            "tp" if sketch.stream == "features" else "",
        ),
        "hidden": spec(sketch, "data", "", "tp"),
        "qkv": spec(sketch, "data", "", "tp", *[""] * (sketch.projection != "fused")),
        "attended": spec(sketch, "data", "", "tp", ""),
        "logits": spec(sketch, "data", "", "tp"),
    }[position]


def layer_shapes(sketch: Sketch) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's weights, by name."""
    d, heads, size = sketch.hidden, sketch.heads, sketch.head_size
    shapes: dict[str, tuple[int, ...]] = {"mlp_norm": (d,)}
    if sketch.mixer == "convolution":
        shapes["taps"] = (TAPS, 1, d)
    if sketch.mixer == "experts":
        each = {"up": (EXPERTS, d, sketch.mlp), "down": (EXPERTS, sketch.mlp, d)}
        shapes |= {"router": (d, EXPERTS), **each}
    else:
        shapes |= {"up": (d, sketch.mlp), "down": (sketch.mlp, d)}
    if sketch.gated and sketch.mixer != "experts":
        shapes["gate"] = (d, sketch.mlp)
    if sketch.attention == "none":
        return shapes
    shapes |= {"attention_norm": (d,)} if not sketch.parallel else {}
    if sketch.projection == "fused":
        return shapes | {"qkv": (d, 3 * d), "out": (d, d)}
    counts = {"q": heads, "k": sketch.kv_heads, "v": sketch.kv_heads}
    if sketch.projection == "headwise":
        each = {name: (d, count, size) for name, count in counts.items()}
        return shapes | each | {"out": (heads, size, d)}
    return shapes | {n: (d, count * size) for n, count in counts.items()} | {"out": (d, d)}


def weight_spec(sketch: Sketch, name: str, shape: tuple[int, ...]) -> P:
    """Return a weight's sharding: its first and last feature dims as the sketch's layout says."""
    if len(shape) == 1 or name in ("router", "patch"):
        return P(*[None] * len(shape))
    if name == "taps":
        return spec(sketch, "", "", "tp")
    if sketch.layout == "mixed":
        layout = sketch.mixed[name]
    elif name == "embedding":
        layout = LAYOUTS[sketch.layout][0][::-1]
    else:
        layout = LAYOUTS[sketch.layout][name in _BACK]
    if len(shape) == 3 and name in ("up", "down"):
        return spec(sketch, "", *layout)
    if len(shape) == 3:  # heads stand for the features; their sizes are whole
        layout = (layout[0], "", layout[1]) if name in _BACK else (*layout, "")
    return spec(sketch, *layout)
