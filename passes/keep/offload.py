"""Move values that the forward pass saves to the host's memory, until the backward pass reads them.

    scan over w:              body:  h = dot x w ;  y = tanh h                  stacked: h
    scan back over w, h:      body:  ... h ...

->  scan over w, carry p:     body:  h = dot x w ;  y = tanh h ;  p' = h        stacked: to_host p
    scan back over w, s, carry h:    body:  ... h ... ;  h' = to_device s

The copies run one step of the scan away from the kernels that make and read a value, or they would
have only the rest of one step to hide in: a step stores the value of the step before, and brings
the value that the next step of the backward pass reads. So the last value never leaves the device,
and the first one that is stored is zeros that nobody reads. A device holds the values of two steps.

Of layers that are written one after the other, each value that only the backward pass still reads
is copied to the host's memory as it is made, and back before its first reader there; XLA's
scheduler moves these copies. The value that is read back first stays on the device.

XLA:GPU copies slices of pinned memory by the copy engines, asynchronously. It refuses slices of
host memory in unrolled scans, so a batch split does not unroll these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.keep.layers import is_backward, num_bytes
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.scans import with_more
from jaxoverlap.passes.planning.entries import line_of, type_of
from jaxoverlap.plan.edits import Keep, Offload

_Place = tuple[int, int, int]
"""The number of a body, of an equation in it, and of a result of that."""
_SMALL = 1 / 64  # of the largest value's bytes


class _Stack(NamedTuple):
    """A stacked result that one later scan reads, step by step, from its last one on.

    Attributes:
        output: its index among the results of the scan that makes it.
        reader: the index of the later scan.
        operand: its index among the operands of that.
    """

    output: int
    reader: int
    operand: int
    first = -1  # a step of the scan keeps the value that is read first by itself


class _Alone(NamedTuple):
    """A result of an equation that no scan stacks, and that a backward pass reads.

    Attributes:
        output: its index among the results.
        readers: the indices of the equations of the backward pass that read it.
    """

    output: int
    readers: tuple[int, ...]

    @property
    def first(self) -> int:
        """The index of its first reader."""
        return min(self.readers)


def run(step: EditedStep, edits: Sequence[Offload]) -> EditedStep:
    """Offload the values that edits name."""
    jaxpr = opened(step.jaxpr)
    wanted: dict[int, list[tuple[Offload, int, int]]] = {}
    for edit in edits:
        for number, position, output in edit.places:
            wanted.setdefault(number, []).append((edit, position, output))

    def visit(body: Body) -> list[Any] | None:
        if (here := wanted.pop(body.index, None)) is None:
            return None
        stacks: dict[int, list[_Stack]] = {}
        alone: dict[int, list[_Alone]] = {}
        for edit, position, output in here:
            match _named(body, edit, position, output):
                case _Stack() as one:
                    stacks.setdefault(position, []).append(one)
                case one:
                    alone.setdefault(position, []).append(one)
        return _offloaded(body, stacks, alone)

    jaxpr = map_bodies(jaxpr, visit)
    for number, ((edit, *_), *_) in wanted.items():
        raise misfit(edit, f"the step has no body {number}")
    return step.to(jaxpr)


def offloads(step: EditedStep, kept: Sequence[Keep]) -> list[Offload]:
    """Return the edits that offload values which the last edits of a step keep.

    Of those of which one place cannot be offloaded there are none.
    """
    values: Mapping[Any, Any] = step.facts[Keep]
    found = dict[Any, tuple[int, _Place]]()
    for body in bodies(opened(step.jaxpr)):
        for position, eqn in enumerate(body.eqns):
            for one in _waiting(body, position):
                found[eqn.outvars[one.output]] = one.first, (body.index, position, one.output)
    edits = list[Offload]()
    for edit in kept:
        own = [found[value] for place in edit.places if (value := values.get(place)) in found]
        if len(own) == len(edit.places):
            edits.append(
                Offload(source=edit.source, name=edit.name, value=edit.value, places=_late(own))
            )
    return edits


def saved(jaxpr: Any) -> list[Offload]:
    """Return edits that offload all that waits for the backward pass, with unsharded bytes.

    It is what scans stack for later ones; and what is no stack, unless it is small.
    """
    groups = dict[Any, list[tuple[int, _Place, int]]]()
    for body in bodies(opened(jaxpr)):
        for position, eqn in enumerate(body.eqns):
            for one in _waiting(body, position):
                value, maker, around = eqn.outvars[one.output], eqn, body.around
                own = one.first, (body.index, position, one.output), num_bytes(value)
                if isinstance(one, _Stack):
                    inside = eqn.params["jaxpr"]
                    value = inside.outvars[one.output]
                    maker = DefUse(inside.eqns, ()).maker(value) or eqn
                    around = (*around, eqn)
                groups.setdefault((line_of(maker, around), type_of(value)), []).append(own)
    largest = max((size for some in groups.values() for *_, size in some), default=0)
    edits = list[Offload]()
    for (source, value), some in groups.items():
        places = _late([(reader, place) for reader, place, _ in some])
        size = sum(size for _, place, size in some if place in places)
        if some[0][0] < 0 or some[0][2] >= _SMALL * largest:
            edits.append(Offload(source=source, value=value, places=places, bytes_offloaded=size))
    return edits


def _late(values: Sequence[tuple[int, _Place]]) -> tuple[_Place, ...]:
    """Say where values are, but for the one that is read first where no scan stacks them.

    Args:
        values: the first reader of each, -1 of a stack; and its place.
    """
    first = min(reader for reader, _ in values)
    may = [place for reader, place in values if reader != first or first < 0]
    return tuple(dict.fromkeys(may or [place for _, place in values]))


def _named(body: Body, edit: Offload, position: int, output: int) -> _Stack | _Alone:
    if 0 <= position < len(body.eqns):
        for one in _waiting(body, position):
            if one.output == output:
                return one
    raise misfit(edit, f"equation {position} has no result {output} that waits for a later pass")


def _waiting(body: Body, position: int) -> Iterator[_Stack | _Alone]:
    """Yield the results of an equation that may be offloaded."""
    yield from _stacks(body, position)
    yield from _alone(body, position)


def _can_wait(var: Any) -> bool:
    """Return whether a value may be in the host's memory, and is not."""
    return compat.has_numbers(var) and not compat.in_host_memory(var)


def _alone(body: Body, position: int) -> Iterator[_Alone]:
    """Yield the results of an equation of the forward pass that the backward pass reads."""
    eqn = body.eqns[position]
    if eqn.primitive.name == "scan" or not body.is_global or is_backward(eqn):
        return
    for output, var in enumerate(eqn.outvars):
        readers = [n for n in body.uses.readers(var) if n is not None and is_backward(body.eqns[n])]
        if readers and None not in body.uses.readers(var) and _can_wait(var):
            yield _Alone(output, tuple(readers))


def _stacks(body: Body, position: int) -> Iterator[_Stack]:
    """Yield the results of a scan that may be offloaded."""
    scan = body.eqns[position]
    if scan.primitive.name != "scan" or scan.params["length"] < 2 or not body.is_global:
        return
    num_consts, num_carry = compat.scan_counts(scan)
    inside = scan.params["jaxpr"]
    made = {v for eqn in inside.eqns for v in eqn.outvars}
    made |= {*inside.invars[num_consts : num_consts + num_carry]}
    for output in range(num_carry, len(scan.outvars)):
        stack, value = scan.outvars[output], inside.outvars[output]
        reader = body.uses.only_reader(stack)
        is_array = not compat.is_literal(value) and value in made and _can_wait(value)
        if reader is None or not is_array:
            continue
        slicer = body.eqns[reader]
        if slicer.primitive.name != "scan" or slicer.params["reverse"] == scan.params["reverse"]:
            continue
        operand = next(n for n, atom in enumerate(slicer.invars) if atom is stack)
        if operand >= sum(compat.scan_counts(slicer)):
            yield _Stack(output, reader, operand)


def _offloaded(
    body: Body, stacks: Mapping[int, Sequence[_Stack]], alone: Mapping[int, Sequence[_Alone]]
) -> list[Any]:
    """Return a body's equations, some values of which are in the host's memory.

    Args:
        body: the body.
        stacks: those that scans stack, by the index of the scan.
        alone: others, by the index of the equation that makes them.
    """
    eqns, before, after = [*body.eqns], dict[int, list[Any]](), dict[int, list[Any]]()
    for position, some in stacks.items():
        scan, zeros, lasts = _storing(eqns[position], [one.output for one in some])
        eqns[position] = scan
        before[position] = zeros
        for reader in dict.fromkeys(one.reader for one in some):
            operands = {
                one.operand: (scan.outvars[one.output + len(some)], last)
                for one, last in zip(some, lasts, strict=True)
                if one.reader == reader
            }
            eqns[reader] = _bringing(eqns[reader], operands)
    for position, some in alone.items():
        for one in some:
            eqn, first = body.eqns[position], body.eqns[one.first]
            value = eqn.outvars[one.output]
            stored, waiting = (compat.host_var(value) for _ in range(2))
            brought = compat.like_var(value)
            # XLA's algebraic simplifier removes a copy of a copy, whatever memory it is in.
            after.setdefault(position, []).extend(
                inlining.inline(compat.to_host, [value], [stored], eqn)
                + inlining.inline(compat.barrier, [stored], [waiting], eqn)
            )
            before.setdefault(one.first, []).extend(
                inlining.inline(compat.to_device, [waiting], [brought], first)
            )
            for reader in one.readers:
                invars = [brought if v is value else v for v in eqns[reader].invars]
                eqns[reader] = eqns[reader].replace(invars=invars)
    return [
        one for n, eqn in enumerate(eqns) for one in (*before.get(n, ()), eqn, *after.get(n, ()))
    ]


def _storing(scan: Any, outputs: Sequence[int]) -> tuple[Any, list[Any], list[Any]]:
    """Let each step of a scan store the values of the step before in the host's memory.

    Returns:
        The scan, whose stacks come behind as many further results; the equations of the zeros that
        it starts with; and the values of its last step.
    """
    inside, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    values = [inside.outvars[output] for output in outputs]
    earlier, zeros, lasts = ([compat.like_var(v) for v in values] for _ in range(3))
    stored, results, stacks = list[Any](), [*inside.outvars], [*scan.outvars]
    for output, value in zip(outputs, earlier, strict=True):
        results[output] = compat.host_var(value)
        stacks[output] = compat.host_var(stacks[output])
        stored += inlining.inline(compat.to_host, [value], [results[output]], scan)
    first = [
        one
        for zero in zeros
        for one in inlining.inline(lambda z=zero: [compat.zeros_like(z)], [], [zero], scan)
    ]

    inside = compat.with_binders(
        inside, with_more(scan, inside.invars, earlier), [*values, *results]
    )
    inside = inside.replace(eqns=[*stored, *inside.eqns])
    counts = num_consts, num_carry + len(values)
    invars = with_more(scan, scan.invars, zeros)
    return compat.new_scan(scan, inside, counts, invars, [*lasts, *stacks]), first, lasts


def _bringing(scan: Any, operands: Mapping[int, tuple[Any, Any]]) -> Any:
    """Let each step of a scan bring the values that the next one reads from the host's memory.

    Args:
        scan: the scan.
        operands: by the index of an operand that is in slices: the stack in the host's memory, and
            the value that the first step reads.
    """
    inside, (num_consts, num_carry) = scan.params["jaxpr"], compat.scan_counts(scan)
    binders, invars, brought = [*inside.invars], [*scan.invars], list[Any]()
    values = [binders[n] for n in operands]
    later = [compat.like_var(v) for v in values]
    for (n, (stack, _)), following in zip(operands.items(), later, strict=True):
        binders[n], invars[n] = compat.host_var(binders[n]), stack
        brought += inlining.inline(compat.to_device, [binders[n]], [following], scan)

    inside = compat.with_binders(
        inside, with_more(scan, binders, values), [*later, *inside.outvars]
    )
    inside = inside.replace(eqns=[*brought, *inside.eqns])
    counts = num_consts, num_carry + len(values)
    given = with_more(scan, invars, [first for _, first in operands.values()])
    unused = [compat.unused_var(v) for v in later]
    return compat.new_scan(scan, inside, counts, given, [*unused, *scan.outvars])
