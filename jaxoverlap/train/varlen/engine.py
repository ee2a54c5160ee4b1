"""Attention of a batch whose sequences lie on rings of several sizes: one program, static shapes.

On each device slots stand by ring size, the largest rings first. Those of a ring of g devices are
two halves: rank i has chunk i of 2g of each of its sequences in the first half, and 2g - 1 - i in
the second, so that under a causal mask every rank has the same work in every round. From rank j,

    j = i        early x early, late x late, late x early
    j < i        late x early, early x early
    j > i        late x early, late x late

so a round is two blocks of half by half, the second with operands picked by rank. The rings run in
the order inter-node, intra-node, local; each hop is in flight under a block of attention. Masks are
by sequence and position, from the plan: what a step is compiled for does not depend on the batch.

The softmax is folded as in `passes/rings/ring_attention.py`, whose parts these are. Backward,
keys and values go round again, and the sums of their gradients travel behind them, in float32: in
bfloat16 each hop would round them once more.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.passes.rings.chunks import tied
from jaxoverlap.passes.rings.ring_attention import (
    SCORES,
    TO_KEY,
    TO_QUERY,
    SoftmaxState,
    dot,
    fold,
    per_query,
)
from jaxoverlap.train.varlen.rings import Bounds, Nodes
from jaxoverlap.train.varlen.routing import Route, send

_TILES, _TILE = 8, 256  # of the local block: at most so many, of so many queries at least


class Engine(NamedTuple):
    """What a compiled attention is made for.

    Attributes:
        nodes: the devices.
        axes: the mesh axes, manual, whose product is all devices, node by node.
        bounds: slots by ring size.
        scale: the factor of scores.
        proxies: by ring size, the rails of a hop forward and backward; (1, 1) where it has none.
    """

    nodes: Nodes
    axes: tuple[str, ...]
    bounds: Bounds
    scale: float
    proxies: tuple[tuple[int, tuple[int, int]], ...] = ()

    def route(self, size: int, *, backward: bool = False) -> Route:
        """Return the way of a hop of rings of a size."""
        rails = dict(self.proxies).get(size, (1, 1))[backward]
        return Route(self.nodes, self.axes, size, rails)


class _Where(NamedTuple):
    """The sequence and the position of each slot, i32[tokens]."""

    segment: Array
    position: Array


class _Side(NamedTuple):
    """Queries, or keys and values, with where they are in their sequences."""

    arrays: tuple[Array, ...]
    where: _Where


def attend(engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array) -> Array:
    """Attend, each sequence to itself alone and causally; call it where the axes are manual.

    Differentiable in reverse mode.

    Args:
        engine: what it is compiled for.
        q: f[slots, heads, head] of this device.
        k, v: f[slots, kv heads, head]; kv heads divide heads.
        segment: i32[devices, slots], the sequence of each device's slots; -1 has none.
        position: i32[devices, slots], positions in the sequences; slots without one have their own
            number.

    Returns:
        Like q; slots without a sequence hold numbers without meaning.
    """
    grouped = q.reshape(1, q.shape[0], k.shape[1], -1, q.shape[-1])
    out = _attention(engine, grouped, k[None], v[None], segment, position)
    return out.reshape(*q.shape[:2], v.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array
) -> Array:
    return _forward(engine, q, k, v, segment, position)[0]


def _forward(
    engine: Engine, q: Array, k: Array, v: Array, segment: Array, position: Array
) -> tuple[Array, Any]:
    outs, sums = [], []
    for size, width in engine.bounds.widths:
        ring = _Ring(engine, size, width, segment, position)
        parts = ring.slots(q), ring.slots(k), ring.slots(v)
        if outs:  # one set of rings after the other
            parts, outs[-1] = tied((parts, outs[-1]))
        out, log_sums = ring.forward(*parts)
        outs.append(out)
        sums.append(log_sums)
    out = jnp.concatenate(outs, axis=1)
    return out, (q, k, v, segment, position, out, jnp.concatenate(sums, axis=1))


def _backward(engine: Engine, kept: Any, to_out: Array) -> tuple[Any, ...]:
    q, k, v, segment, position, out, log_sums = kept
    delta = jnp.einsum("bskgd,bskgd->bskg", _wide(to_out), _wide(out))
    grads = []
    for size, width in engine.bounds.widths:
        ring = _Ring(engine, size, width, segment, position)
        parts = tuple(map(ring.slots, (q, k, v, to_out)))
        stats = ring.slots(log_sums), ring.slots(delta)
        if grads:
            parts, grads[-1] = tied((parts, grads[-1]))
        gradients = ring.backward(parts, stats)
        grads.append(gradients)
    joined = (jnp.concatenate(g, axis=1) for g in zip(*grads, strict=True))
    return (*joined, None, None)


_attention.defvjp(_forward, _backward)


class _Ring:
    """All rings of one size, on one device."""

    def __init__(self, engine: Engine, size: int, width: int, segment: Array, position: Array):
        self.engine, self.size, self.width = engine, size, width
        self.first = engine.bounds.first(size)
        self.device = lax.axis_index(engine.axes)
        self.rank = lax.rem(self.device, jnp.int32(size))
        self.where = segment, position

    def slots(self, x: Array, dim: int = 1) -> Array:
        """Return the part of an array that is these rings'."""
        return lax.slice_in_dim(x, self.first, self.first + self.width, axis=dim)

    def source(self, hop: int) -> _Where:
        """Return where the slots are that came from so many ranks back."""
        back = lax.rem(self.rank - jnp.int32(hop) + jnp.int32(self.size), jnp.int32(self.size))
        device = self.device - self.rank + back
        rows = (lax.dynamic_index_in_dim(x, device, keepdims=False) for x in self.where)
        return _Where(*(self.slots(row, 0) for row in rows))

    def halves(self, where: _Where, *arrays: Array) -> tuple[_Side, _Side]:
        """Return the early and the late chunks."""
        half = self.width // 2

        def part(low: int, high: int) -> _Side:
            cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in arrays)
            return _Side(cut, _Where(*(w[low:high] for w in where)))

        return part(0, half), part(half, self.width)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the output, like q, and the log of the sums, f32[b, slots, kv heads, group]."""
        if self.size == 1:
            return self._local(q, k, v)
        scale, route = self.engine.scale, self.engine.route(self.size)
        early_q, late_q = self.halves(self.source(0), q)
        held, states = (k, v), None
        for hop in range(self.size):
            if states is not None:
                held, states = tied((held, states))
            arriving = send(route, held) if hop + 1 < self.size else held
            early_k, late_k = self.halves(self.source(hop), *held)
            if states is None:
                early = _folded(None, early_q, early_k, scale)
                late = _folded(None, late_q, late_k, scale)
                states = early, _folded(late, late_q, early_k, scale)
            else:
                early, late = states
                late = _folded(late, late_q, early_k, scale)
                earlier = hop <= self.rank  # the rank that these keys are of is before this one
                picked = _picked(earlier, early, late)
                picked = _folded(
                    picked, _picked(earlier, early_q, late_q), _picked(earlier, early_k, late_k),
                    scale,
                )  # fmt: skip
                states = _picked(earlier, picked, early), _picked(earlier, late, picked)
            held = arriving
        assert states is not None
        outs, sums = zip(*(_finished(state, q.dtype) for state in states), strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)

    def _tiles(self) -> list[tuple[int, int]]:
        """Return the tiles of the local block's queries; each reads keys up to its own end."""
        size = max(_TILE, -(-self.width // _TILES))
        return [(low, min(low + size, self.width)) for low in range(0, self.width, size)]

    def _tile(self, low: int, high: int, k: Array, v: Array) -> _Side:
        where = self.source(0)
        cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in (k, v))
        return _Side(cut, _Where(*(w[low:high] for w in where)))

    def _local(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        where, outs, sums = self.source(0), [], []
        for low, high in self._tiles():
            queries = _Side((q[:, low:high],), _Where(*(w[low:high] for w in where)))
            state = _folded(None, queries, self._tile(0, high, k, v), self.engine.scale)
            out, log_sums = _finished(state, q.dtype)
            outs.append(out)
            sums.append(log_sums)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)

    def backward(
        self, parts: tuple[Array, ...], stats: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v, from these, the output's gradient and the stats."""
        q, k, v, to_out = parts
        own = q, to_out, *stats
        if self.size == 1:
            to_q, to_k, to_v = self._local_backward(own, k, v)
        else:
            to_q, to_k, to_v = self._ring_backward(own, k, v)
        return to_q.astype(q.dtype), to_k.astype(k.dtype), to_v.astype(v.dtype)

    def _ring_backward(
        self, own: tuple[Array, ...], k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        scale, route = self.engine.scale, self.engine.route(self.size, backward=True)
        early_q, late_q = self.halves(self.source(0), *own)
        zero = jnp.zeros(early_q.arrays[0].shape, wide(k.dtype))
        to_q, held, home, joined = (zero, zero), (k, v), None, None
        for hop in range(self.size):
            if hop:
                held, to_q = tied((held, to_q))
            arriving = send(route, held) if hop + 1 < self.size else held
            early_k, late_k = self.halves(self.source(hop), *held)
            cross = _Grads.of(late_q, early_k, scale)
            if hop == 0:
                first = _Grads.of(early_q, early_k, scale)
                second = _Grads.of(late_q, late_k, scale)
                home = _keys((cross, first), (second,))
                to_q = first.query(), second.query() + cross.query()
            else:
                earlier = hop <= self.rank
                picked = _Grads.of(
                    _picked(earlier, early_q, late_q), _picked(earlier, early_k, late_k), scale
                )
                sums = _keys((cross,), (), picked, earlier)
                if joined is not None:
                    joined, sums = tied((joined, sums))
                    sums = _added(sums, joined)
                # The sums leave before the last matmuls of this round, and hide under them.
                sums, picked, cross = tied((sums, picked, cross))
                joined = send(route, sums)
                own_q, late = picked.query(), to_q[1] + cross.query()
                to_q = to_q[0] + jnp.where(earlier, own_q, 0), late + jnp.where(earlier, 0, own_q)
            held = arriving
        assert home is not None and joined is not None
        return jnp.concatenate(to_q, axis=1), *_added(home, joined)

    def _local_backward(
        self, own: tuple[Array, ...], k: Array, v: Array
    ) -> tuple[Array, Array, Array]:
        where, to_q = self.source(0), []
        sums = tuple(jnp.zeros(x.shape, wide(x.dtype)) for x in (k, v))
        for low, high in self._tiles():
            cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in own)
            queries = _Side(cut, _Where(*(w[low:high] for w in where)))
            grads = _Grads.of(queries, self._tile(0, high, k, v), self.engine.scale)
            to_q.append(grads.query())
            sums = tuple(s.at[:, :high].add(g) for s, g in zip(sums, grads.keys, strict=True))
        return jnp.concatenate(to_q, axis=1), sums[0], sums[1]


class _Grads(NamedTuple):
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
    def of(cls, queries: _Side, keys: _Side, scale: float) -> _Grads:
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


def _keys(
    early: tuple[_Grads, ...],
    late: tuple[_Grads, ...],
    picked: _Grads | None = None,
    earlier: Array | None = None,
) -> tuple[Array, Array]:
    """Sum the gradients of early and of late keys and values, and join the halves."""
    joined = []
    for which in (0, 1):
        first = sum((g.keys[which] for g in early[1:]), early[0].keys[which])
        second = sum((g.keys[which] for g in late), jnp.zeros_like(first))
        if picked is not None and earlier is not None:
            first = first + jnp.where(earlier, picked.keys[which], 0)
            second = second + jnp.where(earlier, 0, picked.keys[which])
        joined.append(jnp.concatenate([first, second], axis=1))
    return joined[0], joined[1]


def _added(sums: tuple[Array, ...], more: tuple[Array, ...]) -> tuple[Array, Array]:
    """Add in float32 at least."""
    one, other = (_wide(a) + _wide(b) for a, b in zip(sums, more, strict=True))
    return one, other


def _picked[Tree](first: Array, one: Tree, other: Tree) -> Tree:
    """Pick `one` where `first`, else `other`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def _folded(state: SoftmaxState | None, queries: _Side, keys: _Side, scale: float) -> SoftmaxState:
    """Fold one more block into the softmax."""
    (q,), (k, v) = queries.arrays, keys.arrays
    return fold(state, _scores(q, k, queries.where, keys.where, scale), v)


def _finished(state: SoftmaxState, dtype: Any) -> tuple[Array, Array]:
    """Return the output and the log of the sums, tokens second in both."""
    out = (state.output / per_query(state.total)).astype(dtype)
    return out, jnp.moveaxis(state.greatest + jnp.log(state.total), -1, 1)


def _scores(q: Array, k: Array, queries: _Where, keys: _Where, scale: float) -> Array:
    """Compute masked scores, f32[batch, kv heads, group, queries, keys]."""
    same = queries.segment[:, None] == keys.segment[None, :]
    seen = same & (keys.position[None, :] <= queries.position[:, None])
    return jnp.where(seen, dot(SCORES, q, k) * scale, -jnp.inf)


def _wide(x: Array) -> Array:
    return x.astype(wide(x.dtype))
