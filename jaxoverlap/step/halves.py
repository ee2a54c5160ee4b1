"""Split the batch of a step in parts, whose collectives hide behind each other's matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.analysis.jaxprs import dots, has_nested_loops
from jaxoverlap.passes.analysis.mesh import is_cpu
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.halves.body import HostMemoryError
from jaxoverlap.passes.halves.least_matmul import least_matmul
from jaxoverlap.passes.halves.shardings import shardings_of_parts
from jaxoverlap.passes.halves.start import BatchDim, batch_dims
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.moved_first import first_dims
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.pin_results import is_even
from jaxoverlap.plan.edits import Pin, ShareViews, SplitBatch
from jaxoverlap.plan.halves import Halves
from jaxoverlap.simulation import hlo
from jaxoverlap.step.candidate import StepCandidate, evaluated
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.layouts import described, examples

_MIXED_UP = "XLA:CPU mixes up the rings of parts in loops within loops (docs/upstream.md)"


def in_parts(step: StepContext, unringed: StepCandidate, parts: int, unroll: int) -> StepCandidate:
    """Split the batch of a step, if that changes nothing but its speed.

    Args:
        step: the step.
        unringed: the step with its layouts.
        parts: the number of parts.
        unroll: iterations of a split scan per loop body.

    Returns:
        The step in parts; or as it was, with the reason, if its batch is not split.
    """
    question = ("in parts", unringed.edited.edits, parts, unroll)
    split = step.once(question, lambda: _in_parts(step, unringed, parts, unroll))
    return replace(split, layouts=unringed.layouts)


def safe_terms(step: StepContext, unringed: StepCandidate, terms: Terms) -> Terms:
    """Return terms without rings where XLA:CPU would deliver a permute of one part to another.

    It starts a loop, and then what sends beside it, before or after the loop's own collectives: on
    each device as it comes (docs/upstream.md). Rings share one channel, and so get wrong values.
    """
    if not (unringed.is_split and is_cpu(step.mesh) and has_nested_loops(unringed.jaxpr)):
        return terms
    rejected = dict.fromkeys((dot.index for dot in dots(unringed.jaxpr)), _MIXED_UP)
    return replace(terms, requests=replace(terms.requests, rejected=rejected))


def _in_parts(step: StepContext, unringed: StepCandidate, parts: int, unroll: int) -> StepCandidate:
    """Split the batch as `in_parts` does, which remembers the result."""
    edited, record = _split(step, unringed, parts, unroll)
    if record.why_not:
        return replace(unringed, halves=record)
    shardings = shardings_of_parts(unringed.jaxpr, edited.jaxpr, unringed.spmd.shardings, parts)
    if record.unroll > 1:
        edited = apply(edited, _as_in(shardings, edited.jaxpr, step.mesh))
    try:
        split = evaluated(step, StepCandidate(apply(edited, [ShareViews()])))
    except RewriteError as error:
        return _not_split(unringed, record, str(error))
    if split.why_not:
        return _not_split(unringed, record, split.why_not)
    spmd = replace(split.spmd, shardings=shardings)
    least = least_matmul(unringed.jaxpr, edited.jaxpr, shardings, parts, step.mesh.shape)
    record = msgspec.structs.replace(
        record,
        least_sum=min(_sums(spmd) - _sums(unringed.spmd), default=None),
        least_matmul=least,
    )
    return replace(unringed, edited=edited, program=spmd, halves=record)


def _sums(spmd: SpmdProgram) -> set[int]:
    """Return the sizes in bytes of the all-reduces of a partitioned step."""
    return {
        hlo.shape_bytes(i.shape)
        for body in spmd.module.computations.values()
        for i in body
        if i.opcode == "all-reduce"
    }


def _as_in(shardings: Mapping[Any, Shardings], jaxpr: Any, mesh: Mesh) -> list[Pin]:
    """Pin the results of matmuls to the shardings that they have where scans are not unrolled.

    XLA puts the slices that the steps of an unrolled body leave behind together, and then chooses
    other layouts: it gathered gradients of MaxText's weights over all devices.
    """
    return [
        Pin(site=dot.index, spec=spec)
        for dot in pinnable(jaxpr)
        if dot.index in shardings
        and (spec := shardings[dot.index].out) is not None
        and is_even(dot.eqn.outvars[0].aval.shape, spec, mesh)
    ]


def _not_split(unringed: StepCandidate, record: Halves, why_not: str) -> StepCandidate:
    """Return the step without a batch split, with the reason."""
    return replace(unringed, halves=msgspec.structs.replace(record, why_not=why_not))


def _split(
    step: StepContext, unringed: StepCandidate, parts: int, unroll: int
) -> tuple[EditedStep, Halves]:
    """Split the batch dim that most matmuls have, if each device holds enough of it."""

    def not_split(why_not: str) -> tuple[EditedStep, Halves]:
        return unringed.edited, Halves(parts=parts, why_not=why_not)

    if not step.outermost:  # who differentiates it would miss derivatives of the user's own
        return not_split("it is called under grad, vmap or jit")
    if step.explicit:  # there each type says how its value is sharded
        return not_split(f"mesh axes {', '.join(step.explicit)} are explicit")
    dims, sizes = DimNames(unringed.jaxpr), dict(step.mesh.shape)
    moved = first_dims(unringed.edited, dims)
    candidates = list(batch_dims(unringed.jaxpr, dims, unringed.spmd.shardings, sizes, moved))
    batch = next((r for r in candidates if r.divides(parts)), None)
    if batch is None:
        return not_split(_none_divides(step.jaxpr, dims, candidates))
    site, operand, dim = batch.found_at(unringed.jaxpr, dims)
    edit = SplitBatch(
        site=site, operand=operand, dim=dim, parts=parts, shards=batch.shards, unroll=unroll
    )
    try:
        edited = apply(unringed.edited, [edit])
    except HostMemoryError as error:
        return not_split(str(error))
    halved = edited.facts[SplitBatch]
    return edited, Halves(
        parts=parts,
        rows=_named(step.jaxpr, dims, batch),
        shards=batch.shards,
        unroll=halved.unroll,
        mixing=tuple(dict.fromkeys(map(described, halved.mixing))),
    )


def _none_divides(jaxpr: Any, dims: DimNames, candidates: list[BatchDim]) -> str:
    """Say why none of the batch dims is split."""
    if not candidates:
        return "no dim of the batch is one that most matmuls have"
    sizes = (f"{_named(jaxpr, dims, batch)} has {batch.held}" for batch in candidates)
    return f"a device's rows do not divide: {', '.join(sizes)}"


def _named(jaxpr: Any, dims: DimNames, batch: BatchDim) -> str:
    return next(iter(examples(jaxpr, dims, [batch.name])), "a dim of no argument")
