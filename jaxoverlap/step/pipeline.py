"""Run a step's passes: apply the edits of a plan, or search for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from jax.sharding import Sharding

from jaxoverlap._jax import explicit, jits
from jaxoverlap.passes.analysis.mesh import is_cpu
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting.pin_results import pinned_results
from jaxoverlap.plan.edits import DropTypes, Edit, PinResults, in_order
from jaxoverlap.plan.plan import Plan, Reason, Skip, Variant
from jaxoverlap.plan.speedup import CandidateName
from jaxoverlap.step.check_plan import followed
from jaxoverlap.step.context import StepContext, prepare
from jaxoverlap.step.options import Options


@dataclass(frozen=True)
class PassResult:
    """A step after the passes: its plan, the edited step and its estimate.

    Attributes:
        plan: what was done.
        step: the facts of the step.
        edited: the step after the plan's edits.
        step_s: seconds of the step, estimated before it is compiled; None where not known.
        close: the plan and the step of other candidates that may be as fast, by name.
    """

    plan: Plan
    step: StepContext
    edited: EditedStep
    step_s: float | None = None
    close: Mapping[CandidateName, tuple[Plan, EditedStep]] = field(default_factory=dict)

    @property
    def jaxpr(self) -> Any:
        """The rewritten step."""
        return self.step.call.params["jaxpr"] if self.plan.plain else self.edited.result


Search = Callable[[StepContext, Options], PassResult]
"""Searches for the edits of a step; `search/found.py` has it."""


def run_passes(
    call: jits.Call, options: Options, search: Search, step: StepContext | None = None
) -> PassResult:
    """Rewrite a step for arguments like these: follow a plan, or search for its edits.

    Args:
        call: the step's call with such arguments.
        options: the user's options.
        search: searches for the edits, if the options have no plan.
        step: its facts, where `prepare` has gathered them for options that differ in no fact.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster; if a plan was made for
            something else, or its edits do not fit.
        RewriteError: if a pass fails.
        DisagreementError: as `prepare`.
    """
    step = step or prepare(call, options)
    if options.plan is None:
        if is_unpriced(step, options):
            return _without_rings(search(step, replace(options, granularity=Variant("plain"))))
        return search(step, options)
    edited = apply(step.edited, _with_results(step, options.plan.edits))
    plan = followed(options.plan, edited, step.params["name"], step.origin)
    return PassResult(plan, step, edited)


def is_unpriced(step: StepContext, options: Options) -> bool:
    """Return whether a step gets no rings, as they may cost time on GPUs without prices.

    On CPUs, where nobody trains and every rewrite is tested, rings are made by rule.
    """
    asks = options.by_rule or options.granularity is not None or options.plan is not None
    return step.cost is None and not asks and not is_cpu(step.mesh)


def _without_rings(done: PassResult) -> PassResult:
    """Return a result whose matmuls are not ringed as no prices are known, and not by request."""
    why = Reason("not ringed", "there is no cost table of these GPUs")
    entries = (
        msgspec.structs.replace(entry, why=why)
        if isinstance(entry, Skip) and entry.left_plain
        else entry
        for entry in done.plan.entries
    )
    return replace(done, plan=msgspec.structs.replace(done.plan, entries=tuple(entries)))


def _with_results(step: StepContext, edits: Sequence[Edit]) -> Sequence[Edit]:
    """Add pins of the step's results to edits without, as those of a user may be.

    Only then is XLA asked where the results of the plain step lie.
    """
    said = (isinstance(s, Sharding) for s in step.params["out_shardings"])
    if not edits or any(isinstance(edit, PinResults) for edit in edits) or all(said):
        return edits
    mesh = explicit.automatic_mesh(step.mesh) if isinstance(edits[0], DropTypes) else step.mesh
    return in_order([*edits, *pinned_results(step.params, step.plain.results, mesh)])
