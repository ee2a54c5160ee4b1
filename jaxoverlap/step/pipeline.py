"""Run a step's pipeline: find its mesh and cluster, choose a candidate, note what was done."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from jax.sharding import Sharding

from jaxoverlap._jax import explicit, jits
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.hardware.topology import axis_costs
from jaxoverlap.passes.analysis.jaxprs import dots, equations
from jaxoverlap.passes.analysis.matmul_collectives import behind_conversions
from jaxoverlap.passes.analysis.mesh import unread
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.planning.entries import NO_COLLECTIVE, with_conversions
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.terms import Requests, Terms
from jaxoverlap.passes.rewriting.pin_results import pinned_results
from jaxoverlap.plan.edits import DropTypes, Edit, PinResults, in_order
from jaxoverlap.plan.limits import GAIN, STREAM_GAIN
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.price import Price
from jaxoverlap.plan.streams import Streams
from jaxoverlap.step.candidate import StepCandidate, changed, evaluate
from jaxoverlap.step.candidates import overlapped
from jaxoverlap.step.check_plan import evidence_of, followed
from jaxoverlap.step.context import StepContext, prepare
from jaxoverlap.step.layouts import described
from jaxoverlap.step.options import Options


@dataclass(frozen=True)
class PassResult:
    """A step after the passes: its plan, the edited step and its estimate.

    Attributes:
        plan: what was done.
        step: the facts of the step.
        edited: the step after the plan's edits.
        step_s: seconds of the step, estimated before it is compiled; None where not known.
    """

    plan: Plan
    step: StepContext
    edited: EditedStep
    step_s: float | None = None

    @property
    def jaxpr(self) -> Any:
        """The rewritten step."""
        return self.step.call.params["jaxpr"] if self.plan.plain else self.edited.result


def run_passes(call: jits.Call, options: Options, step: StepContext | None = None) -> PassResult:
    """Rewrite a step for arguments like these: follow a plan, or search for its edits.

    Args:
        call: the step's call with such arguments.
        options: the user's options.
        step: its facts, where `prepare` has gathered them for options that differ in no fact.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster; if a plan was made for
            something else, or its edits do not fit.
        RewriteError: if a pass fails.
        DisagreementError: as `prepare`.
    """
    step = step or prepare(call, options)
    if options.plan:
        edited = apply(step.edited, _with_results(step, options.plan.edits))
        plan = followed(options.plan, edited, step.params["name"], step.origin)
        return PassResult(plan, step, edited)
    if not unread(step.mesh):
        step = _untyped(step)
    done, laid_out = overlapped(step, _terms(step, options), options)
    edited = done.edited
    if step.typed is not None and edited is step.edited and not step.inferred:
        edited = step.typed.edited  # nothing is changed, so types stay
    operations = (at for at in equations(step.jaxpr) if partitions_itself(at[0]))
    entries = done.entries
    if laid_out is not None and any(e.why == NO_COLLECTIVE for e in entries):
        converted = behind_conversions(laid_out.module)
        entries = with_conversions(entries, dots(step.jaxpr), converted)
    plan = Plan(
        step=step.params["name"],
        mesh=dict(step.mesh.shape),
        edits=edited.edits,
        entries=entries,
        **evidence_of(edited),
        sums=done.sums,
        layouts=done.layouts,
        halves=done.halves,
        partitioning=tuple(dict.fromkeys(described(*at) for at in operations)),
        made_for=step.origin,
    )
    if done.step_s is not None and laid_out is not None:
        plan = _with_price(step, done, laid_out, plan)
    return PassResult(plan, step, edited, done.step_s)


def _with_results(step: StepContext, edits: Sequence[Edit]) -> Sequence[Edit]:
    """Add pins of the step's results to edits without, as those of a user may be.

    Only then is XLA asked where the results of the plain step lie.
    """
    said = (isinstance(s, Sharding) for s in step.params["out_shardings"])
    if not edits or any(isinstance(edit, PinResults) for edit in edits) or all(said):
        return edits
    mesh = explicit.automatic_mesh(step.mesh) if isinstance(edits[0], DropTypes) else step.mesh
    return in_order([*edits, *pinned_results(step.params, step.plain.results, mesh)])


def estimated(step: StepContext, edits: Iterable[Edit]) -> float | None:
    """Estimate a step after edits, in seconds; None if its results would be sharded differently.

    Raises:
        UserError, RewriteError: as `apply`, and if XLA does not partition the step.
    """
    return evaluate(step, StepCandidate(apply(step.edited, edits))).step_s


def _untyped(step: StepContext) -> StepContext:
    """Return a step on an explicit mesh as one on an automatic one; any other as it is.

    The types that JAX inferred become constraints, or are left to XLA's partitioner if the step is
    then faster by its estimate. A step that is called under a transformation
    stays as it is: its derivatives have types too. So does one on a mesh of both kinds of axes if
    its results would be sharded differently, or its estimate is worse.
    """
    if not step.explicit or not step.outermost:
        return step
    if step.once("types stay", lambda: explicit.why_not_automatic(step.jaxpr)):
        return step
    mixed = explicit.is_mixed(step.mesh)

    def without_types(*, inferred: bool) -> StepContext:
        def made() -> tuple[EditedStep, dict[Hashable, Any]]:
            edited = apply(step.edited, [DropTypes(inferred=inferred)])
            if mixed:  # types do not say all of how results lie
                pins = pinned_results(step.params, step.plain.results, edited.mesh)
                edited = apply(edited, pins)
            return edited, {}

        edited, answers = step.once(("without types", inferred), made)
        return replace(step, edited=edited, typed=step, answers=answers)

    def is_as_good(*, inferred: bool, least_gain: float) -> bool:
        before, after = step.plain, without_types(inferred=inferred).plain
        before_s, after_s = (
            step.estimate(program, nvlink_stream=False).step_s for program in (before, after)
        )
        return not changed(before, after) and after_s <= (1 - least_gain) * before_s

    def can_go() -> bool:
        if step.cost is None:
            return not changed(step.plain, without_types(inferred=False).plain)
        return is_as_good(inferred=False, least_gain=0.0)

    def free_is_better() -> bool:
        return is_as_good(inferred=True, least_gain=GAIN)

    if mixed and not step.once("types can go", can_go):
        return step
    inferred = step.cost is not None and step.once("inferred types are free", free_is_better)
    return without_types(inferred=inferred)


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


def _with_price(
    step: StepContext, candidate: StepCandidate, laid_out: SpmdProgram, plan: Plan
) -> Plan:
    """Add the estimated gain of each tool to a plan.

    Args:
        step: the step.
        candidate: what the search has chosen; its estimate is known.
        laid_out: the partitioned program of the step with its layouts alone.
        plan: the plan.
    """
    assert candidate.step_s is not None
    # Each tool's gain on one stream, as XLA launches a step as it is, and then the second stream's.
    one_stream = functools.partial(step.estimate, nvlink_stream=False)
    untyped, laid_s = one_stream(step.plain), one_stream(laid_out).step_s
    as_it_is = untyped
    if step.typed and step.inferred:
        as_it_is = one_stream(step.typed.plain)
    one_s = one_stream(candidate.spmd).step_s
    streams = _streams(step, one_s, candidate.step_s)
    saved_s = {}
    if step.inferred:
        saved_s["types"] = as_it_is.step_s - untyped.step_s
    if plan.layouts and plan.layouts.changes:
        saved_s["layouts"] = untyped.step_s - laid_s
    if plan.cut or candidate.rewrites:
        rings = any(d.num_chunks > 1 for d in plan.decisions)
        saved_s["halves" if plan.cut else "rings" if rings else "gathers"] = laid_s - one_s
    if streams and streams.are_two:
        saved_s["streams"] = one_s - candidate.step_s
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
    gain = 1 - two_s / one_s
    why_not = "" if gain >= STREAM_GAIN else f"a second one gains {gain:.1%} (estimated)"
    return Streams(one_s=one_s, two_s=two_s, why_not=why_not)
