"""A 7B GPT step in plain JAX, with as many or as few sharding constraints as one cares to write.

People pin the activations of a train step to different degrees; what is not pinned, XLA's
partitioner chooses. Weights are [data, model] or [model, data] in every one of these steps, and the
residual stream is [data, model, None]: Megatron's tensor and sequence parallelism, with FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

MESH = {"fsdp": 8, "tp": 8}

STREAM = {"stream": P("fsdp", "tp", None)}
MEGATRON = STREAM | {"heads": P("fsdp", None, "tp", None), "inner": P("fsdp", None, "tp")}
EVERYWHERE = MEGATRON | {
    "scores": P("fsdp", "tp", None, None),
    "attended": P("fsdp", None, "tp", None),
    "logits": P("fsdp", None, "tp"),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the step; the defaults are a 7B GPT's.

    Attention is "scores", written out, or "cudnn": the fused kernel, which needs no GPU to compile.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    mlp: int = 16384
    vocab: int = 32768
    batch: int = 64
    sequence: int = 4096
    attention: str = "scores"


WEIGHTS = {  # shardings; the first dim of those in "layers" is the scan's
    "embedding": P("tp", "fsdp"),
    "head": P("fsdp", "tp"),
    "layers": {
        "attention_norm": P(None, None),
        "mlp_norm": P(None, None),
        "q": P(None, "fsdp", "tp"),
        "k": P(None, "fsdp", "tp"),
        "v": P(None, "fsdp", "tp"),
        "out": P(None, "tp", "fsdp"),
        "up": P(None, "fsdp", "tp"),
        "down": P(None, "tp", "fsdp"),
    },
}
TOKENS = P("fsdp", "tp")


def shapes(sizes: Sizes) -> dict[str, Any]:
    """Return the shapes of the weights, all float32."""
    n, d, f, v = sizes.layers, sizes.hidden, sizes.mlp, sizes.vocab
    square = (n, d, d)
    layers = dict(attention_norm=(n, d), mlp_norm=(n, d), up=(n, d, f), down=(n, f, d))
    layers |= dict(q=square, k=square, v=square, out=square)
    return {"embedding": (v, d), "head": (d, v), "layers": layers}


def abstract_args(sizes: Sizes, mesh: Mesh) -> tuple[Any, ...]:
    """(weights, optimizer's state, inputs, targets) as shapes with shardings."""

    def at(shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(at, shapes(sizes), WEIGHTS, is_leaf=lambda x: isinstance(x, tuple))
    moments = jax.tree.map(
        lambda leaf: leaf if leaf.ndim else at((), P(), leaf.dtype),
        optax.tree.map_params(
            optimizer(), lambda _, w: w, jax.eval_shape(optimizer().init, weights), weights
        ),
    )
    tokens = at((sizes.batch, sizes.sequence), TOKENS, jnp.int32)
    return weights, moments, tokens, tokens


def optimizer() -> optax.GradientTransformation:
    return optax.adam(3e-4)


Pin = Callable[[jax.Array, str], jax.Array]
Einsum = Callable[..., Any]
MLP = Callable[[jax.Array, jax.Array, jax.Array, Pin], jax.Array]  # of x, up and down


def plain_mlp(x: jax.Array, up: jax.Array, down: jax.Array, pin: Pin) -> jax.Array:
    """Up, GELU, down."""
    inner = pin(jnp.einsum("bsd,df->bsf", x, up), "inner")
    inner = pin(jax.nn.gelu(inner), "inner")
    return jnp.einsum("bsf,fd->bsd", inner, down)


def rules_mlp(x: jax.Array, up: jax.Array, down: jax.Array, pin: Pin) -> jax.Array:
    """Up, GELU, down, by matmuls that partition themselves."""
    inner = pin(jaxoverlap.einsum("bsd,df->bsf", x, up), "inner")
    return jaxoverlap.einsum("bsf,fd->bsd", pin(jax.nn.gelu(inner), "inner"), down)


def make_step(
    sizes: Sizes,
    mesh: Mesh,
    pinned: dict[str, P],
    mlp: MLP = plain_mlp,
    einsum: Einsum = jnp.einsum,
    policy: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A jitted step(weights, moments, inputs, targets) -> (weights, moments, loss).

    Args:
        sizes: of the model and the batch.
        mesh: with the axes of MESH.
        pinned: where activations are constrained to lie, by name: stream, heads, scores, inner,
            attended, logits.
        mlp: of every layer.
        einsum: all other matmuls; `jaxoverlap.einsum` has the three of queries, keys and values as
            one.
        policy: what the remat of a layer keeps; None: nothing.
    """

    def pin(x: jax.Array, name: str) -> jax.Array:
        if name not in pinned:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, pinned[name]))

    def step(weights, moments, inputs, targets):
        loss, gradients = jax.value_and_grad(loss_of)(
            weights, inputs, targets, sizes, pin, mlp, einsum, policy
        )
        updates, moments = optimizer().update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    at = jax.tree.map(lambda leaf: leaf.sharding, abstract_args(sizes, mesh))
    replicated = NamedSharding(mesh, P())
    return jax.jit(
        step, in_shardings=at, out_shardings=(*at[:2], replicated), donate_argnums=(0, 1)
    )


def loss_of(
    weights: Any,
    inputs: jax.Array,
    targets: jax.Array,
    sizes: Sizes,
    pin: Pin,
    mlp: MLP,
    einsum: Einsum = jnp.einsum,
    policy: Callable[..., Any] | None = None,
) -> jax.Array:
    """The mean cross-entropy of the next token, in nats; matmuls are in bfloat16."""
    x = pin(weights["embedding"].astype(jnp.bfloat16)[inputs], "stream")

    def layer(x, weights):
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        return block(x, weights, sizes, pin, mlp, einsum), None

    remat = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    x = jax.lax.scan(remat, x, weights["layers"])[0]
    logits = pin(einsum("bsd,dv->bsv", x, weights["head"].astype(jnp.bfloat16)), "logits")
    wide = logits.astype(jnp.float32)
    at_target = jnp.sum(wide * jax.nn.one_hot(targets, sizes.vocab), axis=-1)
    return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - at_target)


def block(
    x: jax.Array,
    weights: dict[str, jax.Array],
    sizes: Sizes,
    pin: Pin,
    mlp: MLP,
    einsum: Einsum = jnp.einsum,
) -> jax.Array:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    y = norm(x, weights["attention_norm"])
    made = project(y, [weights[n] for n in "qkv"], einsum)
    q, k, v = (heads(projected, sizes, pin) for projected in made)
    if sizes.attention == "cudnn":
        fused = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        attended = pin(fused, "attended").reshape(x.shape)
    else:
        attended = attention(q, k, v, pin, einsum).reshape(x.shape)
    x = pin(x + einsum("bse,ed->bsd", attended, weights["out"]), "stream")
    y = norm(x, weights["mlp_norm"])
    return pin(x + mlp(y, weights["up"], weights["down"], pin), "stream")


def project(x: jax.Array, weights: list[jax.Array], einsum: Einsum) -> list[jax.Array]:
    if einsum is jaxoverlap.einsum:
        return list(jaxoverlap.einsum("bsd,de->bse", x, weights))
    return [einsum("bsd,de->bse", x, weight) for weight in weights]


def heads(x: jax.Array, sizes: Sizes, pin: Pin) -> jax.Array:
    return pin(x.reshape(*x.shape[:2], sizes.heads, -1), "heads")


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, pin: Pin, einsum: Einsum = jnp.einsum
) -> jax.Array:
    """Causal attention of [batch, sequence, heads, size], with scores written out."""
    scores = einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    causal = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    scores = pin(jnp.where(causal, scores, -jnp.inf), "scores")
    probabilities = pin(jax.nn.softmax(scores).astype(q.dtype), "scores")
    return pin(einsum("bnqk,bknh->bqnh", probabilities, v), "attended")


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last dim."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale
