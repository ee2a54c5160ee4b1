"""Hold the slots of all groups of one size on a device: alone, or exchanging heads."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.rings.all_gather_matmul import wide
from jaxoverlap.train.varlen.device import fused
from jaxoverlap.train.varlen.device.blocks import Where, local_backward, local_forward
from jaxoverlap.train.varlen.device.exchange import Heads
from jaxoverlap.train.varlen.device.routing import Route
from jaxoverlap.train.varlen.rings import Bounds, Nodes


class Engine(NamedTuple):
    """The static settings of a compiled attention.

    Attributes:
        nodes: the devices.
        axes: the mesh axes, manual, whose product is all devices, node by node.
        bounds: slots by ring size.
        scale: the factor of scores.
        proxies: by ring size, the rails of a hop forward and backward; (1, 1) where it has none.
        fused: whether cuDNN's kernel is there: for unsharded sequences, and for rings if the bounds
            say how many sequences they have.
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

    def fuses(self, q: Array, sequences: int) -> bool:
        """Return whether the kernel attends from such queries, in at most so many sequences."""
        return self.fused and sequences > 0 and fused.fits(q)


class GroupSet:
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


class LocalSet(GroupSet):
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
        if self.engine.fuses(q, most):
            return fused.forward(
                self.where, q, k, v, scale=scale, most=most, chip=self.engine.chip
            )  # fmt: skip
        return local_forward(self.where, q, k, v, scale)

    def backward(self, own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; `own` is q, the output's gradient, statistics."""
        q, given, kept_of, _ = own
        if self.engine.fuses(q, self.engine.bounds.sequences):
            return kept_of(given)
        return local_backward(self.where, own, k, v, self.engine.scale)


class ExchangedSet(LocalSet):
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
        """Return where the group's slots are, sequence by sequence."""
        return self._sorted[0]

    def given(self, *values: Array) -> tuple[Array, ...]:
        """Return values of all the group's slots with some of the heads, in that order."""
        order = self._sorted[1]
        return tuple(
            jnp.take(x, order, axis=1) for x in self._heads.split(*map(self.slots, values))
        )

    def returned(self, *values: Array) -> tuple[Array, ...]:
        """Return results of this device's own slots, with all heads."""
        order = self._sorted[1]
        return self._heads.joined(*(jnp.zeros_like(x).at[:, order].set(x) for x in values))


class RingSet(GroupSet, ABC):
    """Sequences of a ring round which keys and values go; skipped where no ring has any."""

    @functools.cached_property
    def ring(self) -> Where:
        """Where the slots of all ranks of this device's ring are, i32[ranks, slots] each."""
        rows = (
            lax.dynamic_slice_in_dim(x, self.device - self.rank, self.size) for x in self.arrays
        )
        return Where(*map(self.slots, rows))

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Return the output, like q, and the log of the sums, f32[b, slots, kv heads, group]."""

        def nothing(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
            return out, jnp.zeros(q.shape[:-1], wide(q.dtype))

        return lax.cond(self.used > 0, self._forward, nothing, q, k, v)

    def backward(self, own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; `own` is q, the output's gradient, statistics."""

        def nothing(own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
            to_q, to_k, to_v = (jnp.zeros(x.shape, wide(x.dtype)) for x in (own[0], k, v))
            return to_q, to_k, to_v

        return lax.cond(self.used > 0, self._backward, nothing, own, k, v)

    @abstractmethod
    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Attend where some ring has a sequence."""

    @abstractmethod
    def _backward(self, own: tuple[Any, ...], k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the gradients there."""
