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
from typing import Any

import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.edited import EditedStep, check_named, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rewriting.late_sums import axes_by_name, scans_of
from jaxoverlap.passes.rewriting.partial_sums import (
    KEEPS_TOTAL,
    NoSumError,
    PartialSums,
    summed_dims,
)
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
        scans = _Scans(edit.scan, functools.partial(rewriter.root, carry=edit.carry))
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

    First over the axes that do not shard the total, which needs no memory; then over all.
    """
    carried = [*_carried(step)]
    free = [msgspec.structs.replace(edit, axes=axes) for edit, axes in carried if axes]
    if free:
        yield Proposal(tuple(free))
    every = [edit for edit, _ in carried]
    if every != free:
        yield Proposal(tuple(every))


def _carried(step: Evaluated) -> Iterator[tuple[SumCarried, _Axes]]:
    """Yield an edit for each carry of a scan into which sums over the batch are added.

    Each is over all axes that its sums have; with it come those that do not shard the total.
    """
    edited = step.step
    scans = list(scans_of(edited.jaxpr))
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

            rewriter = PartialSums(edited.mesh, None, cut_of)
            try:
                rewriter.root(scan, carry)
            except NoSumError:
                continue
            common = _common(sums, edited.mesh)
            if common:
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


def _accumulates(scan: Any, carry: int) -> bool:
    """Return whether a scan adds something to a carry, and does nothing else with it."""
    body, (num_consts, _) = scan.params["jaxpr"], compat.scan_counts(scan)
    var, out = body.invars[num_consts + carry], body.outvars[carry]
    if not jnp.issubdtype(var.aval.dtype, jnp.floating) or not var.aval.ndim:
        return False
    readers = [eqn for eqn in body.eqns if var in compat.variables(eqn.invars)]
    only = len(readers) == 1 and out is not var
    return only and readers[0].primitive.name in KEEPS_TOTAL


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
    """Return the dims of a sum's operands that it adds up, and the mesh axes that shard each."""
    cut = [dict[int, _Axes]() for _ in eqn.invars]
    for dims in summed_dims(eqn):
        first = next(operand for operand, dim in enumerate(dims) if dim is not None)
        var, dim = eqn.invars[first], dims[first]
        assert dim is not None
        on = tuple(a for a in axes.get(names.of(var)[dim], ()) if mesh.shape[a] > 1)
        if on and var.aval.shape[dim] % math.prod(mesh.shape[a] for a in on) == 0:
            for operand, dim in enumerate(dims):
                if dim is not None:
                    cut[operand][dim] = on
    return tuple(tuple(sorted(of_operand.items())) for of_operand in cut)


class _Scans:
    """One walk over a step that rewrites one scan, counted as `scans_of` does."""

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
