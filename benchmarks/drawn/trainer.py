"""The train step of a sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.drawn.sketch import (
    EXPERTS,
    PATCH,
    TAPS,
    Sketch,
    layer_shapes,
    place_spec,
    spec,
    weight_spec,
)
from benchmarks.drawn.step import Built

Tree = Any

_REMAT = {
    "none": lambda layer: layer,
    "all": jax.checkpoint,
    "not matmuls": partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def build(sketch: Sketch, mesh: Mesh) -> Built:
    """The jitted step(weights, state, inputs, targets) -> (weights, state, loss) of a sketch."""
    optimizer, pin = optimizer_of(sketch), Pin(mesh, sketch)
    args = abstract_args(sketch, mesh)

    def step(weights: Tree, state: Tree, inputs: jax.Array, targets: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, targets, sketch, pin)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    stated: dict[str, Any] = {}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, args)
    if sketch.stated != "nothing":
        stated["in_shardings"] = shardings
    if sketch.stated == "in and out":
        stated["out_shardings"] = (*shardings[:2], NamedSharding(mesh, P()))
    donated = (0, 1) if sketch.donate else ()
    return Built(jax.jit(step, donate_argnums=donated, **stated), args)


@dataclass(frozen=True)
class Pin:
    """Constrain the activations at a position, if the sketch has a constraint there.

    Attributes:
        mesh: the mesh of the step.
        sketch: the step.
    """

    mesh: Mesh
    sketch: Sketch

    def __call__(self, x: jax.Array, position: str) -> jax.Array:
        if position not in self.sketch.constrained:
            return x
        sharding = NamedSharding(self.mesh, place_spec(self.sketch, position))
        return jax.lax.with_sharding_constraint(x, sharding)


def optimizer_of(sketch: Sketch) -> optax.GradientTransformation:
    if sketch.optimizer == "sgd":
        return optax.sgd(1e-2)
    if sketch.optimizer == "adamw":
        return optax.adamw(3e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))


# -- arguments -------------------------------------------------------------------------------------


def abstract_args(sketch: Sketch, mesh: Mesh) -> tuple[Tree, Tree, Tree, Tree]:
    """(weights, state, inputs, targets) as shapes with shardings."""

    def at(shape: tuple[int, ...], where: P, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    def weight(name: str, shape: tuple[int, ...], stacked: bool = False) -> jax.ShapeDtypeStruct:
        where = weight_spec(sketch, name, shape)
        if stacked:
            shape, where = (sketch.layers, *shape), P(None, *where)
        return at(shape, where, sketch.dtype)

    layer = layer_shapes(sketch)
    stacked = {name: weight(name, shape, stacked=True) for name, shape in layer.items()}
    unrolled = [{name: weight(name, s) for name, s in layer.items()} for _ in range(sketch.layers)]
    weights: dict[str, Any] = {"layers": stacked if sketch.scan else unrolled}
    weights["norm"] = weight("norm", (sketch.hidden,))
    data = spec(sketch, "data", "", "")
    shape = (sketch.batch, sketch.sequence, sketch.hidden)
    inputs = at(shape, data, jnp.bfloat16)
    if sketch.mixer == "patches":
        weights["patch"] = weight("patch", (PATCH, PATCH, 3, sketch.hidden))
        image = (sketch.batch, 32 * PATCH, sketch.sequence // 32 * PATCH, 3)
        images = at(image, P(*data[:1], None, None, None), jnp.bfloat16)
        return weights, _moments(sketch, weights, mesh), images, inputs
    if sketch.vocab:
        inputs = at(shape[:2], P(*data[:2]), jnp.int32)
        weights["embedding"] = weight("embedding", (sketch.vocab, sketch.hidden))
        if not sketch.tied:
            weights["head"] = weight("head", (sketch.hidden, sketch.vocab))
    return weights, _moments(sketch, weights, mesh), inputs, inputs


def _moments(sketch: Sketch, weights: Tree, mesh: Mesh) -> Tree:
    """The optimizer's state: moments sharded as their weights, counts replicated."""
    optimizer = optimizer_of(sketch)
    state = jax.eval_shape(optimizer.init, weights)
    like = optax.tree.map_params(optimizer, lambda _, w: w, state, weights)
    replicated = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda x: x if x.ndim else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), like
    )


# -- the model ------------------------------------------------------------------------------------


def loss_of(weights: Tree, inputs: jax.Array, targets: jax.Array, sketch: Sketch, pin: Pin) -> Any:
    """The mean squared error of vectors, or the mean cross-entropy of tokens in nats."""
    x = weights["embedding"].astype(jnp.bfloat16)[inputs] if sketch.vocab else inputs
    if sketch.mixer == "patches":
        x = patches(inputs, weights["patch"].astype(jnp.bfloat16))
    x = stack(weights["layers"], pin(x, "stream"), sketch, pin)
    x = norm(x, weights["norm"])
    if not sketch.vocab:
        return jnp.mean(jnp.square((x - targets).astype(jnp.float32)))
    head = weights["embedding"].T if sketch.tied else weights["head"]
    logits = pin(x @ head.astype(jnp.bfloat16), "logits").astype(jnp.float32)
    return jnp.mean(cross_entropy(logits, targets, sketch))


def stack(layers: Tree, x: jax.Array, sketch: Sketch, pin: Pin) -> jax.Array:
    """All layers, scanned or one after the other."""

    def layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        return block(x, weights, sketch, pin), None

    again = _REMAT[sketch.remat](layer)
    if sketch.scan:
        return jax.lax.scan(again, x, layers)[0]
    for weights in layers:
        x, _ = again(x, weights)
    return x


def block(x: jax.Array, weights: dict[str, jax.Array], sketch: Sketch, pin: Pin) -> jax.Array:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), or both at once."""
    if sketch.mixer in MIXERS:
        x = x + MIXERS[sketch.mixer](norm(x, weights["mlp_norm"]), weights)
    if sketch.attention == "none":
        return pin(x + mlp(norm(x, weights["mlp_norm"]), weights, sketch, pin), "stream")
    if sketch.parallel:
        y = norm(x, weights["mlp_norm"])
        both = attention(y, weights, sketch, pin) + mlp(y, weights, sketch, pin)
        return pin(x + both, "stream")
    x = x + attention(norm(x, weights["attention_norm"]), weights, sketch, pin)
    x = pin(x, "stream")
    return pin(x + mlp(norm(x, weights["mlp_norm"]), weights, sketch, pin), "stream")


def mlp(x: jax.Array, weights: dict[str, jax.Array], sketch: Sketch, pin: Pin) -> jax.Array:
    """Up, an activation or a gate, down."""
    if sketch.mixer == "experts":
        return experts(x, weights, sketch, pin.mesh)
    hidden = pin(x @ weights["up"], "hidden")
    active = jax.nn.silu(x @ weights["gate"]) * hidden if sketch.gated else jax.nn.gelu(hidden)
    return pin(active, "hidden") @ weights["down"]


def experts(x: jax.Array, weights: dict[str, jax.Array], sketch: Sketch, mesh: Mesh) -> jax.Array:
    """Multiply each token with its best expert's weights, in groups of the tokens of a device.

    All axes are manual: XLA partitions no sort or grouped matmul where some are.
    """

    def local(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        scores = jax.nn.softmax((tokens @ router).astype(jnp.float32))
        order = jnp.argsort(jnp.argmax(scores, -1))
        sizes = jnp.bincount(jnp.argmax(scores, -1), length=EXPERTS).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], up, sizes))
        made = jnp.zeros_like(tokens).at[order].set(jax.lax.ragged_dot(hidden, down, sizes))
        return (made * scores.max(-1, keepdims=True).astype(made.dtype)).reshape(x.shape)

    operands = x, weights["router"], weights["up"], weights["down"]
    rows = spec(sketch, "data")
    return jax.shard_map(local, mesh=mesh, in_specs=(rows, P(), P(), P()), out_specs=rows)(
        *operands
    )


def convolved(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Convolve each feature over the last positions of the sequence, as Mamba does."""
    return jax.nn.silu(
        jax.lax.conv_general_dilated(
            x, weights["taps"], (1,), [(TAPS - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1],
        )
    )  # fmt: skip


def summed(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Return the mean of each position and those before it."""
    counts = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)[:, None]
    return (jnp.cumsum(x.astype(jnp.float32), axis=1) / counts).astype(x.dtype)


def transformed(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Mix positions by a Fourier transform over the sequence, as FNet does."""
    return jnp.fft.fft(x.astype(jnp.float32), axis=1).real.astype(x.dtype) / math.sqrt(x.shape[1])


MIXERS = {"convolution": convolved, "cumsum": summed, "fft": transformed}


def patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve images, [batch, height, width, channels], to vectors of patches."""
    numbers = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(
        images, kernel, (PATCH, PATCH), "VALID", dimension_numbers=numbers
    )
    return made.reshape(made.shape[0], -1, made.shape[-1])


def attention(x: jax.Array, weights: dict[str, jax.Array], sketch: Sketch, pin: Pin) -> jax.Array:
    """Causal attention with its projections."""
    q, k, v = projected(x, weights, sketch, pin)
    if sketch.attention == "einsum":
        attended = written_out(q, k, v)
    else:
        implementation = "cudnn" if sketch.attention == "cudnn" else None
        attended = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )
    attended = pin(attended, "attended")
    if sketch.projection == "headwise":
        return jnp.einsum("bsnh,nhd->bsd", attended, weights["out"])
    return attended.reshape(x.shape) @ weights["out"]


def projected(
    x: jax.Array, weights: dict[str, jax.Array], sketch: Sketch, pin: Pin
) -> list[jax.Array]:
    """Queries, keys and values: [batch, sequence, heads, size]."""
    shape = (*x.shape[:2], -1, sketch.head_size)
    if sketch.projection == "fused":
        parts = jnp.split(pin(x @ weights["qkv"], "qkv"), 3, axis=-1)
        return [part.reshape(shape) for part in parts]
    if sketch.projection == "headwise":
        parts = [jnp.einsum("bsd,dnh->bsnh", x, weights[name]) for name in "qkv"]
    else:
        parts = [(x @ weights[name]).reshape(shape) for name in "qkv"]
    return [pin(part, "qkv") for part in parts]


def written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with its scores written out; several heads may share a key."""
    times = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, times, axis=2) for x in (k, v)) if times > 1 else (k, v)
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(q.dtype)
    return jnp.einsum("bnqk,bknh->bqnh", weights, v)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array, sketch: Sketch) -> jax.Array:
    """Return the cross-entropy of each token in nats, in one of three common forms."""
    if sketch.loss == "labels":
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if sketch.loss == "one hot":
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, sketch.vocab))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen[..., 0]
