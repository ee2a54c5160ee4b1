"""Choose whether devices get unsharded matrices, before layouts number the matmuls."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts import matrices
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.evaluate import changed
from jaxoverlap.search.search import gains
from jaxoverlap.step.context import StepContext


def with_stacked_matrices(step: StepContext) -> StepContext:
    """Return a step whose optimizer's matrices are stacked, if that is faster by the estimate.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    if step.cost is None:
        return step

    def made() -> tuple[EditedStep, tuple[str, ...], dict[Hashable, Any]]:
        edited, notes = _fastest(step)
        return edited, notes, {}

    edited, notes, answers = step.once("stacked matrices", made)
    if edited is step.edited:
        return step
    earlier = (*step.earlier, ("matrices", step))
    return replace(
        step, edited=edited, earlier=earlier, answers=answers, notes=(*step.notes, *notes)
    )


def _fastest(step: StepContext) -> tuple[EditedStep, tuple[str, ...]]:
    """Return the fastest of the step as it is and with stacked matrices, and what to say of it."""
    assert step.cost is not None
    best, best_s, before_s = step.edited, math.inf, 0.0
    for edits in matrices.proposals(step.edited):
        before_s = step.estimate(step.plain).step_s
        edited = apply(step.edited, edits)
        try:
            program = step.partitioned(edited.jaxpr, ask=False)
        except RewriteError:
            continue
        fits = estimated_peak_bytes(program.module) <= step.cost.cluster.chip.memory_bytes
        step_s = step.estimate(program).step_s
        if fits and not changed(step.plain, program) and step_s < best_s:
            best, best_s = edited, step_s
        program.forget()
    if not gains(best_s, before_s, GAIN):
        return step.edited, ()
    edits = best.edits[len(step.edited.edits) :]
    why = dict.fromkeys(edit.why for edit in edits if isinstance(edit, matrices.StackMatrices))
    seconds = f"{milliseconds(before_s)} -> {milliseconds(best_s)} (estimated)"
    return best, tuple(f"{one[0].upper()}{one[1:]}: {seconds}." for one in why)
