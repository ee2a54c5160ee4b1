"""Sums over the batch that a scan adds into its carry: added up over devices once, behind the scan.

    scan over microbatches:  body:
        g: [i, o] = dot_general x: [b@data, i] dy: [b@data, o]              # one all-reduce each
        total: [i, o] = add total g

->  scan over microbatches:  body:
        p: [n@data, i, o] = dot_general (reshape x: [n@data, b / n, i]) (reshape dy: ...)
        parts: [n@data, i, o] = add parts p
    total = add start (reduce_sum parts)                                    # one all-reduce

Such are the gradients of accumulated microbatches, and of weights that all iterations of a scan
share, as a recurrent network's. A device's part of the sums has the size of its own total, unless
the total is sharded over the axes that are added up (FSDP): then it is larger by their devices.
XLA sinks an all-reduce out of one loop, but not out of a loop over layers in a loop over
microbatches. PyTorch's `no_sync` leaves the same sums out (Li et al., VLDB 2020).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import REMATS
from jaxoverlap.passes.edited import EditedStep, check_named, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.rewriting.late_sums import axes_by_name
from jaxoverlap.plan.edits import SumCarried, Summand

_FREE = PartitionSpec.UNCONSTRAINED
_ADDS = ("add", "add_any")
_LINEAR = (
    *("neg", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p", "slice"),
    *("convert_element_type", "reduce_precision", "div", "mul"),
)
# What may be between a carry and the value that it becomes.
_KEEPS_TOTAL = (*_ADDS, "sub", "sharding_constraint")

_CutOf = Callable[[Any], Summand]
_Axes = tuple[str, ...]


def run(step: EditedStep, edits: Sequence[SumCarried]) -> EditedStep:
    """Add up behind their scans the sums that edits name."""
    jaxpr = step.jaxpr
    for edit in edits:
        cut = (axis for one in edit.sums for operand in one for _, on in operand for axis in on)
        check_named(step.mesh, edit, (*edit.axes, *cut))
        if not edit.axes or len({*edit.axes}) < len(edit.axes):
            raise misfit(edit, "it names no axis, or one twice")
        left = list(edit.sums)

        def next_cut(eqn: Any, edit: SumCarried = edit, left: list[Summand] = left) -> Summand:
            if not left:
                raise misfit(edit, "the scan adds up more sums into that carry")
            return left.pop(0)

        rewriter = _Rewriter(step.mesh, edit.axes, next_cut)
        scans = _Scans(edit.scan, functools.partial(rewriter.root, carry=edit.carry))
        try:
            jaxpr = scans.jaxpr(jaxpr)
        except _NoSumError as error:
            raise misfit(edit, f"no sum leaves that carry: {error}") from error
        if scans.count <= edit.scan:
            raise misfit(edit, f"the step has {scans.count} scans, counted from 0")
        if left:
            raise misfit(edit, f"the scan adds up {len(left)} sums fewer into that carry")
    return step.to(jaxpr)


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to add up behind their scans all sums that can be.

    First over the axes that do not shard the total, which needs no memory; then over all.
    """
    carried = [*_carried(step)]
    free = [one.edit(one.free) for one in carried if one.free]
    if free:
        yield Proposal(tuple(free))
    every = [one.edit(one.axes) for one in carried]
    if every != free:
        yield Proposal(tuple(every))


@dataclass(frozen=True)
class _Carried:
    """A carry that a scan adds sums into.

    Attributes:
        scan: the number of the scan.
        carry: the position of the carry.
        sums: the dims that each sum adds up, and the mesh axes on them.
        axes: the mesh axes that all of them add up over.
        free: those that do not shard the total.
    """

    scan: int
    carry: int
    sums: tuple[Summand, ...]
    axes: _Axes
    free: _Axes

    def edit(self, axes: _Axes) -> SumCarried:
        return SumCarried(scan=self.scan, carry=self.carry, axes=axes, sums=self.sums)


def _carried(step: Evaluated) -> Iterator[_Carried]:
    """Yield the carries of a step's scans into which sums over the batch are added."""
    edited = step.step
    scans = list(_scans(edited.jaxpr))
    if not any(_accumulates(scan, k) for scan in scans for k in range(compat.scan_counts(scan)[1])):
        return
    names = DimNames(edited.jaxpr)
    axes = axes_by_name(edited, names, step.shardings)
    done = set[int]()
    for number, scan in reversed([*enumerate(scans)]):  # outer scans first
        num_consts, num_carry = compat.scan_counts(scan)
        for carry in range(num_carry):
            if id(scan) in done or not _accumulates(scan, carry):
                continue
            sums: list[Summand] = []
            total = scan.params["jaxpr"].invars[num_consts + carry]

            def cut_of(eqn: Any, sums: list[Summand] = sums) -> Summand:
                sums.append(_summand(eqn, names, axes, edited.mesh))
                return sums[-1]

            rewriter = _Rewriter(edited.mesh, None, cut_of)
            try:
                rewriter.root(scan, carry)
            except _NoSumError:
                continue
            common = _common(sums, edited.mesh)
            if common:
                done |= rewriter.inner
                own = _own_axes(names.of(total), edited, names)
                free = tuple(axis for axis in common if axis not in own)
                yield _Carried(number, carry, tuple(sums), common, free)


def _accumulates(scan: Any, carry: int) -> bool:
    """Return whether a scan adds something to a carry, and does nothing else with it."""
    body, (num_consts, _) = scan.params["jaxpr"], compat.scan_counts(scan)
    var, out = body.invars[num_consts + carry], body.outvars[carry]
    if not jnp.issubdtype(var.aval.dtype, jnp.floating) or not var.aval.ndim:
        return False
    readers = [eqn for eqn in body.eqns if var in compat.variables(eqn.invars)]
    only = len(readers) == 1 and out is not var
    return only and readers[0].primitive.name in _KEEPS_TOTAL


def _own_axes(total: Sequence[Name], step: EditedStep, names: DimNames) -> set[str]:
    """Return the mesh axes that shard the dims of a total, as they do in the argument of its dims.

    All axes of the mesh, if no argument has these dims.
    """
    for var, spec in zip(step.jaxpr.invars, step.arguments, strict=True):
        of_var = names.of(var)
        if spec is not None and {*total} <= {*of_var}:
            return {a for name, on in zip(of_var, spec, strict=True) if name in total for a in on}
    return set(step.mesh.axis_names)


def _common(sums: Sequence[Summand], mesh: Mesh) -> _Axes:
    """Return the mesh axes that every sum adds up over, in the mesh's order."""
    of_each = [{a for operand in one for _, on in operand for a in on} for one in sums]
    return tuple(a for a in mesh.axis_names if of_each and all(a in one for one in of_each))


def _summand(eqn: Any, names: DimNames, axes: Mapping[Name, _Axes], mesh: Mesh) -> Summand:
    """Return the dims of a sum's operands that it adds up, and the mesh axes that shard each."""
    cut = [dict[int, _Axes]() for _ in eqn.invars]
    for dims in _summed(eqn):
        first = next(operand for operand, dim in enumerate(dims) if dim is not None)
        var = eqn.invars[first]
        on = axes.get(names.of(var)[dims[first]], ())
        on = tuple(a for a in on if mesh.shape[a] > 1)
        if on and var.aval.shape[dims[first]] % math.prod(mesh.shape[a] for a in on) == 0:
            for operand, dim in enumerate(dims):
                if dim is not None:
                    cut[operand][dim] = on
    return tuple(tuple(sorted(of_operand.items())) for of_operand in cut)


def _summed(eqn: Any) -> list[tuple[int | None, ...]]:
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


# -- the rewriting --------------------------------------------------------------------------------


class _NoSumError(Exception):
    """A value is not made of sums alone; it says by which equation."""


def _scans(jaxpr: Any) -> Iterator[Any]:
    """Yield the scans of a jaxpr, inner ones before those around them, as `SumLate` counts."""
    for eqn in jaxpr.eqns:
        for body in compat.jaxprs_in(eqn):
            yield from _scans(body)
        if eqn.primitive.name == "scan":
            yield eqn


class _Scans:
    """One walk over a step that rewrites one scan, counted as `_scans` does."""

    def __init__(self, number: int, rewrite: Callable[[Any], list[Any]]):
        self._number, self._rewrite, self.count = number, rewrite, 0

    def jaxpr(self, jaxpr: Any) -> Any:
        eqns: list[Any] = []
        for given in jaxpr.eqns:
            eqn = compat.map_jaxprs(self.jaxpr, given)
            made = [eqn]
            if eqn.primitive.name == "scan":
                made = self._rewrite(eqn) if self.count == self._number else made
                self.count += 1
            eqns += made
        return jaxpr.replace(eqns=eqns)


class _Rewriter:
    """Leaves the sums that one carry is made of apart for each device along some mesh axes.

    Attributes:
        inner: the scans inside of the carry's own that add up parts of it, by `id`.
    """

    def __init__(self, mesh: Mesh, axes: _Axes | None, cut_of: _CutOf):
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
            raise _NoSumError(f"the scan has {compat.scan_counts(scan)[1]} carries")
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
            raise _NoSumError("the scan does not add to it")
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
        return compat.shaped_var(var, (*self.devices, *var.aval.shape))

    def make(
        self, fn: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any
    ) -> list[Any]:
        """Return the equations of a function; none if nothing is made."""
        return [] if self.axes is None else inlining.inline(fn, invars, outvars, like)

    def _check(self, eqn: Any, cut: Summand) -> None:
        """Refuse dims that a sum does not add up, or that do not have the mesh axes."""
        known = [{dims[n] for dims in _summed(eqn)} for n in range(len(eqn.invars))]
        if len(cut) != len(known):
            raise _NoSumError(f"a sum has {len(known)} operands, not {len(cut)}")
        for operand, dims, var in zip(cut, known, eqn.invars, strict=True):
            on = [a for _, axes in operand for a in axes]
            if operand and not set(self.axes or ()) <= set(on):
                raise _NoSumError(f"a sum is not over all of {self.axes}")
            for dim, axes in operand:
                if dim not in dims or var.aval.shape[dim] % math.prod(map(self._size, axes)):
                    raise _NoSumError(f"{eqn.primitive.name} does not add up dim {dim} in parts")
        if not any(cut):
            raise _NoSumError("a sum is over no axis")

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

    def __init__(self, rewriter: _Rewriter, body: Any, carry: Any = None):
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
            _NoSumError: if it is not made of sums alone, or something else reads it.
        """
        if compat.is_literal(var) or len(self._uses.readers(var)) != 1:
            raise _NoSumError("a value has several readers, or is a constant")
        if var is self._carry:
            self.carried = True
            return self.carry_part
        eqn = self._uses.maker(var)
        if eqn is None or self._uses.made[var] in self._made:
            raise _NoSumError("a value comes from outside of the scan")
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
                raise _NoSumError("a scan adds sums to what is no zero")
            rewriter.inner.add(id(eqn))
            return rewriter.scan(eqn, output)
        if _summed(eqn):
            return rewriter.sum(eqn)
        before, linear = self.carried, self._linear(eqn)
        parts = {n: self.part(eqn.invars[n]) for n in linear}
        if self.carried != before and (
            name not in _KEEPS_TOTAL or (name == "sub" and self._carry is eqn.invars[1])
        ):
            raise _NoSumError(f"{name} of the total")
        return rewriter.linear(eqn, parts)

    def _linear(self, eqn: Any) -> Sequence[int]:
        """Return the operands in which an equation is linear, all at once."""
        name = eqn.primitive.name
        if name in (*_ADDS, "sub"):
            return range(len(eqn.invars))
        adds_nothing = name == "reduce_sum" and not _summed(eqn)
        if adds_nothing or (name == "pad" and _is_zero_literal(eqn.invars[1])):
            return [0]
        if name == "sharding_constraint" or (name in _LINEAR and _is_float(eqn)):
            factors = [n for n, v in enumerate(eqn.invars) if not self._is_scalar(v)]
            if factors == [0] or (name == "mul" and len(factors) == 1):
                return factors
        raise _NoSumError(f"{name} is not linear in one operand")

    def _is_scalar(self, atom: Any) -> bool:
        """Return whether a value is one number, or many times the same."""
        if not atom.aval.ndim:
            return True
        eqn = self._uses.maker(atom)
        repeats = eqn is not None and eqn.primitive.name == "broadcast_in_dim"
        return repeats and not eqn.invars[0].aval.ndim


def _is_float(eqn: Any) -> bool:
    return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)


def _is_zero(eqn: Any) -> bool:
    """Return whether an equation makes zeros."""
    repeats = eqn is not None and eqn.primitive.name == "broadcast_in_dim"
    return repeats and _is_zero_literal(eqn.invars[0])


def _is_zero_literal(atom: Any) -> bool:
    return compat.is_literal(atom) and atom.val == 0


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    """Return values with another one at one place."""
    return [value if n == place else v for n, v in enumerate(values)]
