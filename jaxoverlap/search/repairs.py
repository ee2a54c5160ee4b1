"""Choose repairs that number other matmuls: sorts per shard, unsharded matrices of an optimizer.

They come before layouts, whose edits name matmuls by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts import matrices, sorts
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.plan.edits import SortPerShard, StackMatrices
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.evaluate import changed
from jaxoverlap.search.search import gains
from jaxoverlap.step.context import StepContext

Propose = Callable[[EditedStep], Iterator[tuple[Any, ...]]]
_PROPOSERS: dict[str, Propose] = {"sorts": sorts.proposals, "matrices": matrices.proposals}


def repaired(step: StepContext) -> StepContext:
    """Return a step with the repairs that make it faster by the estimate.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    if step.cost is not None:
        for name, proposals in _PROPOSERS.items():
            step = _with(step, name, proposals)
    return step


def _with(step: StepContext, name: str, proposals: Propose) -> StepContext:
    """Return a step with the fastest edits that are proposed, if they make it faster."""

    def made() -> tuple[EditedStep, tuple[str, ...], dict[Hashable, Any]]:
        edited, notes = _fastest(step, proposals)
        return edited, notes, {}

    edited, notes, answers = step.once(("repaired", name), made)
    if edited is step.edited:
        return step
    return replace(
        step,
        edited=edited,
        earlier=(*step.earlier, (name, step)),
        answers=answers,
        notes=(*step.notes, *notes),
    )


def _fastest(step: StepContext, proposals: Propose) -> tuple[EditedStep, tuple[str, ...]]:
    """Return the fastest of the step as it is and with edits, and what to say of it."""
    assert step.cost is not None
    best, best_s, before_s = step.edited, math.inf, 0.0
    for edits in proposals(step.edited):
        before_s = step.estimate(step.plain).step_s
        edited = apply(step.edited, edits)
        try:
            program = step.partitioned(edited.jaxpr, ask=False)
        except RewriteError:
            continue
        fits = estimated_peak_bytes(program.module) <= step.cost.cluster.chip.memory_bytes
        step_s = step.estimate(program).step_s
        if fits and not changed(step.plain, program) and gains(step_s, best_s, 0):
            best, best_s = edited, step_s
        program.forget()
    if not gains(best_s, before_s, GAIN):
        return step.edited, ()
    edits = best.edits[len(step.edited.edits) :]
    why = dict.fromkeys(
        edit.why for edit in edits if isinstance(edit, SortPerShard | StackMatrices)
    )
    seconds = f"{milliseconds(before_s)} -> {milliseconds(best_s)} (estimated)"
    return best, tuple(f"{one[0].upper()}{one[1:]}: {seconds}." for one in why)
