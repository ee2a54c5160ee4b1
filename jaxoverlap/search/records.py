"""Record in a plan what the search's trail says: layouts, the batch split, each matmul's entry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.jaxprs import Dot, dots
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.evaluated import Proposal
from jaxoverlap.passes.halves.least_matmul import least_matmul
from jaxoverlap.passes.halves.propose import examples
from jaxoverlap.passes.layouts.layout import sharded_names, weights_of
from jaxoverlap.passes.layouts.pins import Pins
from jaxoverlap.passes.layouts.propose import aborting_convolutions, pins_of
from jaxoverlap.passes.planning.entries import described, source_of, type_of
from jaxoverlap.plan.decisions import Decision, Reason, Skip, without_rings
from jaxoverlap.plan.edits import (
    Edit,
    GatherTable,
    InterleaveColumns,
    MakeRing,
    MoveFirst,
    Pin,
    PinArgument,
    PinValue,
    SplitBatch,
    SumCarried,
    UpdateAtBoundary,
)
from jaxoverlap.plan.limits import MUCH_MEMORY
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.plan.trail import Proposed
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.layouts import KeptEdit, Layouts, PinnedResult
from jaxoverlap.search.search import Trail, falls_short, outcome, quickest, split_of
from jaxoverlap.search.stages import LAYOUT_STAGES, SPLIT
from jaxoverlap.simulation import hlo
from jaxoverlap.step.context import StepContext

_AFTER_PINS = (GatherTable, MoveFirst, UpdateAtBoundary, SumCarried)
_PER_SEQUENCE = (  # no rule can find this out
    "  If the shard_map computes each sequence alone, jaxoverlap.per_sequence(fn) says so, and "
    "it is split too."
)


def laid_out(taken: Candidate) -> Candidate:
    """Return a candidate without its batch split and rings."""
    return next(one for one in reversed(taken.line) if one.only_lays_out)


# -- layouts --------------------------------------------------------------------------------------


def layouts_of(step: StepContext, trail: Trail, taken: Candidate) -> Layouts:
    """Record the results that are pinned, and what else of the layout is changed."""
    best, plain = laid_out(taken), trail.rows[0]
    jaxpr, pins = step.jaxpr, pins_of(best.known.step)
    names = DimNames(jaxpr)
    by_edits = {frozenset(row.edits): row.seconds for row in trail.rows}
    only_pins = next(one for one in reversed(best.line) if not one.has(*_AFTER_PINS))

    def gain_s(site: int) -> float | None:
        fewer = (e for e in only_pins.edits if not (isinstance(e, Pin) and e.site == site))
        without_s = by_edits.get(frozenset(fewer), math.inf)
        return without_s - only_pins.seconds if without_s < math.inf else None

    layout = best.known.notes.get(Pin, {}) if pins else {}
    values = [*map(_pinned_value, best.known.step.edits)]
    return Layouts(
        pins=(*filter(None, values), *_pinned(jaxpr, pins, gain_s)),
        lost=tuple(_lost(best)),
        kept=tuple(_kept(best)),
        plain_s=plain.seconds,
        step_s=best.seconds,
        plain_peak_bytes=plain.evaluation.peak_bytes,
        peak_bytes=best.evaluation.peak_bytes,
        memory_bytes=step.cost.cluster.chip.memory_bytes if step.cost else 0,
        questions=sum(1 for _ in trail.of(*LAYOUT_STAGES)),
        axes={axis: examples(jaxpr, names, order) for axis, order in layout.items()},
        replicated_bytes=_replicated_bytes(step),
        batch_axes={axis: step.mesh.shape[axis] for axis in _batch_axes(step, names)},
        unnamed=tuple(dict.fromkeys(map(described, names.unnamed))),
        aborting=tuple(
            dict.fromkeys(described(*at) for at in aborting_convolutions(step.edited.unpinned))
        ),
    )


def _replicated_bytes(step: StepContext) -> int:
    """Return the bytes of weights that are sharded over no axis; 0 if a device hardly has them."""
    edited = step.edited.unpinned
    weights = weights_of(edited.jaxpr)
    pairs = zip(edited.jaxpr.invars, edited.arguments, strict=True)
    alone = (v for v, spec in pairs if v in weights and spec is not None and not any(spec))
    size = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in alone)
    there = step.cost.cluster.chip.memory_bytes if step.cost else math.inf
    return size if size > MUCH_MEMORY * there else 0


def _batch_axes(step: StepContext, names: DimNames) -> list[str]:
    edited = step.edited.unpinned
    _, batch = sharded_names(edited.jaxpr, edited.arguments, names)
    return [axis for axis, size in step.mesh.shape.items() if size > 1 and axis in batch]


def _lost(best: Candidate) -> Iterator[str]:
    """Yield what the user wrote that a layout repairs, in words."""
    edits = best.known.step.edits
    if any(isinstance(edit, PinArgument | PinValue) for edit in edits):
        yield from best.known.notes[PinValue].reasons
    yield from dict.fromkeys(
        edit.why
        for edit in edits
        if isinstance(edit, InterleaveColumns | UpdateAtBoundary | SumCarried)
    )


def _pinned(jaxpr: Any, pins: Pins, gain_s: Any) -> list[PinnedResult]:
    first = dict[str, Dot]()
    for dot in dots(jaxpr):  # the first matmul of each line is the forward pass's
        first.setdefault(source_of(dot), dot)
    return [
        PinnedResult(
            site=dot.index,
            source=source_of(dot),
            type=_type(dot),
            part=_part(dot, first[source_of(dot)], pins),
            spec=pins[dot.index],
            gain_s=gain_s(dot.index),
        )
        for dot in dots(jaxpr)
        if dot.index in pins
    ]


def _pinned_value(edit: Edit) -> PinnedResult | None:
    """Describe a pin of an argument, or of a value that is no matmul's result."""
    if not isinstance(edit, PinArgument | PinValue):
        return None
    is_value = isinstance(edit, PinValue)
    return PinnedResult(
        site=None,
        source=edit.source if is_value else edit.name,
        type=edit.value,
        part="value" if is_value else "argument",
        spec=edit.spec,
    )


def _kept(best: Candidate) -> list[KeptEdit]:
    """Return the further edits of a layout, each with its share of what its pass saves."""
    kept = []
    for one in best.line[1:]:
        edits = [e for e in one.proposal.edits if isinstance(e, (InterleaveColumns, *_AFTER_PINS))]
        if edits and one.parent:
            gain_s = (one.parent.seconds - one.seconds) / len(edits)
            kept += [KeptEdit(edit=str(edit), gain_s=gain_s) for edit in edits]
    return kept


def _type(dot: Dot) -> str:
    return type_of(dot.eqn.outvars[0])


def _part(dot: Dot, forward: Dot, pins: Pins) -> Literal["result", "operand"]:
    """Return 'result' if a pin is sharded as its line's forward result, else 'operand'."""
    other = pins.get(forward.index, pins[dot.index]) != pins[dot.index]
    return "operand" if other or _type(dot) != _type(forward) else "result"


# -- the batch split ------------------------------------------------------------------------------


def split_notes(trail: Trail, taken: Candidate, parts: int) -> list[str]:
    """Say whether the batch is split, and what the step takes with and without.

    Args:
        trail: the trail of a search that has considered it.
        taken: the candidate that the notes are of.
        parts: the number of parts.
    """
    split_rows = [row for row in trail.rows if row.has(SplitBatch)]
    split = taken if taken.has(SplitBatch) else quickest(split_rows, anyway=True)
    if split is None:
        tried = [row for row in trail.of(SPLIT) if row.parent in taken.line] or [*trail.of(SPLIT)]
        why_not = tried[0].evaluation.refusal if tried else "no search was made"
        return [f"The batch is not split in {parts} parts: {why_not}."]
    whole, estimate = quickest(row for row in trail.rows if not row.has(SplitBatch)), ""
    if whole is not None and (step_s := split.evaluation.step_s) is not None:
        unsplit, in_parts = milliseconds(whole.seconds), milliseconds(step_s)
        estimate = f": {unsplit} unsplit, {in_parts} split (estimated)"
    halved = split.known.step.facts[SplitBatch]
    mixing = [*dict.fromkeys(map(described, halved.mixing))]
    hint = [_PER_SEQUENCE] if any(text.startswith("shard_map") for text in mixing) else []
    if split is not taken:
        assert whole is not None
        why_not = falls_short(split, whole)
        return [f"The batch is not split in {parts} parts: {why_not}{estimate}.", *hint]
    loops = f", scans unrolled {halved.unroll} times" if halved.unroll > 1 else ""
    rows = split.known.notes[SplitBatch]
    joined = [f"  Parts are joined for {', '.join(mixing)}."] if mixing else []
    return [f"The batch is split in {parts} parts: {rows}{loops}{estimate}.", *joined, *hint]


def kept_apart(step: StepContext, taken: Candidate) -> dict[str, int | None]:
    """Return what XLA must not join of the parts of a batch, as `options_for` takes it."""
    first = next((row for row in taken.line if row.has(SplitBatch)), None)
    if first is None:
        return {}
    assert first.parent is not None
    whole, parts = first.parent.known, split_of(taken)[0]
    least = least_matmul(
        *(whole.step.jaxpr, first.known.step.numbered.jaxpr, first.known.shardings),
        *(parts, step.mesh.shape),
    )
    least_sum = min(_sums(first.known.program) - _sums(whole.program), default=None)
    return {"least_sum": least_sum, "least_matmul": least}


def _sums(program: SpmdProgram) -> set[int]:
    """Return the sizes in bytes of the all-reduces of a partitioned step."""
    return {
        hlo.shape_bytes(i.shape)
        for body in program.module.computations.values()
        for i in body
        if i.opcode == "all-reduce"
    }


# -- each matmul ----------------------------------------------------------------------------------


def entries_of(trail: Trail, taken: Candidate) -> tuple[Decision | Skip, ...]:
    """Return the entry of each matmul."""
    decided = [row for row in taken.line if MakeRing in row.proposal.notes]
    if decided:
        return decided[-1].proposal.notes[MakeRing].entries
    line = {*taken.line}
    tried = [row for row in trail.rows if MakeRing in row.proposal.notes and row.parent in line]
    entries = tried[0].proposal.notes[MakeRing].entries
    return without_rings(entries, Reason("not ringed", _why_none(tried)))


def _why_none(tried: Sequence[Candidate]) -> str:
    """Say why no ring of those that were tried is made."""
    before = tried[0].parent
    assert before is not None
    if before.evaluation.step_s is None:
        return tried[0].evaluation.refusal
    without = f"estimated step time {before.seconds * 1e3:.4g} ms without rings"
    rings = quickest(row for row in tried if row.has(MakeRing))
    if rings is None:
        return without
    return f"{without}, {rings.seconds * 1e3:.4g} with: {falls_short(rings, before)}"


# -- the trail ------------------------------------------------------------------------------------


def proposed(trail: Trail, taken: Candidate) -> tuple[Proposed, ...]:
    """Record the candidates of a search, and why all but those that were taken were not."""
    line = {*taken.line}
    return tuple(
        Proposed(
            stage=row.stage,
            edits=_counted(row.proposal),
            evaluation=row.evaluation,
            why_not="" if row in line else outcome(row, taken),
        )
        for row in trail.rows[1:]
    )


def _counted(proposal: Proposal) -> str:
    counts = Counter(type(edit).__name__ for edit in proposal.edits)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
