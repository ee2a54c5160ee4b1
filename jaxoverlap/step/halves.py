"""Cut the rows of a step in parts, whose collectives hide behind each other's matmuls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.analysis.jaxprs import dots, has_nested_loops
from jaxoverlap.passes.analysis.mesh import is_cpu
from jaxoverlap.passes.analysis.partitioned import Picture, Shardings
from jaxoverlap.passes.halves.body import HostMemoryError
from jaxoverlap.passes.halves.halve import Halved
from jaxoverlap.passes.halves.least_matmul import least_matmul
from jaxoverlap.passes.halves.shardings import shardings_of_parts
from jaxoverlap.passes.halves.start import Rows, rows_to_cut
from jaxoverlap.passes.halves.windows import ShardedWindows
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.memory import argument_bytes, estimated_peak_bytes
from jaxoverlap.passes.layouts.pins import pinnable, pinned
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.one_view import with_one_view
from jaxoverlap.passes.rewriting.pin_results import is_even
from jaxoverlap.plan.halves import Halves
from jaxoverlap.simulation import hlo
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.layouts import LaidOut, changed, described, examples

SOONEST = 4  # ways that tell which of two layouts is better for rings, or that halves are
_CLEARLY = 0.05  # of the step: the other ways with rings seldom gain more on the first
_STEPS = 2  # steps of a cut scan in one body: that hides what is bare at the ends of a step
_ROOM = 0.005  # of the step: what unrolled scans have to gain, as they need more memory
GAIN = 0.01  # of the step without rings: an estimate that says less does not tell two ways apart
_UNROLLED = 1.3  # times the memory that is estimated for unrolled scans beside the arguments
_XLA_USES = 0.8  # of a device's memory: where a step needs more, XLA computes values again
_MEMORY = 1.15  # times the memory that the plain step needs, by estimate
_MIXED_UP = "XLA:CPU mixes up the rings of parts in loops within loops (docs/upstream.md)"


def in_parts(step: StepContext, laid: LaidOut, parts: int, unroll: int) -> LaidOut:
    """Cut the rows of a step that is laid out, if that changes nothing but its speed.

    Args:
        step: the step.
        laid: the step as it is laid out.
        parts: the number of parts.
        unroll: how many steps of a cut scan stand in one body of its loop.

    Returns:
        The step in parts; or as it was, with the reason, where its rows are not cut.
    """
    question = ("in parts", id(laid.jaxpr), parts, unroll)
    cut = step.once(question, lambda: _in_parts(step, laid, parts, unroll))
    return replace(cut, layouts=laid.layouts)


def in_halves(
    step: StepContext,
    laid: LaidOut,
    ways_of: Callable[[LaidOut], Any],
) -> Any:
    """Take the step in halves, if it is estimated to be faster so than with whole rows.

    Args:
        step, laid: as for `in_parts`.
        ways_of: gives the ways to run a step that is laid out (`ways._Ways`).

    Returns:
        The `ways.Way` that is taken.
    """
    whole = ways_of(laid)
    best = whole.fastest(most=SOONEST)
    cut = in_parts(step, laid, 2, 1)
    assert cut.halves is not None
    record, why_not = cut.halves, cut.halves.why_not
    if cut.is_cut and not (why_not := too_large(step.plain, cut.picture)):
        cuts = [cut]
        if any(dot.runs > 1 for dot in dots(cut.jaxpr)):
            unrolled = in_parts(step, laid, 2, _STEPS)
            cuts += [unrolled] if fits(unrolled.picture, step.cost) else []
        way, *others = (ways_of(cut).fastest(rings=False) for cut in cuts)
        most_s = seconds(way) * (1 - _ROOM)
        way = next((other for other in others if seconds(other) < most_s), way)
        step_s = seconds(way)
        if step_s > seconds(best) * (1 - _CLEARLY):
            best = whole.fastest()
        assert way.plan.halves is not None
        whole_s = seconds(best)
        record = msgspec.structs.replace(way.plan.halves, whole_s=whole_s, step_s=step_s)
        # Rings are estimated the shorter of the two, by a hundredth on the suite's 7B steps.
        least = 0 if best.plan.decisions else GAIN
        if step_s < whole_s * (1 - least):
            return replace(way, plan=msgspec.structs.replace(way.plan, halves=record))
        slower = step_s >= whole_s
        why_not = (
            "the step is faster without a split" if slower else f"it gains less than {GAIN:.0%}"
        )
    else:
        best = whole.fastest()
    record = msgspec.structs.replace(record, why_not=why_not)
    return replace(best, plan=msgspec.structs.replace(best.plan, halves=record))


def seconds(way: Any) -> float:
    """Return the estimated seconds of a way; infinity where they are not known."""
    return math.inf if way.step_s is None else way.step_s


def safe_terms(step: StepContext, laid: LaidOut, terms: Terms) -> Terms:
    """Return terms without rings where XLA:CPU would mix up those of two parts.

    It starts a loop, and then what sends beside it, before or after the loop's own collectives: on
    each device as it comes (docs/upstream.md). Rings share one channel, and so get wrong values.
    """
    if not (laid.is_cut and is_cpu(step.mesh) and has_nested_loops(laid.jaxpr)):
        return terms
    rejected = dict.fromkeys((dot.index for dot in dots(laid.jaxpr)), _MIXED_UP)
    return replace(terms, requests=replace(terms.requests, rejected=rejected))


def _in_parts(step: StepContext, laid: LaidOut, parts: int, unroll: int) -> LaidOut:
    """Cut the rows as `in_parts` does, which asks once about each step."""
    jaxpr, record = _cut(step, laid, parts, unroll)
    if record.why_not:
        return replace(laid, halves=record)
    shardings = shardings_of_parts(laid.jaxpr, jaxpr, laid.picture.shardings, parts)
    if record.unroll > 1:
        jaxpr = _as_in(shardings, jaxpr, step.mesh)
    try:
        picture = step.partitioned(with_one_view(jaxpr), ask=False)
    except RewriteError as error:
        return _left(laid, record, str(error))
    if why_not := changed(step.plain, picture):
        return _left(laid, record, why_not)
    picture = replace(picture, shardings=shardings)
    record = msgspec.structs.replace(
        record,
        least_sum=min(_sums(picture) - _sums(laid.picture), default=None),
        least_matmul=least_matmul(laid.jaxpr, jaxpr, shardings, parts, step.mesh.shape),
    )
    return replace(laid, jaxpr=jaxpr, picture=picture, halves=record)


def _sums(picture: Picture) -> set[int]:
    """Return the sizes in bytes of the all-reduces of a partitioned step."""
    return {
        hlo.shape_bytes(i.shape)
        for body in picture.module.computations.values()
        for i in body
        if i.opcode == "all-reduce"
    }


def _as_in(shardings: Mapping[Any, Shardings], jaxpr: Any, mesh: Mesh) -> Any:
    """Pin the results of matmuls to how they lie where scans are not unrolled.

    XLA puts the slices that the steps of an unrolled body leave behind together, and then chooses
    other layouts: it gathered gradients of MaxText's weights over all devices.
    """
    pins = {
        dot.index: spec
        for dot in pinnable(jaxpr)
        if dot.index in shardings
        and (spec := shardings[dot.index].out) is not None
        and is_even(dot.eqn.outvars[0].aval.shape, spec, mesh)
    }
    return pinned(jaxpr, pins, mesh)


def fits(unrolled: Picture, cost: CostModel | None) -> bool:
    """Return whether XLA has memory for unrolled scans, by estimate.

    XLA gathers the weights of both steps of a scan at once, which the estimate does not see: the 7B
    step of the suite then needs a fifth more.
    """
    if cost is None:
        return False
    arguments = argument_bytes(unrolled.module)
    beside = estimated_peak_bytes(unrolled.module) - arguments
    return arguments + beside * _UNROLLED <= cost.cluster.chip.memory_bytes * _XLA_USES


def _left(laid: LaidOut, record: Halves, why_not: str) -> LaidOut:
    """Return the step with whole rows, with the reason."""
    return replace(laid, halves=msgspec.structs.replace(record, why_not=why_not))


def too_large(plain: Picture, picture: Picture) -> str:
    """Say by how much the parts exceed the plain step's memory; empty if they do not."""
    before, after = (estimated_peak_bytes(p.module) for p in (plain, picture))
    if after <= before * _MEMORY:
        return ""
    return f"they need about {human_bytes(after)} of memory, the plain step {human_bytes(before)}"


def _cut(step: StepContext, laid: LaidOut, parts: int, unroll: int) -> tuple[Any, Halves]:
    """Cut the rows that most matmuls have, if there are any, and each device has enough."""
    if not step.outermost:  # who differentiates it would miss derivatives of the user's own
        why_not = "it is called under grad, vmap or jit"
        return laid.jaxpr, Halves(parts=parts, why_not=why_not)
    if step.explicit:  # there each type says how its value is sharded
        axes = ", ".join(step.explicit)
        return laid.jaxpr, Halves(parts=parts, why_not=f"mesh axes {axes} are explicit")
    dims, sizes = DimNames(laid.jaxpr), dict(step.mesh.shape)
    candidates = list(rows_to_cut(laid.jaxpr, dims, laid.picture.shardings, sizes))
    rows = next((r for r in candidates if r.divides(parts)), None)
    if rows is None:
        return laid.jaxpr, Halves(parts=parts, why_not=_none_divides(step.jaxpr, dims, candidates))
    try:
        done = Halved(
            laid.jaxpr,
            lambda var: rows.dim(dims, var),
            rows.cut(parts),
            unroll,
            whole=ShardedWindows(step.jaxpr, step.arguments, dims, sizes),
        )
    except HostMemoryError as error:
        return laid.jaxpr, Halves(parts=parts, why_not=str(error))
    return done.jaxpr, Halves(
        parts=parts,
        rows=_named(step.jaxpr, dims, rows),
        shards=rows.shards,
        unroll=done.unroll,
        mixing=tuple(dict.fromkeys(map(described, done.mixing))),
    )


def _none_divides(jaxpr: Any, dims: DimNames, candidates: list[Rows]) -> str:
    """Say why none of the rows that could be cut is."""
    if not candidates:
        return "no dim of the batch is one that most matmuls have"
    held = (f"{_named(jaxpr, dims, rows)} has {rows.held}" for rows in candidates)
    return f"a device's rows do not divide: {', '.join(held)}"


def _named(jaxpr: Any, dims: DimNames, rows: Rows) -> str:
    return next(iter(examples(jaxpr, dims, [rows.name])), "a dim of no argument")
