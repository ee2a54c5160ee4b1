"""Attend over rings of several sizes, each sharding its sequences, in one static program.

On each device slots are ordered by ring size, the largest rings first. Those of a ring of g devices
are two halves: rank i has chunk i of 2g of each of its sequences in the first half, and 2g - 1 - i
in the second, so that under a causal mask every rank has the same work in every round. From rank j,

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
from jaxoverlap.train.varlen.device import fused
from jaxoverlap.train.varlen.device.blocks import (
    AttentionSide,
    Grads,
    Where,
    finished,
    folded,
    in_float32,
    local_backward,
    local_forward,
)
from jaxoverlap.train.varlen.device.exchange import Heads
from jaxoverlap.train.varlen.device.routing import Route, send
from jaxoverlap.train.varlen.rings import Bounds, Nodes


class Engine(NamedTuple):
    """The static settings of a compiled attention.

    Attributes:
        nodes: the devices.
        axes: the mesh axes, manual, whose product is all devices, node by node.
        bounds: slots by ring size.
        scale: the factor of scores.
        proxies: by ring size, the rails of a hop forward and backward; (1, 1) where it has none.
        fused: whether unsharded sequences are attended to by cuDNN's kernel.
        chip: the compute capability that it is traced for, where that GPU is not here.
    """

    nodes: Nodes
    axes: tuple[str, ...]
    bounds: Bounds
    scale: float
    proxies: tuple[tuple[int, tuple[int, int]], ...] = ()
    fused: bool = False
    chip: tuple[int, int] | None = None

    def route(self, size: int, *, backward: bool = False) -> Route:
        """Return the route of a hop of rings of a size."""
        rails = dict(self.proxies).get(size, (1, 1))[backward]
        return Route(self.nodes, self.axes, size, rails)


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
    sets = _sets(engine, segment, position)
    outs, kept = [], []
    for each, parts in [(s, s.given(q, k, v)) for s in sets]:
        if outs:  # one set of rings after the other
            parts, outs[-1] = tied((parts, outs[-1]))
        out, log_sums = each.forward(*parts)
        kept.append((*parts, out, log_sums))
        outs.append(out)
    returned = [s.returned(out)[0] for s, out in zip(sets, outs, strict=True)]
    return jnp.concatenate(returned, axis=1), (segment, position, kept)


def _backward(engine: Engine, residuals: Any, to_out: Array) -> tuple[Any, ...]:
    segment, position, kept = residuals
    sets, grads = _sets(engine, segment, position), []
    for each, parts, given in [
        (s, parts, s.given(to_out)[0]) for s, parts in zip(sets, kept, strict=True)
    ]:
        if grads:
            (parts, given), grads[-1] = tied(((parts, given), grads[-1]))
        q, k, v, out, kept_of = parts
        delta = jnp.einsum("bskgd,bskgd->bskg", in_float32(given), in_float32(out))
        found = each.backward((q, given, kept_of, delta), k, v)
        grads.append(tuple(g.astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True)))
    returned = [s.returned(*g) for s, g in zip(sets, grads, strict=True)]
    joined = (jnp.concatenate(g, axis=1) for g in zip(*returned, strict=True))
    return (*joined, None, None)


_attention.defvjp(_forward, _backward)


def _sets(engine: Engine, segment: Array, position: Array) -> list[_Local | _Ring]:
    """Return the sets of rings, the largest first."""
    kinds = {
        size: _Exchanged if size in engine.bounds.exchanged else _Ring if size > 1 else _Local
        for size, _ in engine.bounds.widths
    }
    return [
        kinds[size](engine, size, width, segment, position) for size, width in engine.bounds.widths
    ]


class _Set:
    """All rings of one size, on one device."""

    def __init__(self, engine: Engine, size: int, width: int, segment: Array, position: Array):
        self.engine, self.size, self.width = engine, size, width
        self.first = engine.bounds.first(size)
        self.device = lax.axis_index(engine.axes)
        self.rank = lax.rem(self.device, jnp.int32(size))
        self.arrays = segment, position

    def slots(self, x: Array, dim: int = 1) -> Array:
        """Return the part of an array that is these rings'."""
        return lax.slice_in_dim(x, self.first, self.first + self.width, axis=dim)

    @property
    def used(self) -> Array:
        """Return how many slots of these groups the fullest device needs; alike on all devices."""
        held = self.slots(self.arrays[0]) >= 0
        return jnp.max(jnp.where(held, jnp.arange(1, self.width + 1, dtype=jnp.int32), 0))

    def source(self, hop: int) -> Where:
        """Return where the slots are that came from so many ranks back."""
        back = lax.rem(self.rank - jnp.int32(hop) + jnp.int32(self.size), jnp.int32(self.size))
        device = self.device - self.rank + back
        rows = (lax.dynamic_index_in_dim(x, device, keepdims=False) for x in self.arrays)
        return Where(*(self.slots(row, 0) for row in rows))

    def given(self, *values: Array) -> tuple[Array, ...]:
        """Return the part of values of all slots that this set computes with."""
        return tuple(map(self.slots, values))

    def returned(self, *values: Array) -> tuple[Array, ...]:
        """Return results of this device's own slots."""
        return values


class _Local(_Set):
    """Attention of sequences that are not sharded: each is on one device."""

    @property
    def where(self) -> Where:
        """Return where the slots are that this device computes with."""
        return self.source(0)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Return the output, like q, and the residuals that the backward pass needs.

        That is the log of the sums, f32[b, slots, kv heads, group], or the kernel's own.
        """
        scale, most = self.engine.scale, self.engine.bounds.sequences
        if self.engine.fused and fused.fits(q):
            return fused.forward(
                self.where, q, k, v, scale=scale, most=most, chip=self.engine.chip
            )  # fmt: skip
        return local_forward(self.where, q, k, v, scale)

    def backward(self, own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; `own` is q, the output's gradient, statistics."""
        q, given, kept_of, _ = own
        if self.engine.fused and fused.fits(q):
            return kept_of(given)
        return local_backward(self.where, own, k, v, self.engine.scale)


class _Exchanged(_Local):
    """Sequences of a group whose devices have some heads of each."""

    @functools.cached_property
    def _heads(self) -> Heads:
        part = self.engine.bounds.part(self.size)
        trips = -(-self.used // jnp.int32(part))
        return Heads(self.engine.nodes, self.engine.axes, self.size, part, trips)

    @functools.cached_property
    def _sorted(self) -> tuple[Where, Array]:
        """Return where the group's slots are, sequence by sequence, and the order that it takes."""
        first = self.device - self.rank
        rows = (lax.dynamic_slice_in_dim(x, first, self.size) for x in self.arrays)
        segment, position = (self._heads.arranged(self.slots(row)) for row in rows)
        index = jnp.arange(segment.size, dtype=jnp.int32)
        # As unsigned numbers empty slots, -1, are the last.
        keys = segment.astype(jnp.uint32), position, index
        segment, position, order = lax.sort(keys, num_keys=2)
        return Where(segment.astype(jnp.int32), position), order

    @property
    def where(self) -> Where:
        return self._sorted[0]

    def given(self, *values: Array) -> tuple[Array, ...]:
        order = self._sorted[1]
        return tuple(
            jnp.take(x, order, axis=1) for x in self._heads.split(*map(self.slots, values))
        )

    def returned(self, *values: Array) -> tuple[Array, ...]:
        order = self._sorted[1]
        return self._heads.joined(*(jnp.zeros_like(x).at[:, order].set(x) for x in values))


class _Ring(_Set):
    """Sequences of a ring round which keys and values go; skipped where no ring has any."""

    def halves(self, where: Where, *arrays: Array) -> tuple[AttentionSide, AttentionSide]:
        """Return the early and the late chunks."""
        half = self.width // 2

        def part(low: int, high: int) -> AttentionSide:
            cut = tuple(lax.slice_in_dim(x, low, high, axis=1) for x in arrays)
            return AttentionSide(cut, Where(*(w[low:high] for w in where)))

        return part(0, half), part(half, self.width)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the output, like q, and the log of the sums, f32[b, slots, kv heads, group]."""

        def nothing(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
            return out, jnp.zeros(q.shape[:-1], wide(q.dtype))

        return lax.cond(self.used > 0, self._forward, nothing, q, k, v)

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

    def backward(self, own: tuple[Array, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; `own` is q, the output's gradient, statistics."""

        def nothing(own: tuple[Array, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
            to_q, to_k, to_v = (jnp.zeros(x.shape, wide(x.dtype)) for x in (own[0], k, v))
            return to_q, to_k, to_v

        return lax.cond(self.used > 0, self._backward, nothing, own, k, v)

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
