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
from jaxoverlap.plan.plan import MadeFor, Plan, Variant
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


Lower = Callable[[Options | None], Ready]
Look = Callable[[Options], float | None]


@dataclass(frozen=True)
class TuningTarget:
    """A step to tune.

    Attributes:
        lower: rewrites and lowers it for a child.
        look: estimates it from its partitioned program, in seconds; needs a cost model.
        sites: lists all rings that it could have by some options; needs a cost model.
        compiled: rewrites and compiles it here, to be timed; None is the step as it is.
        args, kwargs: the arguments that it is called with.
        base: the options that overlap() takes by default.
        origin: what its plan is made for.
        cost: the cost model of its cluster, where there is one.
        memory_bytes: bytes of memory of one of its devices; unused without a cost model.
    """

    lower: Lower
    look: Look
    sites: Callable[[Options], tuple[Site, ...]]
    compiled: Callable[[Options | None], tuple[Callable[..., Any], Plan | None]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    base: Options
    origin: MadeFor
    cost: CostModel | None
    memory_bytes: int


def target_of(call: jits.Call, start: StepContext, options: Options) -> TuningTarget:
    """Make the subject of a tuning from a step with arguments like these.

    Args:
        call: the step's call.
        start: the facts of the step.
        options: the options that overlap() takes by default.
    """

    def lowered(options: Options | None) -> tuple[jax.stages.Lowered, StepProgram]:
        new = as_it_is(call, start.mesh)
        if options is not None:
            new = step_program(call, options)
        return lowered_as(call, new), new

    def lower(options: Options | None) -> Ready:
        stage, new = lowered(options)
        assert start.cost is not None
        return Ready(request_of(stage, new, start.mesh, start.cost), new.plan)

    def look(options: Options) -> float | None:
        return run_passes(call, options, start).step_s

    def compiled(options: Options | None) -> tuple[jax.stages.Compiled, Plan | None]:
        stage, new = lowered(options)
        with new.ordering.compiling() if new.ordering else contextlib.nullcontext():
            return stage.compile(), new.plan

    return TuningTarget(
        lower=lower,
        look=look,
        sites=lambda options: sites_of(call, options),
        compiled=compiled,
        args=call.args,
        kwargs=call.kwargs,
        base=replace(options, on_error="raise"),
        origin=start.origin,
        cost=start.cost,
        memory_bytes=start.cluster.chip.memory_bytes if start.cluster else 0,
    )


def sites_of(call: jits.Call, options: Options) -> tuple[Site, ...]:
    """List all rings that a step could have, for a model of them; the cluster has a cost model.

    Raises:
        As `run_passes`.
    """
    every = replace(options, granularity=Variant(), choices={}, plan=None, rings=True)
    done = run_passes(call, every)
    assert done.cost is not None
    groups = groups_of(done.mesh, options.cluster)
    prices = RingCosts(done.cost, groups)
    sites = [
        site_of(ring, source_of(ring.members[0].dot), groups[ring.first.ring.axis])
        for ring in done.rings
        if prices.knows(ring)
    ]
    return tuple(sorted(sites, key=lambda site: site.number))
