"""Leave sums apart for each device along some mesh axes: dims of devices come before their own.

    g: [i, o] = dot_general x: [b@data, i] dy: [b@data, o]
->  g: [n@data, i, o] = dot_general (reshape x: [n@data, b / n, i]) (reshape dy: [n@data, b / n, o])

What is linear in such sums is done to the parts of each device: in remats, in scans that stack them
or add them up, too. Conditionals that pass a total on in some branches, and make it 0 in others, do
so with the parts; where a branch needs the total, the parts are added up there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import REMATS
from jaxoverlap.passes.rewriting.device_parts import DeviceParts, NoSumError, Resets, summed_dims
from jaxoverlap.plan.edits import Summand
from jaxoverlap.simulation.branch_shares import is_at_end

ADDS = ("add", "add_any")
_LINEAR = (
    *("neg", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "copy_p", "slice"),
    *("convert_element_type", "reduce_precision", "div", "mul"),
)
# Between a carry and the value that it becomes: what is added to the carry stays added to it.
_KEEPS_TOTAL = (*ADDS, "sub", "sharding_constraint")

CutOf = Callable[[Any], Summand]
_Axes = tuple[str, ...]


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
        self.axes, self.cut_of = axes, cut_of
        self.parts = DeviceParts(mesh, axes or ())
        self.inner = set[int]()

    def root(self, scan: Any, carry: int) -> list[Any]:
        """Return a scan that carries parts of a total, and what adds them up behind it."""
        num_consts, num_carry = compat.scan_counts(scan)
        if carry >= num_carry:
            raise NoSumError(f"the scan has {num_carry} carries")
        total, start = scan.outvars[carry], scan.invars[num_consts + carry]
        eqns, parts, chain = self._scan(scan, carry, start)
        operands = [parts]
        if not chain.scales and not compat.is_literal(start):
            operands.append(start)
        together = self.parts.together
        if (resets := chain.resets.get(scan.params["jaxpr"].outvars[carry])) is not None:
            eqns[-1], indices = _stacking(eqns[-1], resets.index)
            operands.append(indices)
            last = 0 if scan.params["reverse"] else -1
            together = functools.partial(self.parts.unless_zero, resets, last)
        return [*eqns, *self.make(together, operands, [total], scan)]

    def scan(self, scan: Any, carry: int) -> tuple[list[Any], Any]:
        """Return a scan that carries parts of a total, from zeros on, and its result."""
        eqns, parts, _ = self._scan(scan, carry, None)
        return eqns, parts

    def _scan(self, scan: Any, carry: int, first: Any) -> tuple[list[Any], Any, _Chain]:
        """Return a scan that carries parts of a total, its result, and what the parts go through.

        Args:
            scan: the scan.
            carry: the position of the carry.
            first: what the total starts from; None for zeros.
        """
        body, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
        place = num_consts + carry
        var = body.invars[place]
        chain = _Chain(self, body, var)
        out = chain.part(body.outvars[carry])
        chain.check()
        if not chain.carried:
            raise NoSumError("the scan does not add to it")
        body = compat.with_binders(
            body, _with(body.invars, place, chain.carry_part), _with(body.outvars, carry, out)
        ).replace(eqns=chain.eqns)
        start, parts = self.part_var(var), self.part_var(var)
        starts, operands = (
            functools.partial(self.parts.zeros, start.aval.shape, start.aval.dtype),
            [],
        )
        if first is not None and chain.scales and not compat.is_literal(first):
            starts, operands = self.parts.first, [first]
        made = compat.new_scan(
            scan,
            body,
            (num_consts, num_carry),
            _with(scan.invars, place, start),
            _with(scan.outvars, carry, parts),
        )
        return [*self.make(starts, operands, [start], scan), made], parts, chain

    def stacked(self, scan: Any, output: int) -> tuple[list[Any], Any]:
        """Return a scan that stacks parts of one of its results, and the parts, devices first."""
        body, counts = scan.params["jaxpr"], compat.scan_counts(scan)
        chain = _Chain(self, body)
        part = chain.part(body.outvars[output])
        chain.check()
        outvars = _with(body.outvars, output, part)
        body = compat.with_binders(body, body.invars, outvars).replace(eqns=chain.eqns)
        stack = compat.stacked_var(part, scan.params["length"])
        parts = self.part_var(scan.outvars[output])
        made = compat.new_scan(scan, body, counts, scan.invars, _with(scan.outvars, output, stack))
        first = tuple(range(len(self.parts.devices)))
        move = functools.partial(jnp.moveaxis, source=[d + 1 for d in first], destination=first)
        return [made, *self.make(lambda x: [move(x)], [stack], [parts], scan)], parts

    def called(self, eqn: Any, output: int) -> tuple[list[Any], Any]:
        """Return a call that gives parts of one of its results, and the parts."""
        (body,) = compat.jaxprs_in(eqn)
        chain = _Chain(self, body)
        part = chain.part(body.outvars[output])
        chain.check()
        outvars = _with(body.outvars, output, part)
        body = compat.with_binders(body, body.invars, outvars).replace(eqns=chain.eqns)
        parts = compat.like_var(part)
        eqn = compat.map_jaxprs(lambda _: body, eqn)
        return [eqn.replace(outvars=_with(eqn.outvars, output, parts))], parts

    def conditional(self, eqn: Any, operand: int, output: int, part: Any) -> tuple[Any, Any]:
        """Return a conditional of parts of one of its operands, and parts of one of its results.

        Args:
            eqn: the conditional.
            operand: the position of the operand among its branches'.
            output: the position of the result.
            part: the parts of the operand.
        """
        branches = []
        for branch in eqn.params["branches"]:
            var, out = branch.invars[operand], branch.outvars[output]
            own, eqns = compat.like_var(part), list(branch.eqns)
            if out is var:
                out = own
            else:
                out = self.part_var(out)
                zeros = functools.partial(self.parts.zeros, out.aval.shape, out.aval.dtype)
                eqns += self.make(zeros, [], [out], eqn)
            outvars = _with(branch.outvars, output, out)
            if DefUse(eqns, outvars).readers(var):
                eqns = [*self.make(self.parts.in_branch, [own], [var], eqn), *eqns]
            new = compat.with_binders(branch, _with(branch.invars, operand, own), outvars)
            branches.append(new.replace(eqns=eqns))
        parts = compat.like_var(part)
        made = eqn.replace(
            invars=_with(eqn.invars, 1 + operand, part),
            outvars=_with(eqn.outvars, output, parts),
            params={**eqn.params, "branches": tuple(branches)},
        )
        return made, parts

    def sum(self, eqn: Any) -> tuple[list[Any], Any]:
        """Return equations that add up each device's own part, and its result."""
        cut = self.cut_of(eqn)
        if self.axes is not None:
            self.parts.check(eqn, cut)
        parts = self.part_var(eqn.outvars[0])
        return self.make(
            functools.partial(self.parts.summed, eqn, cut), eqn.invars, [parts], eqn
        ), parts

    def linear(self, eqn: Any, mapped: Mapping[int, Any]) -> tuple[list[Any], Any]:
        """Return equations that do to the parts what one does to their sum.

        Args:
            eqn: the equation.
            mapped: the parts, by the positions of the operands that they are in place of.
        """
        parts = self.part_var(eqn.outvars[0])
        operands = [mapped.get(n, v) for n, v in enumerate(eqn.invars)]
        if eqn.primitive.name == "sharding_constraint":
            fn = functools.partial(self.parts.constrained, eqn)
        else:
            fn = self.parts.each(eqn, [n in mapped for n in range(len(operands))])
        read = [v for v in operands if not compat.is_literal(v)]
        return self.make(fn, read, [parts], eqn), parts

    def part_var(self, var: Any) -> Any:
        """Return a variable for the parts of a value."""
        return compat.shaped_var(var, (*self.parts.devices, *var.aval.shape))

    def make(
        self, fn: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any
    ) -> list[Any]:
        """Return the equations of a function; none if nothing is made."""
        return [] if self.axes is None else inlining.inline(fn, invars, outvars, like)


class _Chain:
    """The equations of one body between sums and a value that is linear in them.

    Attributes:
        scales: whether the carry is more than a summand: it is scaled, or made 0.
        carry_part: the variable that is in its place.
        resets: what makes values 0 in some branches, by these values.
    """

    def __init__(self, rewriter: PartialSums, body: Any, carry: Any = None):
        self._rewriter, self._body, self._carry = rewriter, body, carry
        self._uses = DefUse(body.eqns, body.outvars)
        self._made = dict[int, list[Any]]()
        self._parts, self._reads = dict[Any, Any](), Counter[Any]()
        self._carrying = {carry}  # the values that have it as a summand
        self.carry_part = None if carry is None else rewriter.part_var(carry)
        self.scales = False
        self.resets = dict[Any, Resets]()

    @property
    def carried(self) -> bool:
        """Whether the value has the body's carry as one summand."""
        return self._reads[self._carry] > 0

    @property
    def eqns(self) -> list[Any]:
        """The equations of the body that gives parts."""
        every = enumerate(self._body.eqns)
        return [one for place, eqn in every for one in self._made.get(place, [eqn])]

    def check(self) -> None:
        """Refuse a value that something else reads than what is linear in it.

        Raises:
            NoSumError: if something does.
        """
        for var, reads in self._reads.items():
            if len(self._uses.readers(var)) != reads:
                raise NoSumError("a value has several readers")

    def part(self, var: Any) -> Any:
        """Return the parts of a value, and note the equations that make them.

        Raises:
            NoSumError: if it is not made of sums alone.
        """
        if compat.is_literal(var):
            raise NoSumError("a value is a constant")
        self._reads[var] += 1
        if var is self._carry:
            return self.carry_part
        if var in self._parts:
            return self._parts[var]
        eqn = self._uses.maker(var)
        if eqn is None or self._uses.made[var] in self._made:
            raise NoSumError("a value comes from outside of the scan")
        made, self._parts[var] = self._of(eqn, var)
        self._made[self._uses.made[var]] = made
        return self._parts[var]

    def _of(self, eqn: Any, var: Any) -> tuple[list[Any], Any]:
        name, rewriter = eqn.primitive.name, self._rewriter
        output = eqn.outvars.index(var)
        if name in REMATS:
            return rewriter.called(eqn, output)
        if name == "cond":
            return self._conditional(eqn, output)
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
        parts = {n: self.part(eqn.invars[n]) for n in self._linear(eqn)}
        carrying = [n for n in parts if eqn.invars[n] in self._carrying]
        keeps = name in _KEEPS_TOTAL and not (name == "sub" and 1 in carrying)
        self.scales |= len(carrying) > 1 or (bool(carrying) and not keeps)
        self._carrying |= {var} if carrying else set()
        return rewriter.linear(eqn, parts)

    def _conditional(self, eqn: Any, output: int) -> tuple[list[Any], Any]:
        """Return a conditional that passes parts on, or makes them 0."""
        passed, zero_in = set[int](), list[int]()
        for n, branch in enumerate(eqn.params["branches"]):
            out = branch.outvars[output]
            if not compat.is_literal(out) and out in branch.invars:
                passed.add(branch.invars.index(out))
            elif _is_zero(DefUse(branch.eqns, branch.outvars).maker(out)):
                zero_in.append(n)
            else:
                raise NoSumError("a branch of a conditional changes it")
        if len(passed) != 1 or compat.is_literal(eqn.invars[0]):
            raise NoSumError("a conditional does not pass it on")
        (operand,), var = passed, eqn.outvars[output]
        part = self.part(eqn.invars[1 + operand])
        if zero_in:
            at_end = is_at_end(str(eqn.source_info.name_stack))
            self.resets[var] = Resets(eqn.invars[0], tuple(zero_in), at_end)
        if eqn.invars[1 + operand] in self._carrying:
            self._carrying.add(var)
            self.scales |= bool(zero_in)
        made, parts = self._rewriter.conditional(eqn, operand, output, part)
        return [made], parts

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


def _stacking(scan: Any, var: Any) -> tuple[Any, Any]:
    """Return a scan that stacks one more value of its body, and the stack."""
    body, counts = scan.params["jaxpr"], compat.scan_counts(scan)
    stack = compat.stacked_var(var, scan.params["length"])
    body = compat.with_binders(body, body.invars, [*body.outvars, var])
    return compat.new_scan(scan, body, counts, scan.invars, [*scan.outvars, stack]), stack


def _with(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    """Return values with another one at one index."""
    return [value if n == place else v for n, v in enumerate(values)]
