"""Decide on, estimate and lower the candidates of a step to tune."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxoverlap._jax import jits
from jaxoverlap._util.text import first_line
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.plan.edits import MakeRing
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.plan import Plan, Variant
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.evaluate import estimated
from jaxoverlap.search.found import found
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options
from jaxoverlap.step.pipeline import run_passes
from jaxoverlap.step.program import as_it_is, lowered_as, request_of, step_program
from jaxoverlap.step.trial import Request, refused
from jaxoverlap.tuning.candidates import RULES
from jaxoverlap.tuning.lagom.granularity import Site, site_of


@dataclass(frozen=True)
class TuningTarget:
    """A step to tune.

    Attributes:
        call: the step's call.
        start: the facts of the step.
        base: the options that overlap() takes by default.
    """

    call: jits.Call
    start: StepContext
    base: Options

    @property
    def cost(self) -> CostModel | None:
        """The cost model of its cluster, where there is one."""
        return self.start.cost

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one of its devices; 0 where its cluster is not known."""
        return self.start.cluster.chip.memory_bytes if self.start.cluster else 0

    def decide(self, name: str, options: Options) -> Candidate:
        """Decide by options; the error of the rules is raised, any other is the answer.

        Raises:
            UserError, RewriteError: as `step_program`, for the rules.
        """
        try:
            plan = step_program(self.call, replace(options, on_error="raise"), found).plan
        except (RewriteError, UserError) as error:
            if name == RULES:
                raise
            what = error.what if isinstance(error, RewriteError) else first_line(error)
            return Candidate(name, (), refused(f"{type(error).__name__}: {what}"))
        assert plan is not None
        return Candidate.planned(
            name, plan, evaluation=Evaluation(step_s=plan.price and plan.price.step_s)
        )

    def estimate(self, plan: Plan) -> float | None:
        """Estimate the step by a plan from its partitioned program, in seconds.

        Raises:
            UserError, RewriteError: as `apply`, and if XLA does not partition the step.
        """
        return estimated(self.start, plan.edits)

    def lower(self, candidate: Candidate) -> tuple[Request, Plan | None]:
        """Lower a candidate for a child; there is a cost model.

        Raises:
            UserError, RewriteError: if its plan cannot be followed.
        """
        assert self.cost is not None
        new = as_it_is(self.call, self.start.mesh)
        if candidate.plan is not None:
            options = replace(self.base, plan=candidate.plan, on_error="raise")
            new = step_program(self.call, options, found)
        stage = lowered_as(self.call, new)
        return request_of(stage, new, self.start.mesh, self.cost), new.plan


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
