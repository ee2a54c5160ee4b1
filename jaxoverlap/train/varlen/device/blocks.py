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
from jaxoverlap.train.varlen.costs import WHOLE_TILE

TILE = WHOLE_TILE  # slots of a tile of what a device attends to alone
_LEAST = -1e30  # the greatest score of a softmax that nothing is in


class Where(NamedTuple):
    """The sequence and the position of each slot, i32[tokens]."""

    segment: Array
    position: Array


class AttentionSide(NamedTuple):
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
    def of(cls, queries: AttentionSide, keys: AttentionSide, scale: float) -> Grads:
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


def folded(
    state: SoftmaxState | None, queries: AttentionSide, keys: AttentionSide, scale: float
) -> SoftmaxState:
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


class _Tiles(NamedTuple):
    """Slots in tiles, of which a tile of queries needs the keys of few.

    Attributes:
        size: slots of a tile.
        used: i32[], tiles up to the last that has a token.
        first: i32[tiles], the first tile of keys that a tile of queries sees any of.
        where: of the slots, padded to full tiles.
    """

    size: int
    used: Array
    first: Array
    where: Where

    @classmethod
    def of(cls, where: Where) -> _Tiles:
        """Return the tiles of sequences that stand one after the other, empty slots last."""
        slots = where.segment.size
        size = min(TILE, slots)
        more = -slots % size
        segment = jnp.pad(where.segment, (0, more), constant_values=-1)
        index = jnp.arange(slots + more, dtype=jnp.int32)
        position = jnp.where(segment < 0, index, jnp.pad(where.position, (0, more)))
        begins = jnp.where(segment < 0, index, index - position)
        first = begins.reshape(-1, size).min(axis=1) // jnp.int32(size)
        used = -(-jnp.sum(segment >= 0, dtype=jnp.int32) // jnp.int32(size))
        return cls(size, used, first, Where(segment, position))

    def padded(self, *arrays: Array) -> tuple[Array, ...]:
        """Pad arrays, [b, slots, ...], to a multiple of the tile size."""
        more = self.where.segment.size - arrays[0].shape[1]
        return tuple(jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) for x in arrays)

    def side(self, index: Array, *arrays: Array) -> AttentionSide:
        """Return one tile of arrays."""
        cut = tuple(self.tile(x, index) for x in arrays)
        return AttentionSide(cut, Where(*(self.tile(w[None], index)[0] for w in self.where)))

    def tile(self, x: Array, index: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, index * jnp.int32(self.size), self.size, axis=1)

    def put(self, x: Array, index: Array, tile: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, tile, index * jnp.int32(self.size), axis=1)


def local_forward(where: Where, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Attend where all keys are on the device, in tiles; skip those that the mask empties.

    A sequence's slots stand side by side, and empty slots last.

    Returns:
        The output, like q, and the log of the sums, f32[b, slots, kv heads, group]; zero where all
        of a tile is empty.
    """
    tiles, slots = _Tiles.of(where), q.shape[1]
    q, k, v = tiles.padded(q, k, v)
    one = tiles.tile(q, jnp.int32(0))
    scores = jnp.zeros((*one.shape[:1], *one.shape[2:4], one.shape[1]), wide(q.dtype))
    nothing = SoftmaxState(
        jnp.zeros((*one.shape[:-1], v.shape[-1]), scores.dtype), scores + _LEAST, scores
    )  # fmt: skip

    def attend(row: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        queries = tiles.side(row, q)

        def fold_tile(column: Array, state: SoftmaxState) -> SoftmaxState:
            return folded(state, queries, tiles.side(column, k, v), scale)

        state = lax.fori_loop(tiles.first[row], row + 1, fold_tile, nothing)
        new = finished(state, q.dtype)
        return tiles.put(results[0], row, new[0]), tiles.put(results[1], row, new[1])

    out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    results = out, jnp.zeros(q.shape[:-1], scores.dtype)
    out, sums = lax.fori_loop(0, tiles.used, attend, results)
    return out[:, :slots], sums[:, :slots]


def local_backward(
    where: Where, own: tuple[Array, ...], k: Array, v: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; `own` is q, the output's gradient and the statistics."""
    tiles, slots = _Tiles.of(where), k.shape[1]
    own, (k, v) = tiles.padded(*own), tiles.padded(k, v)
    zeros = tuple(jnp.zeros(x.shape, wide(x.dtype)) for x in (own[0], k, v))

    def attend(row: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        queries = tiles.side(row, *own)

        def add(column: Array, carried: tuple[Array, ...]) -> tuple[Array, ...]:
            to_q, *to_keys = carried
            grads = Grads.of(queries, tiles.side(column, k, v), scale)
            added = (
                tiles.put(x, column, tiles.tile(x, column) + g)
                for x, g in zip(to_keys, grads.keys, strict=True)
            )
            return to_q + grads.query(), *added

        start = jnp.zeros(queries.arrays[0].shape, sums[0].dtype), *sums[1:]
        to_q, *to_keys = lax.fori_loop(tiles.first[row], row + 1, add, start)
        return tiles.put(sums[0], row, to_q), *to_keys

    to_q, to_k, to_v = lax.fori_loop(0, tiles.used, attend, zeros)
    return to_q[:, :slots], to_k[:, :slots], to_v[:, :slots]


def in_float32(x: Array) -> Array:
    """Return numbers in float32 at least."""
    return x.astype(wide(x.dtype))
