"""Choose what a step keeps of its forward pass, before all else: other passes see the step so.

It is no stage of the search, as edits number matmuls, and a step that keeps more has fewer. XLA
partitions the step once to price what is computed again, and once for each of a few selections.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as replaced

from jaxoverlap._util.text import human_bytes
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.keep.offload import offloads, saved
from jaxoverlap.passes.keep.propose import Remats, Selection
from jaxoverlap.passes.keep.recompute import recomputations
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.plan.edits import Edit, Keep, Offload, Recompute
from jaxoverlap.plan.limits import GAIN
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.evaluate import changed
from jaxoverlap.search.search import gains
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.options import Options, memory_text

_LAYERS = (1, 2, 4)  # that are recomputed as one
_SELECTIONS = 5  # that are partitioned, less where several ways to recompute were
_LEAST = 0.02  # the share of the bytes that are missing that recomputing has to free
_OFFERED = 0.9  # the share of the device's memory that explain() asks about
_MORE = 1.05  # times the bytes that a compiled step needs too many: others may change as well


@dataclass(frozen=True)
class _Row:
    """A selection that was estimated.

    Attributes:
        selection: the values.
        edits: those that keep them, and that offload some of them.
        step_s, peak_bytes: as estimated.
        why_not: why it cannot be; empty if it can.
    """

    selection: Selection
    edits: tuple[Edit, ...]
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
        return replace(step, notes=notes)
    earlier = (*step.earlier, ("memory", step))
    return replace(step, edited=edited, earlier=earlier, answers=answers, notes=notes)


def offer(step: StepContext) -> str:
    """Say what `memory=0.9` would save of a step as it is written; "" where it saves little.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    if step.cost is None or not (remats := Remats.of(step.jaxpr)).values:
        return ""
    budget = _OFFERED * step.cost.cluster.chip.memory_bytes
    before_s = step.estimate(step.plain).step_s
    if (room := budget - estimated_peak_bytes(step.plain.module)) <= 0:
        return ""
    best, _ = _selected(step, remats, budget, room, _SELECTIONS)
    if best is None or not gains(best.step_s, before_s, GAIN):
        return ""
    return (
        f"With memory={_OFFERED} the step as written takes {milliseconds(best.step_s)} in place of "
        f"{milliseconds(before_s)} (estimated), and about {human_bytes(best.peak_bytes)} a device."
    )


def most_bytes(options: Options, cluster: Cluster) -> float:
    """Return the bytes that a step may need: what `memory=` says, or all that the device has."""
    whole = cluster.chip.memory_bytes
    if options.memory is None:
        return whole
    return options.memory * whole if options.memory <= 1 else options.memory


def _found(step: StepContext, options: Options) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """Choose layers to recompute, where the step does not fit, and values to keep; say why."""
    if options.memory is None:
        forced = Remats.of(step.jaxpr, options.keep, options.recompute).forced
        return forced, tuple(f"Kept by keep=: {edit}." for edit in forced)
    if (cost := step.cost) is None:
        raise UserError(
            f"memory={memory_text(options.memory)}: there is no cost model of the step's devices, "
            "by which to choose what is kept. Name GPUs that have one in overlap(cluster=), or "
            "name the values in overlap(keep=)"
        )
    budget, peak = most_bytes(options, cost.cluster), estimated_peak_bytes(step.plain.module)
    room = budget - peak if options.room is None else options.room
    if room >= 0:
        return _chosen(step, options, budget, room, _SELECTIONS)
    smaller, freed, asked = _recomputing(step, -room, anyway=options.room is not None)
    last_resort = freed + room < 0 and not cost.on_cpus and not options.keep
    if last_resort and (found := _offloading(smaller, options)) is not None:
        return found
    if smaller is step:
        return _chosen(step, options, budget, 0.0, _SELECTIONS)
    as_written, again = (one.estimate(one.plain).step_s for one in (step, smaller))
    less = f"{human_bytes(freed)} less, " if freed else ""
    note = (
        f"memory={memory_text(options.memory)} recomputes layers, as the step needs about "
        f"{human_bytes(peak)} of {human_bytes(budget)} as written: {less}"
        f"{milliseconds(as_written)} -> {milliseconds(again)} (estimated)."
    )
    own = smaller.edited.edits[len(step.edited.edits) :]
    edits, notes = _chosen(smaller, options, budget, freed + room, _SELECTIONS + 1 - asked)
    return (*own, *edits), (note, *(f"  {edit}." for edit in own), *notes)


def _recomputing(
    step: StepContext, missing: float, *, anyway: bool
) -> tuple[StepContext, int, int]:
    """Recompute the layers of a step.

    Layers that are no steps of scans are recomputed in groups of one, two or four: the smallest
    that frees as many bytes as are missing, or else the one that frees most.

    Args:
        step: the step.
        missing: the bytes.
        anyway: whether layers are recomputed although that frees nothing by the estimate, as the
            step is known not to fit once it is compiled.

    Returns:
        The step; the bytes that this frees, by the estimate; how many programs were partitioned.
    """
    best, freed = step, 0
    peak, asked = estimated_peak_bytes(step.plain.module), list[Any]()
    for count in _LAYERS:
        edits = recomputations(step.jaxpr, count)
        if not edits or edits in asked:
            continue
        asked.append(edits)
        smaller = replace(step, edited=apply(step.edited, edits), answers={})
        less = peak - estimated_peak_bytes(smaller.plain.module)
        if less > max(freed, _LEAST * missing):
            sized = _shared(less, "bytes_freed", edits)
            best, freed = replace(smaller, edited=apply(step.edited, sized)), less
        if less >= missing:
            break
    if anyway and best is step and asked:
        best = replace(step, edited=apply(step.edited, _shared(0, "bytes_freed", asked[0])))
    return best, freed, len(asked)


def _offloading(
    step: StepContext, options: Options
) -> tuple[tuple[Edit, ...], tuple[str, ...]] | None:
    """Offload all that a step that does not fit saves; None where that frees nothing.

    Nothing else is kept then, as what is kept is chosen before.
    """
    assert options.memory is not None
    if not (edits := saved(step.jaxpr)):
        return None
    try:
        less = estimated_peak_bytes(step.plain.module) - estimated_peak_bytes(
            step.partitioned(apply(step.edited, edits).jaxpr, ask=False).module
        )
    except RewriteError:
        return None
    if less <= 0:
        return None
    sized = _shared(less, "bytes_offloaded", edits)
    note = (
        f"memory={memory_text(options.memory)} offloads what the backward pass reads, as the step "
        f"needs more memory however much is recomputed: {human_bytes(less)} less."
    )
    own = (*(e for e in step.edited.edits if isinstance(e, Recompute)), *sized)
    return own, (note, *(f"  {edit}." for edit in own))


def _shared(total: int, field: str, edits: Sequence[Any]) -> list[Any]:
    """Return edits that share a device's bytes by their own unsharded ones, in this field."""
    sizes = [getattr(edit, field) for edit in edits]
    shares = (int(total * size / sum(sizes)) for size in sizes)
    return [replaced(edit, **{field: share}) for edit, share in zip(edits, shares, strict=True)]


def _chosen(
    step: StepContext, options: Options, budget: float, room: float, most: int
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """Choose the values to keep in some bytes more than the step keeps, and note why."""
    assert step.cost is not None and options.memory is not None
    before_s = step.estimate(step.plain).step_s
    remats = Remats.of(step.jaxpr, options.keep, options.recompute)
    best, why = None, "it computes nothing again"
    if remats.values and (room > 0 or remats.always):
        best, why = _selected(step, remats, budget, max(room, 0.0), most)
    if best is None or not (remats.always or gains(best.step_s, before_s, GAIN)):
        if remats.values and room <= 0:
            peak = estimated_peak_bytes(step.plain.module)
            why = f"as it is it needs about {human_bytes(peak)} of {human_bytes(budget)}"
        if remats.always:
            return remats.forced, (f"Kept by keep=, and nothing else: {why}.",)
        return (), (f"memory={memory_text(options.memory)} keeps nothing more: {why}.",)
    moved = sum(best.selection.offloaded.values())
    offloads = f" and offloads {human_bytes(moved)} to the host" if moved else ""
    note = (
        f"memory={memory_text(options.memory)} keeps {human_bytes(best.selection.bytes)} more"
        f"{offloads}: {milliseconds(before_s)} -> {milliseconds(best.step_s)} (estimated), about "
        f"{human_bytes(best.peak_bytes)} of {human_bytes(budget)}."
    )
    return best.edits, (note, *(f"  {edit}." for edit in best.edits))


def _selected(
    step: StepContext, remats: Remats, budget: float, room: float, most: int
) -> tuple[_Row | None, str]:
    """Return the fastest of at most so many selections of values, and why others are none."""
    assert step.cost is not None
    prices = remats.prices(step.partitioned, step.estimate, step.cost)
    on_gpus = not step.cost.on_cpus
    some = itertools.islice(remats.selections(prices, room, offload=on_gpus), most)
    rows = [_estimated(step, one, budget) for one in some]
    why = next((row.why_not for row in rows if row.why_not), "no value saves enough time")
    best: _Row | None = None
    for row in rows:
        if not row.why_not and (best is None or gains(row.step_s, best.step_s, 0)):
            best = row
    return best, why


def _estimated(step: StepContext, selection: Selection, budget: float) -> _Row:
    """Partition and estimate the step with a selection."""
    try:
        edited = _applied(step.edited, selection)
        program = step.partitioned(edited.jaxpr, ask=False)
    except RewriteError as error:
        return _Row(selection, (), 0.0, 0, str(error))
    peak = estimated_peak_bytes(program.module)
    why_not = changed(step.plain, program)
    if not why_not and peak > budget:
        why_not = f"it would need about {human_bytes(peak)} of {human_bytes(budget)}"
    step_s = step.estimate(program).step_s
    program.forget()
    own = edited.edits[len(step.edited.edits) :]
    return _Row(selection, own, step_s, peak, why_not)


def _applied(step: EditedStep, selection: Selection) -> EditedStep:
    """Return a step with a selection.

    Raises:
        RewriteError: if a value cannot be offloaded.
    """
    step = apply(step, selection.edits)
    if not selection.offloaded:
        return step
    moved = [selection.edits[n] for n in selection.offloaded]
    edits = offloads(step, moved)
    if len(edits) < len(moved):
        raise RewriteError("a value that was to be offloaded cannot be in the host's memory")
    sized = list[Offload]()
    for edit, one, size in zip(edits, moved, selection.offloaded.values(), strict=True):
        there = size * len(edit.places) // len(one.places)
        sized.append(replaced(edit, bytes_offloaded=there))
    return apply(step, sized)


def room_left(edits: Sequence[Any], excess: float) -> int:
    """Return the bytes that a step may keep more than its program does, below 0 to free some.

    Args:
        edits: the step's edits.
        excess: the bytes that the compiled step needs beyond what it may.
    """
    own = sum(edit.bytes_kept for edit in edits if isinstance(edit, Keep))
    own -= sum(edit.bytes_freed for edit in edits if isinstance(edit, Recompute))
    return int(own - _MORE * excess)
