"""Choose what a step keeps of its forward pass, before all else: other passes see the step so.

It is no stage of the search, as edits number matmuls, and a step that keeps more has fewer. XLA
partitions the step once to price what is computed again, and once for each of a few selections.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.keep.propose import Remats, Selection
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.plan.edits import Keep
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.evaluate import changed
from jaxoverlap.search.search import gains
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options, memory_text


@dataclass(frozen=True)
class _Row:
    """A selection that was estimated."""

    selection: Selection
    step_s: float
    peak_bytes: int
    why_not: str


def kept(step: StepContext, options: Options) -> StepContext:
    """Return a step that keeps what is fastest within the memory, or what the user names.

    Raises:
        UserError: if a name names nothing, or the cluster of `memory=` has no prices.
        RewriteError: if XLA does not partition the step.
    """
    if not options.keeps:
        return step
    asked = options.memory, options.keep, options.recompute, options.room

    def made() -> tuple[EditedStep, tuple[str, ...], dict[Hashable, Any]]:
        edits, notes = _found(step, options)
        return (apply(step.edited, edits) if edits else step.edited), notes, {}

    edited, notes, answers = step.once(("kept", *asked), made)
    if edited is step.edited:
        return replace(step, kept_notes=notes)
    return replace(step, edited=edited, unkept=step, answers=answers, kept_notes=notes)


def most_bytes(options: Options, cost: CostModel) -> float:
    """Return the bytes that a step may need: what `memory=` says, or all that the device has."""
    whole = cost.cluster.chip.memory_bytes
    if options.memory is None:
        return whole
    return options.memory * whole if options.memory <= 1 else options.memory


def _found(step: StepContext, options: Options) -> tuple[tuple[Keep, ...], tuple[str, ...]]:
    """Choose the values to keep, and note why."""
    remats = Remats.of(step.jaxpr, options.keep, options.recompute)
    if options.memory is None:
        return remats.forced, tuple(f"Kept by keep=: {edit}." for edit in remats.forced)
    if (cost := step.cost) is None:
        raise UserError(
            f"memory={memory_text(options.memory)}: there is no cost model of the step's devices, "
            "by which to choose what is kept. Name GPUs that have one in overlap(cluster=), or "
            "name the values in overlap(keep=)"
        )
    budget, before_s = most_bytes(options, cost), step.estimate(step.plain).step_s
    peak = estimated_peak_bytes(step.plain.module)
    room = budget - peak if options.room is None else options.room
    rows = list[_Row]()
    if remats.values and (room > 0 or remats.always):
        prices = remats.prices(step.partitioned, step.estimate, cost)
        rows = [_estimated(step, one, budget) for one in remats.selections(prices, max(room, 0.0))]
    fit = [row for row in rows if not row.why_not]
    best = min(fit, key=lambda row: row.step_s, default=None)
    if best is None or not (remats.always or gains(best.step_s, before_s, GAIN)):
        why = next((row.why_not for row in rows if row.why_not), "no value saves enough time")
        if room <= 0:
            why = f"as it is it needs about {human_bytes(peak)} of {human_bytes(budget)}"
        if not remats.values:
            why = "it computes nothing again"
        if remats.always:
            return remats.forced, (f"Kept by keep=, and nothing else: {why}.",)
        return (), (f"memory={memory_text(options.memory)} keeps nothing more: {why}.",)
    note = (
        f"memory={memory_text(options.memory)} keeps {human_bytes(best.selection.bytes)} more: "
        f"{milliseconds(before_s)} -> {milliseconds(best.step_s)} (estimated), about "
        f"{human_bytes(best.peak_bytes)} of {human_bytes(budget)}."
    )
    return best.selection.edits, (note, *(f"  {edit}." for edit in best.selection.edits))


def _estimated(step: StepContext, selection: Selection, budget: float) -> _Row:
    """Partition and estimate the step with a selection."""
    try:
        program = step.partitioned(apply(step.edited, selection.edits).jaxpr, ask=False)
    except RewriteError as error:
        return _Row(selection, 0.0, 0, str(error))
    peak = estimated_peak_bytes(program.module)
    why_not = changed(step.plain, program)
    if not why_not and peak > budget:
        why_not = f"it would need about {human_bytes(peak)} of {human_bytes(budget)}"
    step_s = step.estimate(program).step_s
    program.forget()
    return _Row(selection, step_s, peak, why_not)


def with_less(options: Options, edits: Sequence[Any], excess: float) -> Options | None:
    """Return options by which a step keeps less; None if it keeps nothing that it need not.

    Args:
        options: those by which it was chosen what is kept.
        edits: the step's edits.
        excess: the bytes that the compiled step needs beyond what it may.
    """
    own = sum(edit.bytes_kept for edit in edits if isinstance(edit, Keep))
    if options.memory is None or not own or options.room == 0:
        return None
    return replace(options, room=max(0, int(own - 1.05 * excess)))
