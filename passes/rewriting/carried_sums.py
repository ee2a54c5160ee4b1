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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep, check_named, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rewriting import boundaries
from jaxoverlap.passes.rewriting.device_parts import NoSumError, summed_dims
from jaxoverlap.passes.rewriting.late_sums import axes_by_name
from jaxoverlap.passes.rewriting.partial_sums import PartialSums
from jaxoverlap.passes.rewriting.scans import ReplacedScan, scans_of
from jaxoverlap.plan.edits import SumCarried, Summand

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

        rewriter = PartialSums(step.mesh, edit.axes, next_cut)
        scans = ReplacedScan(edit.scan, functools.partial(rewriter.root, carry=edit.carry))
        try:
            jaxpr = scans.jaxpr(jaxpr)
        except NoSumError as error:
            raise misfit(edit, f"no sum leaves that carry: {error}") from error
        if scans.count <= edit.scan:
            raise misfit(edit, f"the step has {scans.count} scans, counted from 0")
        if left:
            raise misfit(edit, f"the scan adds up {len(left)} sums fewer into that carry")
    return step.to(jaxpr)


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to add up behind their scans all sums that can be.

    First over the axes that do not shard the total, which needs no memory; then over all. Updates
    that scans use in few iterations are computed in these alone, as they need the total.
    """
    found = list(boundaries.boundaries_of(step.step))
    yield from (Proposal(why_not=why) for why in found if isinstance(why, str))
    rarely = tuple(edit for edit in found if not isinstance(edit, str))
    if rarely:
        yield Proposal(rarely)
    try:
        edited = boundaries.run(step.step, rarely)
    except UserError:  # as the proposal says
        rarely, edited = (), step.step
    carried = [*_carried(edited, _known(step, edited))]
    free = [msgspec.structs.replace(edit, axes=axes) for edit, axes in carried if axes]
    if free:
        yield Proposal((*rarely, *free))
    every = [edit for edit, _ in carried]
    if every != free:
        yield Proposal((*rarely, *every))


def _known(step: Evaluated, edited: EditedStep) -> dict[int, Shardings]:
    """Return the shardings of a step's matmuls by their numbers after edits that move some."""
    if edited is step.step:
        return dict(step.shardings)
    numbers = {dot.eqn.outvars[0]: dot.index for dot in dots(step.step.jaxpr)}
    kept = [dot for dot in dots(edited.jaxpr) if dot.eqn.outvars[0] in numbers]
    pairs = ((dot.index, numbers[dot.eqn.outvars[0]]) for dot in kept)
    return {now: step.shardings[before] for now, before in pairs if before in step.shardings}


def _carried(
    edited: EditedStep, shardings: Mapping[int, Shardings]
) -> Iterator[tuple[SumCarried, _Axes]]:
    """Yield an edit for each carry of a scan into which sums over the batch are added.

    Each is over all axes that its sums have; with it come those that do not shard the total.
    """
    scans = list(scans_of(edited.jaxpr))
    totals = [
        (number, scan, carry)
        for number, scan in reversed([*enumerate(scans)])  # outer scans first
        for carry in range(compat.scan_counts(scan)[1])
        if _accumulates(scan, carry, edited.mesh)
    ]
    if not totals:
        return
    names, done = DimNames(edited.jaxpr), set[int]()
    axes = axes_by_name(edited, names, shardings)
    for number, scan, carry in totals:
        if id(scan) in done:
            continue
        sums: list[Summand] = []
        total = scan.params["jaxpr"].invars[compat.scan_counts(scan)[0] + carry]

        def cut_of(eqn: Any, sums: list[Summand] = sums) -> Summand:
            sums.append(_summand(eqn, names, axes, edited.mesh))
            return sums[-1]

        rewriter = PartialSums(edited.mesh, None, cut_of)
        rewriter.root(scan, carry)
        if common := _common(sums, edited.mesh):
            done |= rewriter.inner
            own = _own_axes(names.of(total), edited, names)
            free = tuple(axis for axis in common if axis not in own)
            edit = SumCarried(
                scan=number,
                carry=carry,
                source=line_of(scan, ()),
                axes=common,
                sums=tuple(sums),
            )
            yield edit, free


def _accumulates(scan: Any, carry: int, mesh: Mesh) -> bool:
    """Return whether a scan's carry is made of sums and its own value alone."""
    body, (num_consts, _) = scan.params["jaxpr"], compat.scan_counts(scan)
    var, out = body.invars[num_consts + carry], body.outvars[carry]
    if not jnp.issubdtype(var.aval.dtype, jnp.floating) or not var.aval.ndim or out is var:
        return False
    try:
        PartialSums(mesh, None, lambda eqn: ()).root(scan, carry)
    except NoSumError:
        return False
    return True


def _own_axes(total: Sequence[Name], step: EditedStep, names: DimNames) -> set[str]:
    """Return the mesh axes that shard a total, as they do the argument that has its dims.

    That may be one dim longer, as stacked layers are. All axes of the mesh, if there is none.
    """
    pairs = zip(step.jaxpr.invars, step.arguments, strict=True)
    alike = [(names.of(v), spec) for v, spec in pairs if {*total} <= {*names.of(v)}]
    for of_var, spec in sorted(alike, key=lambda one: len(one[0])):
        if spec is not None:
            return {a for name, on in zip(of_var, spec, strict=True) if name in total for a in on}
    return set(step.mesh.axis_names)


def _common(sums: Sequence[Summand], mesh: Mesh) -> _Axes:
    """Return the mesh axes that every sum adds up over, in the mesh's order."""
    of_each = [{a for operand in one for _, on in operand for a in on} for one in sums]
    return tuple(a for a in mesh.axis_names if of_each and all(a in one for one in of_each))


def _summand(eqn: Any, names: DimNames, axes: Mapping[Name, _Axes], mesh: Mesh) -> Summand:
    """Return the dims of a sum's operands that it adds up, and the mesh axes that shard each.

    Names of two dims may have one axis, as values differ in how they are sharded: the first has it.
    """
    cut, used = [dict[int, _Axes]() for _ in eqn.invars], set[str]()
    for dims in summed_dims(eqn):
        first = next(operand for operand, dim in enumerate(dims) if dim is not None)
        var, dim = eqn.invars[first], dims[first]
        assert dim is not None
        free = (a for a in axes.get(names.of(var)[dim], ()) if a not in used)
        on = tuple(a for a in free if mesh.shape[a] > 1)
        if on and var.aval.shape[dim] % math.prod(mesh.shape[a] for a in on) == 0:
            used.update(on)
            for operand, dim in enumerate(dims):
                if dim is not None:
                    cut[operand][dim] = on
    return tuple(tuple(sorted(of_operand.items())) for of_operand in cut)
