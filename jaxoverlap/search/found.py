"""Search for the plan of a step: choose its edits by the estimate, note what was done."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from jaxoverlap.cost.groups import groups_of
from jaxoverlap.flags import options_for
from jaxoverlap.hardware.topology import axis_costs
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import bodies, dots, equations
from jaxoverlap.passes.analysis.matmul_collectives import behind_conversions
from jaxoverlap.passes.analysis.mesh import unread
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.entries import NO_COLLECTIVE, described, with_conversions
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.ring_edits import edits_of
from jaxoverlap.passes.planning.terms import Requests, Terms
from jaxoverlap.passes.rewriting.prefetch import joined_bytes
from jaxoverlap.plan.decisions import Decision, Skip
from jaxoverlap.plan.edits import (
    DropTypes,
    PinResults,
    ShareViews,
    SplitBatch,
    TransformPerShard,
)
from jaxoverlap.plan.limits import STREAM_GAIN
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.speedup import CandidateName, milliseconds
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.evaluate import Evaluator
from jaxoverlap.search.kept import kept, offer
from jaxoverlap.search.layouts import Layouts
from jaxoverlap.search.records import (
    entries_of,
    kept_apart,
    laid_out,
    layouts_of,
    proposed,
    split_notes,
)
from jaxoverlap.search.repairs import repaired
from jaxoverlap.search.search import Trail, gains, search, split_of
from jaxoverlap.search.stages import LAYOUT_STAGES, stages_of
from jaxoverlap.search.types import untyped
from jaxoverlap.step.check_plan import applied
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options
from jaxoverlap.step.pipeline import PassResult


def found(step: StepContext, options: Options) -> PassResult:
    """Search for the edits of a step.

    Raises:
        RewriteError: if XLA does not partition the step, or a pass fails on it.
        ValueError: if an option names a matmul that is not there.
    """
    if why := unread(step.mesh):
        if options.keeps:
            raise UserError(f"memory= and keep= need shardings, which cannot be read: {why}")
        return _undecided(step, _terms(step, options), why)
    step = kept(untyped(step), options)
    if options.layouts is not None and options.pins is None:
        step = repaired(step)
    trail = _searched(step, options)
    done = _result(step, options, trail, trail.taken)
    if not options.never_slower:  # then nothing is compared once it is compiled
        return done
    close = {name: _result(step, options, trail, one) for name, one in _close(trail).items()}
    return replace(done, close={name: (one.plan, one.edited) for name, one in close.items()})


def with_offer(step: StepContext, options: Options, plan: Plan) -> Plan:
    """Return a plan with a note of what `memory=` would save, where it is not stated.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    if options.keeps or options.plan is not None or unread(step.mesh):
        return plan
    note = offer(untyped(step))
    return msgspec.structs.replace(plan, notes=(*plan.notes, note)) if note else plan


def layouts_found(step: StepContext, options: Options) -> Layouts | None:
    """Search for layouts alone, for a step that stays as it is; None if none are searched for.

    Raises:
        RewriteError, ValueError: as `found`.
    """
    if unread(step.mesh) or not _lays_out(step := untyped(step), options):
        return None
    step = repaired(step)
    trail = _searched(step, options, LAYOUT_STAGES)
    return layouts_of(step, trail, trail.taken)


def _searched(step: StepContext, options: Options, only: Collection[str] = ()) -> Trail:
    """Search through the stages of a step, or some of them."""
    terms = _terms(step, options)
    evaluate = Evaluator(step, terms)
    stages = stages_of(step, options, terms)
    stages = [stage for stage in stages if not only or stage.name in only]
    trail = search(evaluate.start(), stages, evaluate)
    goes_on = {row for one in trail.left for row in one.line}
    for row in trail.rows:  # answers stay in memory, for searches with other options
        if row not in goes_on and row.evaluated is not None:
            row.evaluated.program.forget()
    return trail


def _lays_out(step: StepContext, options: Options) -> bool:
    """Return whether layouts are searched for."""
    searches = options.layouts is not None and options.pins is None
    return searches and step.cost is not None and not step.explicit


def _close(trail: Trail) -> dict[CandidateName, Candidate]:
    """Return the candidates to compile besides the one that was taken, by their names."""
    close = dict[CandidateName, Candidate]()
    for one in trail.close:
        same_parts = split_of(one)[0] == split_of(trail.taken)[0]
        close.setdefault("other loops" if same_parts else "other rows", one)
    return close


def _result(step: StepContext, options: Options, trail: Trail, taken: Candidate) -> PassResult:
    """Return what a candidate makes of a step, with the plan for it."""
    edited = _edited(step, taken)
    entries = entries_of(trail, taken)
    if any(entry.why == NO_COLLECTIVE for entry in entries):
        converted = behind_conversions(laid_out(taken).known.program.module)
        entries = with_conversions(entries, dots(step.jaxpr), converted)
    parts = 2 if options.halves == "auto" else options.halves
    if options.halves == "auto" and not (step.cost and options.chooses):
        parts = None
    layouts = layouts_of(step, trail, taken) if _lays_out(step, options) else None
    price, two_streams = None, False
    notes = [*step.notes, *(layouts.lines if layouts else ())]
    if parts is not None:
        notes += split_notes(trail, taken, parts)
    if (step_s := taken.evaluation.step_s) is not None:
        price, two_streams, line = _priced(step, taken, entries, layouts)
        notes += line
    plan = _plan(
        *(step, edited, entries),
        {"nvlink_stream": two_streams, **kept_apart(step, taken)},
        notes=tuple(notes),
        trail=proposed(trail, taken),
        price=price,
    )
    return PassResult(plan, step, edited, step_s)


def _edited(step: StepContext, taken: Candidate) -> EditedStep:
    """Return the step after the edits of a candidate; as it is, if they change nothing."""
    if all(isinstance(edit, DropTypes | PinResults) for edit in taken.edits):
        # nothing is changed, so types stay
        return step.typed.edited if step.typed is not None and not step.inferred else step.edited
    return apply(taken.known.step, [ShareViews()])


def _plan(
    step: StepContext,
    edited: EditedStep,
    entries: Sequence[Decision | Skip],
    settings: Mapping[str, Any],
    **what: Any,
) -> Plan:
    """Make the plan of a step from its edits, and from what was found out about them.

    Args:
        step: the step.
        edited: the step after its edits.
        entries: of its matmuls.
        settings: further arguments of `options_for`.
        what: further fields of the plan.
    """
    operations = (at for at in equations(step.jaxpr) if partitions_itself(at[0]))
    return Plan(
        step=step.params["name"],
        mesh=dict(step.mesh.shape),
        edits=edited.edits,
        entries=tuple(entries),
        applied=applied(edited),
        xla_options=options_for(
            step.mesh,
            rings=any(isinstance(entry, Decision) for entry in entries),
            parts=edited.has(SplitBatch),
            joined_bytes=joined_bytes(edited),
            **settings,
        ),
        partitioning=tuple(dict.fromkeys(described(*at) for at in operations)),
        made_for=step.origin,
        **what,
    )


def _undecided(step: StepContext, terms: Terms, why: str) -> PassResult:
    """Return the plan of a step whose shardings cannot be read: only its own `shard_map`s say."""
    entries, rings_by_body = decide(bodies(step.jaxpr), {}, terms)
    edits = [edit for body_rings in rings_by_body.values() for edit in edits_of(body_rings)]
    edited = apply(step.edited, [*edits, ShareViews()]) if edits else step.edited
    return PassResult(_plan(step, edited, entries, {}), step, edited)


def _terms(step: StepContext, options: Options) -> Terms:
    """Collect the terms of all decisions on a step."""
    return Terms(
        axis_sizes=dict(step.mesh.shape),
        requests=Requests(options.skip, options.granularity),
        costs=axis_costs(step.mesh, step.named),
        prices=step.cost and RingCosts(step.cost, groups_of(step.mesh, step.named)),
        prefetch=options.fsdp == "prefetch",
        rings=options.rings,
        explicit=step.explicit,
        unread=unread(step.mesh),
    )


def _by_transforms(line: Sequence[Candidate]) -> float:
    """Return the seconds that Fourier transforms per shard save, in a line of candidates."""
    return sum(
        one.parent.seconds - one.seconds
        for one in line
        if one.parent is not None and one.proposes(TransformPerShard)
    )


def _priced(
    step: StepContext,
    taken: Candidate,
    entries: Sequence[Decision | Skip],
    layouts: Layouts | None,
) -> tuple[Price, bool, list[str]]:
    """Estimate the gain of each tool.

    Args:
        step: the step, whose cluster has prices.
        taken: the candidate that is taken.
        entries: of its matmuls.
        layouts: the layouts, if they were searched for.

    Returns:
        The gains; whether NVLink's collectives get a stream of their own; the note about it.
    """
    # Each tool's gain on one stream, as XLA launches a step as it is, and then the second stream's.
    one_stream = functools.partial(step.estimate, nvlink_stream=False)
    free, laid_s = one_stream(step.plain), one_stream(laid_out(taken).known.program).step_s
    before = step.earlier[0][1] if step.earlier else step
    as_it_is = typed = one_stream(before.plain)
    if step.typed and step.inferred:
        as_it_is = one_stream(step.typed.plain)
    one_s = one_stream(taken.known.program).step_s
    why_one, two_streams = step.one_stream, False
    if why_one == "":
        two_streams = gains(taken.seconds, one_s, STREAM_GAIN)
        why_one = f"a second one gains {1 - taken.seconds / one_s:.1%} (estimated)"
    saved_s = {}
    if step.inferred:
        saved_s["types"] = as_it_is.step_s - typed.step_s
    every = (*(one for _, one in step.earlier), step)
    took = (one_stream(one.plain).step_s for one in every)
    for (tool, _), (slow_s, fast_s) in zip(step.earlier, itertools.pairwise(took), strict=True):
        saved_s[tool] = slow_s - fast_s
    early_s, late_s = map(_by_transforms, (laid_out(taken).line, taken.line))
    late_s -= early_s
    if layouts and layouts.changes:
        saved_s["layouts"] = free.step_s - laid_s - early_s
    if early_s or late_s:
        saved_s["transforms"] = early_s + late_s
    if taken is not laid_out(taken):
        rings = any(isinstance(e, Decision) and e.num_chunks > 1 for e in entries)
        tool = "halves" if taken.has(SplitBatch) else "rings" if rings else "gathers"
        saved_s[tool] = laid_s - one_s - late_s
    if two_streams:
        saved_s["streams"] = one_s - taken.seconds
    price = Price(
        plain_s=as_it_is.step_s,
        plain_exposed_s=as_it_is.exposed_s,
        step_s=as_it_is.step_s - sum(saved_s.values()),
        saved_s=saved_s,
    )
    if two_streams:
        estimate = f"{milliseconds(one_s)} -> {milliseconds(taken.seconds)} (estimated)"
        return price, True, [f"Collectives over NVLink have a stream of their own: {estimate}."]
    return price, False, [f"All collectives share one stream: {why_one}."] if why_one else []
