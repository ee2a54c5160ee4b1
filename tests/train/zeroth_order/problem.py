"""A small model of blocks with a head tied to its embedding, and its batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxoverlap.train import zeroth_order as zo

VOCAB, HIDDEN, LAYERS, ROWS, LENGTH = 16, 8, 4, 16, 6


def params(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def of(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.3, dtype)

    blocks = dict(
        norm=jnp.ones((LAYERS, HIDDEN), dtype),
        up=of(LAYERS, HIDDEN, 2 * HIDDEN),
        bias=of(LAYERS, 2 * HIDDEN),
        down=of(LAYERS, 2 * HIDDEN, HIDDEN),
    )
    return dict(
        outer=dict(embedding=of(VOCAB, HIDDEN), norm=jnp.ones(HIDDEN, dtype)), blocks=blocks
    )


def begin(outer: Any, batch: Any) -> jax.Array:
    return outer["embedding"][batch["tokens"][:, :-1]]


def block(layer: Any, x: jax.Array) -> jax.Array:
    h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * layer["norm"]
    return x + jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]


def end(outer: Any, x: jax.Array, batch: Any) -> jax.Array:
    logits = (x * outer["norm"]) @ outer["embedding"].T
    logits = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], -1).mean()


MODEL = zo.Blocks(begin, block, end)


def batch(step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((7, step))
    return dict(tokens=rng.integers(0, VOCAB, (rows, LENGTH + 1)).astype(np.int32))


def mesh(**axes: int) -> Mesh:
    size = int(np.prod(list(axes.values())))
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=jax.devices()[:size])
