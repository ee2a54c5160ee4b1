"""Arrays of parts of sums: devices along some mesh axes are their first dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat
from jaxoverlap.plan.edits import Summand
from jaxoverlap.simulation.branch_shares import runs_scope

_FREE = PartitionSpec.UNCONSTRAINED
_Axes = tuple[str, ...]


def summed_dims(eqn: Any) -> list[tuple[int | None, ...]]:
    """Return the dims that an equation adds up, each as a dim of every operand; [] if it is no sum.

    None: an operand has no such dim.
    """
    name = eqn.primitive.name
    if any(map(compat.is_literal, eqn.invars)):
        return []
    if name == "dot_general":
        (lhs, rhs), _ = eqn.params["dimension_numbers"]
        return list(zip(lhs, rhs, strict=True))
    if name == "reduce_sum":
        return [(dim,) for dim in eqn.params["axes"] if eqn.invars[0].aval.shape[dim] > 1]
    if name == "scatter-add":
        numbers, updates = eqn.params["dimension_numbers"], eqn.invars[2].aval.ndim
        if numbers.operand_batching_dims:
            return []
        batch = [dim for dim in range(updates) if dim not in numbers.update_window_dims]
        return [(None, place, dim) for place, dim in enumerate(batch)]
    return []


class NoSumError(Exception):
    """A value is not made of sums alone; the message says why."""


class Resets(NamedTuple):
    """A conditional that makes a value 0 in some branches.

    Attributes:
        index: the number of the branch that is taken.
        zero_in: the branches that do.
        at_end: whether the last iteration of its scan is known to take one of these.
    """

    index: Any
    zero_in: tuple[int, ...]
    at_end: bool


class DeviceParts:
    """Makes parts of sums, computes with them, and adds them up.

    Attributes:
        axes: the mesh axes.
        devices: the devices along each: the first dims of all parts.
    """

    def __init__(self, mesh: Mesh, axes: _Axes):
        """Take the mesh and the axes."""
        self._mesh, self.axes = mesh, axes
        self.devices = tuple(mesh.shape[a] for a in axes)

    def check(self, eqn: Any, cut: Summand) -> None:
        """Refuse dims that a sum does not add up, or that do not have the mesh axes."""
        known = [{dims[n] for dims in summed_dims(eqn)} for n in range(len(eqn.invars))]
        if len(cut) != len(known):
            raise NoSumError(f"a sum has {len(known)} operands, not {len(cut)}")
        for operand, dims, var in zip(cut, known, eqn.invars, strict=True):
            on = [a for _, axes in operand for a in axes]
            if operand and not set(self.axes) <= set(on):
                raise NoSumError(f"a sum is not over all of {self.axes}")
            if len({*on}) < len(on):
                raise NoSumError("an axis shards two dims")
            for dim, axes in operand:
                if dim not in dims or var.aval.shape[dim] % math.prod(map(self.size, axes)):
                    raise NoSumError(f"{eqn.primitive.name} does not add up dim {dim} in parts")
        if not any(cut):
            raise NoSumError("a sum is over no axis")

    def size(self, axis: str) -> int:
        """Return the devices along a mesh axis."""
        return self._mesh.shape[axis]

    def each(self, eqn: Any, mapped: Sequence[bool]) -> Callable[..., Any]:
        """Return the function of an equation for each device's part."""
        pairs = list(zip(eqn.invars, mapped, strict=True))
        in_axes = [0 if m else None for v, m in pairs if not compat.is_literal(v)]

        def one(*operands: Array) -> list[Array]:
            left = iter(operands)
            values = [v.val if compat.is_literal(v) else next(left) for v in eqn.invars]
            return compat.evaluate_eqn(eqn, values)

        for axis in reversed(self.axes):
            one = jax.vmap(one, in_axes=in_axes, spmd_axis_name=axis)
        return one

    def summed(self, eqn: Any, cut: Summand, *operands: Array) -> list[Array]:
        """Return what each device adds up of its own."""
        apart = [self.apart(x, dict(dims)) for x, dims in zip(operands, cut, strict=True)]
        (total,) = self.each(eqn, [bool(dims) for dims in cut])(*apart)
        return [self._own(total)]

    def apart(self, x: Array, cut: Mapping[int, _Axes]) -> Array:
        """Return a value with the devices of the axes that are left apart as its first dims."""
        if not cut:
            return x
        shape, spec, where, merged = list[int](), list[Any](), dict[str, int](), list[int]()
        for dim, size in enumerate(x.shape):
            on = cut.get(dim, ())
            for axis in on:
                where[axis] = len(shape)
                shape, spec = [*shape, self.size(axis)], [*spec, axis]
            own = math.prod(self.size(a) for a in on)
            shape, spec = [*shape, size // own], [*spec, _FREE]
            merged.append(size // math.prod(self.size(a) for a in on if a in self.axes))
        x = self._at(lax.reshape(x, shape), spec)
        front = [where[axis] for axis in self.axes]
        x = jnp.moveaxis(x, front, range(len(front)))
        return lax.reshape(x, (*self.devices, *merged))

    def _own(self, parts: Array) -> Array:
        """Constrain parts to be on the devices whose parts they are."""
        return self._at(parts, [*self.axes, *[_FREE] * (parts.ndim - len(self.devices))])

    def _at(self, x: Array, spec: Sequence[Any]) -> Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(*spec))
        return lax.with_sharding_constraint(x, sharding)

    def constrained(self, eqn: Any, parts: Array) -> list[Array]:
        """Return parts with the constraint of their sum, but for the axes that are left apart."""
        spec = compat.stated_constraint(eqn)
        if spec is None:
            return [self._own(parts)]
        left = [tuple(a for a in on if a not in self.axes) or None for on in spec]
        return [self._at(parts, [*self.axes, *left])]

    def zeros(self, shape: Sequence[int], dtype: Any) -> list[Array]:
        """Return parts of zeros."""
        return [self._own(jnp.zeros(shape, dtype))]

    def first(self, start: Array) -> list[Array]:
        """Return parts of which the first device has all, and the others nothing."""
        shape = *self.devices, *start.shape
        own = functools.reduce(
            jnp.logical_and,
            (lax.broadcasted_iota(jnp.int32, shape, d) == 0 for d in range(len(self.devices))),
        )
        return [self._own(jnp.where(own, start, jnp.zeros((), start.dtype)))]

    def together(self, parts: Array, *start: Array) -> list[Array]:
        """Add up parts, and what the total began with."""
        axes = tuple(range(len(self.devices)))
        total = lax.reduce_sum_p.bind(parts, axes=axes, out_sharding=None)
        return [sum(start, total)]

    def in_branch(self, parts: Array) -> list[Array]:
        """Add up parts in a branch alone: XLA computes branches of cheap operations in any case.

        A barrier is none (`ConditionalSimplifier`).
        """
        return self.together(*compat.barrier(parts))

    def unless_zero(self, resets: Resets, last: int, parts: Array, indices: Array) -> list[Array]:
        """Add up parts, unless the last iteration has made them 0.

        Args:
            resets: what makes them 0.
            last: the position of the last iteration.
            parts: the parts.
            indices: which branch each iteration took.
        """
        is_zero = functools.reduce(jnp.logical_or, (indices[last] == n for n in resets.zero_in))

        def zeros(parts: Array) -> list[Array]:
            return [jnp.zeros(parts.shape[len(self.devices) :], parts.dtype)]

        with jax.named_scope(runs_scope(0, 1) if resets.at_end else "sums_left"):
            return lax.cond(is_zero, zeros, self.in_branch, parts)
