"""Rings whose blocks are matmuls under a mask, on any device: all static slots by all others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.passes.rings.chunks import tied
from jaxoverlap.train.varlen.device.blocks import (
    AttentionSide,
    Grads,
    Where,
    finished,
    folded,
    in_float32,
)
from jaxoverlap.train.varlen.device.packed import Chunks
from jaxoverlap.train.varlen.device.routing import send
from jaxoverlap.train.varlen.device.sets import RingSet


class MatmulRings(RingSet):
    """Sequences of a ring round which keys and values go, attended to by matmuls.

    The early chunks have to be the first half of the slots. In a program for the fused kernel slots
    are sequence by sequence (`packed.py`), and are put in halves here.
    """

    @functools.cached_property
    def _order(self) -> Array:
        """The order that puts slots in halves, i32[ranks, slots]; `width` where none is."""
        most, half = self.engine.bounds.ringed, self.width // 2
        chunks = Chunks.of(self.ring, most)
        index = jnp.arange(self.width, dtype=jnp.int32)
        run = jnp.minimum(chunks.run, most - 1)
        early = (jnp.take_along_axis(x, run, axis=1) for x in (chunks.starts, chunks.early))
        late, held = index >= sum(early), chunks.run < most
        place = jnp.where(
            late, half + jnp.cumsum(held & late, axis=1), jnp.cumsum(held & ~late, axis=1)
        )
        place = jnp.where(held, place - 1, self.width)
        ranks, none = jnp.arange(self.size)[:, None], jnp.full(place.shape, self.width, jnp.int32)
        return none.at[ranks, place].set(index, mode="drop")

    def source(self, hop: int) -> Where:
        """Return where the slots are that came from so many ranks back, in halves."""
        where = super().source(hop)
        if not self.engine.bounds.ringed:
            return where
        back = lax.rem(self.rank - jnp.int32(hop) + jnp.int32(self.size), jnp.int32(self.size))
        order = lax.dynamic_index_in_dim(self._order, back, keepdims=False)
        segment = jnp.take(where.segment, order, fill_value=-1)
        position = jnp.take(where.position, order, fill_value=0)
        return Where(segment, jnp.where(segment < 0, jnp.arange(self.width), position))

    def given(self, *values: Array) -> tuple[Array, ...]:
        """Return the part of values of all slots that is these rings', in halves."""
        values = super().given(*values)
        if not self.engine.bounds.ringed:
            return values
        order = lax.dynamic_index_in_dim(self._order, self.rank, keepdims=False)
        return tuple(jnp.take(x, order, axis=1, fill_value=0) for x in values)

    def returned(self, *values: Array) -> tuple[Array, ...]:
        """Return results in the order of the slots."""
        if not self.engine.bounds.ringed:
            return values
        order = lax.dynamic_index_in_dim(self._order, self.rank, keepdims=False)
        return tuple(jnp.zeros_like(x).at[:, order].set(x, mode="drop") for x in values)

    def halves(self, where: Where, *arrays: Array) -> tuple[AttentionSide, AttentionSide]:
        """Return the early and the late chunks."""
        half = self.width // 2

        def part(low: int, high: int) -> AttentionSide:
            cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in arrays)
            return AttentionSide(cut, Where(*(w[low:high] for w in where)))

        return part(0, half), part(half, self.width)

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        scale, route = self.engine.scale, self.engine.route(self.size)
        early_q, late_q = self.halves(self.source(0), q)
        held, states = (k, v), None
        for hop in range(self.size):
            if states is not None:
                held, states = tied((held, states))
            arriving = send(route, held) if hop + 1 < self.size else held
            early_k, late_k = self.halves(self.source(hop), *held)
            if states is None:
                early = folded(None, early_q, early_k, scale)
                late = folded(None, late_q, late_k, scale)
                states = early, folded(late, late_q, early_k, scale)
            else:
                early, late = states
                late = folded(late, late_q, early_k, scale)
                earlier = hop <= self.rank  # the rank that these keys are of is before this one
                picked = _picked(earlier, early, late)
                picked = folded(
                    picked, _picked(earlier, early_q, late_q), _picked(earlier, early_k, late_k),
                    scale,
                )  # fmt: skip
                states = _picked(earlier, picked, early), _picked(earlier, late, picked)
            held = arriving
        assert states is not None
        outs, sums = zip(*(finished(state, q.dtype) for state in states), strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=1)

    def _backward(self, own: tuple[Array, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        scale, route = self.engine.scale, self.engine.route(self.size, backward=True)
        early_q, late_q = self.halves(self.source(0), *own)
        zero = jnp.zeros(early_q.arrays[0].shape, wide(k.dtype))
        to_q, held, home, joined = (zero, zero), (k, v), None, None
        for hop in range(self.size):
            if hop:
                held, to_q = tied((held, to_q))
            arriving = send(route, held) if hop + 1 < self.size else held
            early_k, late_k = self.halves(self.source(hop), *held)
            cross = Grads.of(late_q, early_k, scale)
            if hop == 0:
                first = Grads.of(early_q, early_k, scale)
                second = Grads.of(late_q, late_k, scale)
                home = _keys((cross, first), (second,))
                to_q = first.query(), second.query() + cross.query()
            else:
                earlier = hop <= self.rank
                picked = Grads.of(
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


def _keys(
    early: tuple[Grads, ...],
    late: tuple[Grads, ...],
    picked: Grads | None = None,
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
    one, other = (in_float32(a) + in_float32(b) for a, b in zip(sums, more, strict=True))
    return one, other


def _picked[Tree](first: Array, one: Tree, other: Tree) -> Tree:
    """Pick `one` where `first`, else `other`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)
