"""Compute one block of attention, forward and backward, and all blocks that stay on a device.

Masks are by sequence and position. The softmax is folded as in `passes/rings/ring_attention.py`,
whose parts these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.passes.rings.ring_attention import (
    SCORES,
    TO_KEY,
    TO_QUERY,
    SoftmaxState,
    dot,
    fold,
    per_query,
)

# Tiles of what stays on a device: at most so many, of so many queries at least. Where a device has
# all slots of a group, 16 keep the scores that are there at once small.
_TILES, _TILE = 16, 512


class Where(NamedTuple):
    """The sequence and the position of each slot, i32[tokens]."""

    segment: Array
    position: Array


class Side(NamedTuple):
    """Queries, or keys and values, with where they are in their sequences."""

    arrays: tuple[Array, ...]
    where: Where


class Grads(NamedTuple):
    """The gradients that one block makes.

    Attributes:
        scores: the gradient of the scores.
        read: the keys, which the gradient of the queries reads.
        keys: the gradients of keys and of values, in float32 at least.
    """

    scores: Array
    read: Array
    keys: tuple[Array, Array]

    @classmethod
    def of(cls, queries: Side, keys: Side, scale: float) -> Grads:
        """Compute all but the gradient of the queries."""
        (q, to_out, *stats), (k, v) = queries.arrays, keys.arrays
        log_sums, delta = (jnp.moveaxis(x, 1, -1)[..., None] for x in stats)
        p = jnp.exp(_scores(q, k, queries.where, keys.where, scale) - log_sums)
        to_p = dot(SCORES, to_out, v)
        to_scores = (p * (to_p - delta) * scale).astype(q.dtype)
        return cls(
            to_scores, k, (dot(TO_KEY, to_scores, q), dot(TO_KEY, p.astype(q.dtype), to_out))
        )

    def query(self) -> Array:
        """Compute the gradient of the queries."""
        return dot(TO_QUERY, self.scores, self.read)


def folded(state: SoftmaxState | None, queries: Side, keys: Side, scale: float) -> SoftmaxState:
    """Fold one more block into the softmax."""
    (q,), (k, v) = queries.arrays, keys.arrays
    return fold(state, _scores(q, k, queries.where, keys.where, scale), v)


def finished(state: SoftmaxState, dtype: Any) -> tuple[Array, Array]:
    """Return the output and the log of the sums, tokens second in both."""
    out = (state.output / per_query(state.total)).astype(dtype)
    return out, jnp.moveaxis(state.greatest + jnp.log(state.total), -1, 1)


def _scores(q: Array, k: Array, queries: Where, keys: Where, scale: float) -> Array:
    """Compute masked scores, f32[batch, kv heads, group, queries, keys]."""
    same = queries.segment[:, None] == keys.segment[None, :]
    seen = same & (keys.position[None, :] <= queries.position[:, None])
    return jnp.where(seen, dot(SCORES, q, k) * scale, -jnp.inf)


def local_forward(where: Where, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Attend where all keys are on the device; a tile of queries reads keys up to its own end.

    Slots stand so that what a query sees is before it or beside it.

    Returns:
        The output, like q, and the log of the sums, f32[b, slots, kv heads, group].
    """
    outs, sums = [], []
    for low, high in _tiles(q.shape[1]):
        state = folded(None, _side(where, low, high, q), _side(where, 0, high, k, v), scale)
        out, log_sums = finished(state, q.dtype)
        outs.append(out)
        sums.append(log_sums)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)


def local_backward(
    where: Where, own: tuple[Array, ...], k: Array, v: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; `own` is q, the output's gradient and the statistics."""
    to_q = []
    sums = tuple(jnp.zeros(x.shape, wide(x.dtype)) for x in (k, v))
    for low, high in _tiles(k.shape[1]):
        grads = Grads.of(_side(where, low, high, *own), _side(where, 0, high, k, v), scale)
        to_q.append(grads.query())
        sums = tuple(s.at[:, :high].add(g) for s, g in zip(sums, grads.keys, strict=True))
    return jnp.concatenate(to_q, axis=1), sums[0], sums[1]


def _tiles(width: int) -> list[tuple[int, int]]:
    size = max(_TILE, -(-width // _TILES))
    return [(low, min(low + size, width)) for low in range(0, width, size)]


def _side(where: Where, low: int, high: int, *arrays: Array) -> Side:
    cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in arrays)
    return Side(cut, Where(*(w[low:high] for w in where)))


def in_float32(x: Array) -> Array:
    """Return numbers in float32 at least."""
    return x.astype(wide(x.dtype))
