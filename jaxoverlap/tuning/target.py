"""Lower, estimate and time the candidates of a step to tune."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxoverlap._jax import jits
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.plan.edits import MakeRing
from jaxoverlap.plan.plan import MadeFor, Plan, Variant
from jaxoverlap.search.evaluate import estimated
from jaxoverlap.search.found import found
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options
from jaxoverlap.step.pipeline import run_passes
from jaxoverlap.step.program import StepProgram, as_it_is, lowered_as, request_of, step_program
from jaxoverlap.step.trial import Request
from jaxoverlap.tuning.lagom.granularity import Site, site_of


@dataclass(frozen=True)
class Ready:
    """A candidate that is lowered for a child.

    Attributes:
        request: the request for the child.
        plan: its plan; None for the step as it is.
    """

    request: Request
    plan: Plan | None


Source = Plan | Options | None
Lower = Callable[[Source], Ready]
Look = Callable[[Plan | Options], float | None]


@dataclass(frozen=True)
class TuningTarget:
    """A step to tune.

    Attributes:
        lower: rewrites and lowers it for a child.
        look: estimates it from its partitioned program, in seconds; needs a cost model.
        every: returns all rings that it could have by some options, and the plan with them; needs a
            cost model.
        compiled: rewrites and compiles it here, to be timed; None is the step as it is.
        args, kwargs: the arguments that it is called with.
        base: the options that overlap() takes by default.
        origin: what its plan is made for.
        cost: the cost model of its cluster, where there is one.
        memory_bytes: bytes of memory of one of its devices; unused without a cost model.
    """

    lower: Lower
    look: Look
    every: Callable[[Options], tuple[tuple[Site, ...], Plan]]
    compiled: Callable[[Source], tuple[Callable[..., Any], Plan | None]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    base: Options
    origin: MadeFor
    cost: CostModel | None
    memory_bytes: int


def target_of(call: jits.Call, start: StepContext, options: Options) -> TuningTarget:
    """Make the tuning target from a step's call and its context.

    Args:
        call: the step's call.
        start: the facts of the step.
        options: the options that overlap() takes by default.
    """

    def lowered(source: Source) -> tuple[jax.stages.Lowered, StepProgram]:
        new = as_it_is(call, start.mesh)
        if source is not None:
            by = replace(options, plan=source) if isinstance(source, Plan) else source
            new = step_program(call, by, found)
        return lowered_as(call, new), new

    def lower(source: Source) -> Ready:
        stage, new = lowered(source)
        assert start.cost is not None
        return Ready(request_of(stage, new, start.mesh, start.cost), new.plan)

    def look(source: Plan | Options) -> float | None:
        if isinstance(source, Plan):
            return estimated(start, source.edits)
        return run_passes(call, source, found, start).step_s

    def compiled(source: Source) -> tuple[jax.stages.Compiled, Plan | None]:
        stage, new = lowered(source)
        with new.ordering.compiling() if new.ordering else contextlib.nullcontext():
            return stage.compile(), new.plan

    options = replace(options, on_error="raise")
    return TuningTarget(
        lower=lower,
        look=look,
        every=lambda options: every_ring(call, options),
        compiled=compiled,
        args=call.args,
        kwargs=call.kwargs,
        base=options,
        origin=start.origin,
        cost=start.cost,
        memory_bytes=start.cluster.chip.memory_bytes if start.cluster else 0,
    )


def every_ring(call: jits.Call, options: Options) -> tuple[tuple[Site, ...], Plan]:
    """Return all rings that a step could have, and the plan with them; there is a cost model.

    Raises:
        As `run_passes`.
    """
    done = run_passes(call, replace(options, granularity=Variant(), rings=True), found)
    assert done.step.cost is not None
    groups = groups_of(done.step.mesh, options.cluster)
    prices = RingCosts(done.step.cost, groups)
    rings = done.edited.facts.get(MakeRing)
    sites = [
        site_of(ring, source_of(ring.members[0].dot), groups[ring.first.ring.axis])
        for ring in (rings.of_implied_collectives if rings else ())
        if prices.knows(ring)
    ]
    return tuple(sorted(sites, key=lambda site: site.number)), done.plan
