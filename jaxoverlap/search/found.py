"""Search for the plan of a step: choose its edits by the estimate, note what was done."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import msgspec

from jaxoverlap.cost.groups import groups_of
from jaxoverlap.hardware.topology import axis_costs
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
from jaxoverlap.plan.edits import DropTypes, PinResults, ShareViews
from jaxoverlap.plan.limits import STREAM_GAIN
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.speedup import CandidateName
from jaxoverlap.plan.streams import Streams
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.evaluate import Evaluator
from jaxoverlap.search.records import entries_of, halves_of, laid_out, layouts_of, proposed
from jaxoverlap.search.search import Trail, gains, search, split_of
from jaxoverlap.search.stages import stages_of
from jaxoverlap.search.types import untyped
from jaxoverlap.step.check_plan import evidence_of
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
        return _undecided(step, _terms(step, options), why)
    step = untyped(step)
    terms = _terms(step, options)
    evaluate = Evaluator(step, terms)
    trail = search(evaluate.start(), stages_of(step, options, terms), evaluate)
    goes_on = {row for one in trail.left for row in one.line}
    for row in trail.rows:  # answers stay in memory, for searches with other options
        if row not in goes_on and row.evaluated is not None:
            row.evaluated.program.forget()
    done = _result(step, options, trail, trail.taken)
    if not options.never_slower:  # then nothing is compared once it is compiled
        return done
    close = {name: _result(step, options, trail, one) for name, one in _close(trail).items()}
    return replace(done, close={name: (one.plan, one.edited) for name, one in close.items()})


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
    entries, sums = entries_of(trail, taken)
    if any(entry.why == NO_COLLECTIVE for entry in entries):
        converted = behind_conversions(laid_out(taken).known.program.module)
        entries = with_conversions(entries, dots(step.jaxpr), converted)
    parts = 2 if options.halves == "auto" else options.halves
    if options.halves == "auto" and not (step.cost and options.chooses):
        parts = None
    searched = options.layouts and options.pins is None and step.cost and not step.explicit
    plan = _plan(
        step,
        edited,
        entries=entries,
        sums=sums,
        layouts=layouts_of(step, trail, taken) if searched else None,
        halves=halves_of(step, trail, taken, parts) if parts is not None else None,
        trail=proposed(trail, taken),
    )
    if taken.evaluation.step_s is not None:
        plan = _with_price(step, taken, plan)
    return PassResult(plan, step, edited, taken.evaluation.step_s)


def _edited(step: StepContext, taken: Candidate) -> EditedStep:
    """Return the step after the edits of a candidate; as it is, if they change nothing."""
    if all(isinstance(edit, DropTypes | PinResults) for edit in taken.edits):
        # nothing is changed, so types stay
        return step.typed.edited if step.typed is not None and not step.inferred else step.edited
    return apply(taken.known.step, [ShareViews()])


def _plan(step: StepContext, edited: EditedStep, **what: Any) -> Plan:
    """Make the plan of a step from its edits, and from what was found out about them."""
    operations = (at for at in equations(step.jaxpr) if partitions_itself(at[0]))
    return Plan(
        step=step.params["name"],
        mesh=dict(step.mesh.shape),
        edits=edited.edits,
        **evidence_of(edited),
        partitioning=tuple(dict.fromkeys(described(*at) for at in operations)),
        made_for=step.origin,
        **what,
    )


def _undecided(step: StepContext, terms: Terms, why: str) -> PassResult:
    """Return the plan of a step whose shardings cannot be read: only its own `shard_map`s say."""
    entries, rings_by_body = decide(bodies(step.jaxpr), {}, terms)
    edits = [edit for body_rings in rings_by_body.values() for edit in edits_of(body_rings)]
    edited = apply(step.edited, [*edits, ShareViews()]) if edits else step.edited
    return PassResult(_plan(step, edited, entries=entries), step, edited)


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


def _with_price(step: StepContext, taken: Candidate, plan: Plan) -> Plan:
    """Add the estimated gain of each tool to a plan.

    Args:
        step: the step.
        taken: the candidate that it is of; there are prices.
        plan: the plan.
    """
    # Each tool's gain on one stream, as XLA launches a step as it is, and then the second stream's.
    one_stream = functools.partial(step.estimate, nvlink_stream=False)
    free, laid_s = one_stream(step.plain), one_stream(laid_out(taken).known.program).step_s
    as_it_is = free
    if step.typed and step.inferred:
        as_it_is = one_stream(step.typed.plain)
    one_s = one_stream(taken.known.program).step_s
    streams = _streams(step, one_s, taken.seconds)
    saved_s = {}
    if step.inferred:
        saved_s["types"] = as_it_is.step_s - free.step_s
    if plan.layouts and plan.layouts.changes:
        saved_s["layouts"] = free.step_s - laid_s
    if taken is not laid_out(taken):
        rings = any(d.num_chunks > 1 for d in plan.decisions)
        saved_s["halves" if plan.cut else "rings" if rings else "gathers"] = laid_s - one_s
    if streams and streams.are_two:
        saved_s["streams"] = one_s - taken.seconds
    price = Price(
        plain_s=as_it_is.step_s,
        plain_exposed_s=as_it_is.exposed_s,
        step_s=as_it_is.step_s - sum(saved_s.values()),
        saved_s=saved_s,
    )
    return msgspec.structs.replace(plan, price=price, streams=streams)


def _streams(step: StepContext, one_s: float, two_s: float) -> Streams | None:
    """Say whether NVLink's collectives get a stream of their own.

    Args:
        step: the step.
        one_s: estimated seconds with one stream for all collectives.
        two_s: the same with a second one, if there can be one.
    """
    if step.streams is None or not step.streams.are_two:
        return step.streams
    why_not = ""
    if not gains(two_s, one_s, STREAM_GAIN):
        why_not = f"a second one gains {1 - two_s / one_s:.1%} (estimated)"
    return Streams(one_s=one_s, two_s=two_s, why_not=why_not)
