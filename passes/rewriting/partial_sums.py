"""Leave sums apart for each device along some mesh axes: dims of devices come before their own.

    g: [i, o] = dot_general x: [b@data, i] dy: [b@data, o]
->  g: [n@data, i, o] = dot_general (reshape x: [n@data, b / n, i]) (reshape dy: [n@data, b / n, o])

What is linear in such sums is done to the parts of each device: in remats, in scans that stack them
or add them up, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import REMATS
from jaxoverlap.plan.edits import Summand

_FREE = PartitionSpec.UNCONSTRAINED
ADDS = ("add", "add_any")
_LINEAR = (
    *("neg", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p", "slice"),
    *("convert_element_type", "reduce_precision", "div", "mul"),
)
# What may be between a carry and the value that it becomes.
KEEPS_TOTAL = (*ADDS, "sub", "sharding_constraint")

CutOf = Callable[[Any], Summand]
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


class PartialSums:
    """Leaves the sums that one carry is made of apart for each device along some mesh axes.

    Attributes:
        inner: the scans inside of the carry's own that add up parts of it, by `id`.
    """

    def __init__(self, mesh: Mesh, axes: _Axes | None, cut_of: CutOf):
        """Make one.

        Args:
            mesh: the mesh.
            axes: the mesh axes; None to find out whether a carry is made of sums, and make nothing.
            cut_of: returns the dims that the next sum adds up.
        """
        self.mesh, self.axes, self.cut_of = mesh, axes, cut_of
        self.devices = tuple(mesh.shape[a] for a in axes or ())
        self.inner = set[int]()

    def root(self, scan: Any, carry: int) -> list[Any]:
        """Return a scan that carries parts of a total, and what adds them up behind it."""
        total = scan.outvars[carry] if carry < compat.scan_counts(scan)[1] else None
        if total is None:
            raise NoSumError(f"the scan has {compat.scan_counts(scan)[1]} carries")
        eqns, parts = self.scan(scan, carry)
        start = scan.invars[compat.scan_counts(scan)[0] + carry]
        operands = [v for v in (start, parts) if not compat.is_literal(v)]
        return [*eqns, *self.make(self._together, operands, [total], scan)]

    def scan(self, scan: Any, carry: int) -> tuple[list[Any], Any]:
        """Return a scan that carries parts of a total, from zeros on, and its result."""
        body, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
        place = num_consts + carry
        var = body.invars[place]
        chain = _Chain(self, body, var)
        out = chain.part(body.outvars[carry])
        if not chain.carried:
            raise NoSumError("the scan does not add to it")
        body = compat.with_binders(
            body, _with(body.invars, place, chain.carry_part), _with(body.outvars, carry, out)
        ).replace(eqns=chain.eqns)
        start, parts = self.part_var(var), self.part_var(var)
        zeros = functools.partial(self._zeros, start.aval.shape, start.aval.dtype)
        made = compat.new_scan(
            scan,
            body,
            (num_consts, num_carry),
            _with(scan.invars, place, start),
            _with(scan.outvars, carry, parts),
        )
        return [*self.make(zeros, [], [start], scan), made], parts

    def stacked(self, scan: Any, output: int) -> tuple[list[Any], Any]:
        """Return a scan that stacks parts of one of its results, and the parts, devices first."""
        body, counts = scan.params["jaxpr"], compat.scan_counts(scan)
        chain = _Chain(self, body)
        part = chain.part(body.outvars[output])
        outvars = _with(body.outvars, output, part)
        body = compat.with_binders(body, body.invars, outvars).replace(eqns=chain.eqns)
        stack = compat.stacked_var(part, scan.params["length"])
        parts = self.part_var(scan.outvars[output])
        made = compat.new_scan(scan, body, counts, scan.invars, _with(scan.outvars, output, stack))
        first = tuple(range(len(self.devices)))
        move = functools.partial(jnp.moveaxis, source=[d + 1 for d in first], destination=first)
        return [made, *self.make(lambda x: [move(x)], [stack], [parts], scan)], parts

    def called(self, eqn: Any, output: int) -> tuple[list[Any], Any]:
        """Return a call that gives parts of one of its results, and the parts."""
        (body,) = compat.jaxprs_in(eqn)
        chain = _Chain(self, body)
        part = chain.part(body.outvars[output])
        outvars = _with(body.outvars, output, part)
        body = compat.with_binders(body, body.invars, outvars).replace(eqns=chain.eqns)
        parts = compat.like_var(part)
        eqn = compat.map_jaxprs(lambda _: body, eqn)
        return [eqn.replace(outvars=_with(eqn.outvars, output, parts))], parts

    def sum(self, eqn: Any) -> tuple[list[Any], Any]:
        """Return equations that add up each device's own part, and its result."""
        cut = self.cut_of(eqn)
        if self.axes is not None:
            self._check(eqn, cut)
        parts = self.part_var(eqn.outvars[0])
        return self.make(functools.partial(self._summed, eqn, cut), eqn.invars, [parts], eqn), parts

    def linear(self, eqn: Any, mapped: Mapping[int, Any]) -> tuple[list[Any], Any]:
        """Return equations that do to the parts what one does to their sum.

        Args:
            eqn: the equation.
            mapped: the parts, by the positions of the operands that they are in place of.
        """
        parts = self.part_var(eqn.outvars[0])
        operands = [mapped.get(n, v) for n, v in enumerate(eqn.invars)]
        if eqn.primitive.name == "sharding_constraint":
            fn = functools.partial(self._constrained, eqn)
        else:
            fn = self._each(eqn, [n in mapped for n in range(len(operands))])
        read = [v for v in operands if not compat.is_literal(v)]
        return self.make(fn, read, [parts], eqn), parts

    def part_var(self, var: Any) -> Any:
        """Return a variable for the parts of a value."""
        return compat.shaped_var(var, (*self.devices, *var.aval.shape))

    def make(
        self, fn: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any
    ) -> list[Any]:
        """Return the equations of a function; none if nothing is made."""
        return [] if self.axes is None else inlining.inline(fn, invars, outvars, like)

    def _check(self, eqn: Any, cut: Summand) -> None:
        """Refuse dims that a sum does not add up, or that do not have the mesh axes."""
        known = [{dims[n] for dims in summed_dims(eqn)} for n in range(len(eqn.invars))]
        if len(cut) != len(known):
            raise NoSumError(f"a sum has {len(known)} operands, not {len(cut)}")
        for operand, dims, var in zip(cut, known, eqn.invars, strict=True):
            on = [a for _, axes in operand for a in axes]
            if operand and not set(self.axes or ()) <= set(on):
                raise NoSumError(f"a sum is not over all of {self.axes}")
            for dim, axes in operand:
                if dim not in dims or var.aval.shape[dim] % math.prod(map(self._size, axes)):
                    raise NoSumError(f"{eqn.primitive.name} does not add up dim {dim} in parts")
        if not any(cut):
            raise NoSumError("a sum is over no axis")

    def _size(self, axis: str) -> int:
        return self.mesh.shape[axis]

    def _each(self, eqn: Any, mapped: Sequence[bool]) -> Callable[..., Any]:
        """Return the function of an equation for each device's part."""
        pairs = list(zip(eqn.invars, mapped, strict=True))
        in_axes = [0 if m else None for v, m in pairs if not compat.is_literal(v)]

        def one(*operands: Array) -> list[Array]:
            left = iter(operands)
            values = [v.val if compat.is_literal(v) else next(left) for v in eqn.invars]
            return compat.evaluate_eqn(eqn, values)

        for axis in reversed(self.axes or ()):
            one = jax.vmap(one, in_axes=in_axes, spmd_axis_name=axis)
        return one

    def _summed(self, eqn: Any, cut: Summand, *operands: Array) -> list[Array]:
        apart = [self._apart(x, dict(dims)) for x, dims in zip(operands, cut, strict=True)]
        (total,) = self._each(eqn, [bool(dims) for dims in cut])(*apart)
        return [self._own(total)]

    def _apart(self, x: Array, cut: Mapping[int, _Axes]) -> Array:
        """Return a value with the devices of the axes that are left apart as its first dims."""
        if not cut:
            return x
        shape, spec, where, merged = list[int](), list[Any](), dict[str, int](), list[int]()
        for dim, size in enumerate(x.shape):
            on = cut.get(dim, ())
            for axis in on:
                where[axis] = len(shape)
                shape, spec = [*shape, self._size(axis)], [*spec, axis]
            own = math.prod(self._size(a) for a in on)
            shape, spec = [*shape, size // own], [*spec, _FREE]
            merged.append(size // math.prod(self._size(a) for a in on if a in (self.axes or ())))
        x = self._at(lax.reshape(x, shape), spec)
        front = [where[axis] for axis in self.axes or ()]
        x = jnp.moveaxis(x, front, range(len(front)))
        return lax.reshape(x, (*self.devices, *merged))

    def _own(self, parts: Array) -> Array:
        """Constrain parts to be on the devices whose parts they are."""
        return self._at(parts, [*(self.axes or ()), *[_FREE] * (parts.ndim - len(self.devices))])

    def _at(self, x: Array, spec: Sequence[Any]) -> Array:
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return lax.with_sharding_constraint(x, sharding)

    def _constrained(self, eqn: Any, parts: Array) -> list[Array]:
        """Return parts with the constraint of their sum, but for the axes that are left apart."""
        spec = compat.stated_constraint(eqn)
        if spec is None:
            return [self._own(parts)]
        left = [tuple(a for a in on if a not in (self.axes or ())) or None for on in spec]
        return [self._at(parts, [*(self.axes or ()), *left])]

    def _zeros(self, shape: Sequence[int], dtype: Any) -> list[Array]:
        return [self._own(jnp.zeros(shape, dtype))]

    def _together(self, *operands: Array) -> list[Array]:
        """Add up parts, and what the total began with."""
        *start, parts = operands
        axes = tuple(range(len(self.devices)))
        total = lax.reduce_sum_p.bind(parts, axes=axes, out_sharding=None)
        return [sum(start, total)]


class _Chain:
    """The equations of one body between sums and a value that is linear in them.

    Attributes:
        carried: whether the value has the body's carry as one summand.
        carry_part: the variable that is in its place.
    """

    def __init__(self, rewriter: PartialSums, body: Any, carry: Any = None):
        self._rewriter, self._body, self._carry = rewriter, body, carry
        self._uses = DefUse(body.eqns, body.outvars)
        self._made = dict[int, list[Any]]()
        self.carry_part = None if carry is None else rewriter.part_var(carry)
        self.carried = False

    @property
    def eqns(self) -> list[Any]:
        """The equations of the body that gives parts."""
        every = enumerate(self._body.eqns)
        return [one for place, eqn in every for one in self._made.get(place, [eqn])]

    def part(self, var: Any) -> Any:
        """Return the parts of a value, and note the equations that make them.

        Raises:
            NoSumError: if it is not made of sums alone, or something else reads it.
        """
        if compat.is_literal(var) or len(self._uses.readers(var)) != 1:
            raise NoSumError("a value has several readers, or is a constant")
        if var is self._carry:
            self.carried = True
            return self.carry_part
        eqn = self._uses.maker(var)
        if eqn is None or self._uses.made[var] in self._made:
            raise NoSumError("a value comes from outside of the scan")
        made, parts = self._of(eqn, var)
        self._made[self._uses.made[var]] = made
        return parts

    def _of(self, eqn: Any, var: Any) -> tuple[list[Any], Any]:
        name, rewriter = eqn.primitive.name, self._rewriter
        output = eqn.outvars.index(var)
        if name in REMATS:
            return rewriter.called(eqn, output)
        if name == "scan":
            num_consts, num_carry = compat.scan_counts(eqn)
            if output >= num_carry:
                return rewriter.stacked(eqn, output)
            if not _is_zero(self._uses.maker(eqn.invars[num_consts + output])):
                raise NoSumError("a scan adds sums to what is no zero")
            rewriter.inner.add(id(eqn))
            return rewriter.scan(eqn, output)
        if summed_dims(eqn):
            if name == "scatter-add" and not _is_zero(self._uses.maker(eqn.invars[0])):
                raise NoSumError("a scatter adds to what is no zero")
            return rewriter.sum(eqn)
        parts = dict[int, Any]()
        for n in self._linear(eqn):
            before = self.carried
            parts[n] = self.part(eqn.invars[n])
            keeps = name in KEEPS_TOTAL and not (name == "sub" and n == 1)
            if self.carried != before and not keeps:
                raise NoSumError(f"{name} of the total")
        return rewriter.linear(eqn, parts)

    def _linear(self, eqn: Any) -> Sequence[int]:
        """Return the operands in which an equation is linear, all at once."""
        name = eqn.primitive.name
        if name in (*ADDS, "sub"):
            return range(len(eqn.invars))
        adds_nothing = name == "reduce_sum" and not summed_dims(eqn)
        if adds_nothing or (name == "pad" and _is_zero_literal(eqn.invars[1])):
            return [0]
        if name == "sharding_constraint" or (name in _LINEAR and _is_float(eqn)):
            factors = [n for n, v in enumerate(eqn.invars) if not self._is_scalar(v)]
            if factors == [0] or (name == "mul" and len(factors) == 1):
                return factors
        raise NoSumError(f"{name} is not linear in one operand")

    def _is_scalar(self, atom: Any) -> bool:
        """Return whether a value is one number, or many times the same."""
        if not atom.aval.ndim:
            return True
        eqn = self._uses.maker(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        return not eqn.invars[0].aval.ndim


def _is_float(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)


def _is_zero(eqn: Any) -> bool:
    """Return whether an equation makes zeros."""
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero_literal(eqn.invars[0])


def _is_zero_literal(atom: Any) -> bool:
    return compat.is_literal(atom) and atom.val == 0


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    """Return values with another one at one index."""
    return [value if n == place else v for n, v in enumerate(values)]
