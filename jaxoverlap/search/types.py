"""Choose whether the types of a step on an explicit mesh go, or become constraints."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from jaxoverlap._jax import explicit
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting.pin_results import pinned_results
from jaxoverlap.plan.edits import DropTypes
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.search.evaluate import changed
from jaxoverlap.search.search import gains
from jaxoverlap.step.context import StepContext


def untyped(step: StepContext) -> StepContext:
    """Return a step on an explicit mesh as one on an automatic one; any other as it is.

    The types that JAX inferred become constraints, or are left to XLA's partitioner if the step is
    then faster by its estimate. A step that is called under a transformation stays as it is: its
    derivatives have types too. So does one on a mesh of both kinds of axes if its results would be
    sharded differently, or its estimate is worse.
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
        if changed(before, after):
            return False
        return (
            gains(after_s, before_s, least_gain) if least_gain else not gains(before_s, after_s, 0)
        )

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
