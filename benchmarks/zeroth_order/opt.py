"""OPT (arXiv 2205.01068) in shapes: pre-norm blocks, the head tied to the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.train.zeroth_order.blocks import Blocks

VOCAB, POSITIONS = 50272, 2050


@dataclass(frozen=True)
class Size:
    """A model's layers, width and heads; the published ones are in SIZES."""

    layers: int
    hidden: int
    heads: int
    vocab: int = VOCAB

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(self)))


SIZES = {
    "1.3b": Size(24, 2048, 32),
    "2.7b": Size(32, 2560, 32),
    "6.7b": Size(32, 4096, 32),
    "13b": Size(40, 5120, 40),
    "30b": Size(48, 7168, 56),
    "66b": Size(64, 9216, 72),
    "175b": Size(96, 12288, 96),
}


def shapes(size: Size, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Return {"outer", "blocks"} as shapes; blocks have a first dim of layers."""
    d, layers = size.hidden, size.layers

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def stacked(*shape: int) -> jax.ShapeDtypeStruct:
        return of(layers, *shape)

    norm = dict(scale=stacked(d), bias=stacked(d))
    linear = lambda a, b: dict(weight=stacked(a, b), bias=stacked(b))  # noqa: E731
    blocks = dict(
        attention_norm=norm,
        q=linear(d, d),
        k=linear(d, d),
        v=linear(d, d),
        out=linear(d, d),
        mlp_norm=norm,
        up=linear(d, 4 * d),
        down=linear(4 * d, d),
    )
    outer = dict(
        embedding=of(size.vocab, d),
        positions=of(POSITIONS, d),
        norm=dict(scale=of(d), bias=of(d)),
    )
    return dict(outer=outer, blocks=blocks)


def model(size: Size) -> Blocks:
    """Return OPT's forward pass by blocks; batches are {"tokens": int32 [batch, sequence + 1]}."""

    def begin(outer: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"][:, :-1]
        return outer["embedding"][tokens] + outer["positions"][2 : 2 + tokens.shape[1]]

    def block(layer: Any, x: jax.Array) -> jax.Array:
        x = x + attention(layer, normed(layer["attention_norm"], x), size.heads)
        h = jax.nn.relu(linear(layer["up"], normed(layer["mlp_norm"], x)))
        return x + linear(layer["down"], h)

    def end(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
        return cross_entropy(outer["embedding"], normed(outer["norm"], x), batch["tokens"][:, 1:])

    return Blocks(begin, block, end)


def linear(weights: Any, x: jax.Array) -> jax.Array:
    return x @ weights["weight"] + weights["bias"]


def normed(weights: Any, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * weights["scale"] + weights["bias"]).astype(x.dtype)


def attention(layer: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal attention, a head at a time: scores of one head are on the device at once."""
    batch, sequence, d = x.shape

    def split(name: str) -> jax.Array:  # [heads, batch, sequence, size]
        return linear(layer[name], x).reshape(batch, sequence, heads, -1).transpose(2, 0, 1, 3)

    causal = jnp.tril(jnp.ones((sequence, sequence), bool))

    def head(qkv: Any) -> jax.Array:
        q, k, v = qkv
        scores = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32) / math.sqrt(d // heads)
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        return jnp.einsum("bqk,bkd->bqd", weights.astype(x.dtype), v)

    many = jax.lax.map(head, (split("q"), split("k"), split("v")), batch_size=min(heads, 8))
    return linear(layer["out"], many.transpose(1, 2, 0, 3).reshape(batch, sequence, d))


def cross_entropy(table: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)
    at_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - at_target)
