"""List the passes, each with the kinds of edits that it applies; a new pass is a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.halves import halve, split_exchange
from jaxoverlap.passes.keep import keep, offload, recompute
from jaxoverlap.passes.layouts import columns, matrices, moved_first, pins, sorts, tied, values
from jaxoverlap.passes.rewriting import (
    boundaries,
    carried_sums,
    drop_types,
    embedding_gradients,
    late_sums,
    one_view,
    per_shard,
    pin_results,
    prefetch,
    rewrite,
)
from jaxoverlap.plan.edits import (
    DropTypes,
    GatherAhead,
    GatherTable,
    InterleaveColumns,
    Keep,
    MakeRing,
    MoveFirst,
    Offload,
    Pin,
    PinArgument,
    PinResults,
    PinValue,
    ReadGathered,
    Recompute,
    ScatterLookup,
    ShareViews,
    SortPerShard,
    SplitBatch,
    SplitExchange,
    StackMatrices,
    SumCarried,
    SumLate,
    TransformPerShard,
    UpdateAtBoundary,
)
from jaxoverlap.plan.limits import GAIN, LATE_SUMS_GAIN


@dataclass(frozen=True)
class RegisteredPass:
    """A change of a step's jaxpr.

    Attributes:
        name: what it does, in the words of a plan.
        edits: the kinds of edits that it applies.
        run: applies edits of these kinds, in the order given, and returns the step after them. It
            raises a UserError (`edited.misfit`) for an edit that does not fit the step.
        propose: proposes such edits; None where another pass, or a stage of the search
            (`search/stages.py`), does so.
        gain: the share of a step's estimated seconds that a proposal has to save.
    """

    name: str
    edits: tuple[type, ...]
    run: Callable[[EditedStep, Any], EditedStep]
    propose: Callable[[Evaluated], Iterator[Proposal]] | None = None
    gain: float = GAIN


PASSES = (
    RegisteredPass("types dropped", (DropTypes,), drop_types.run),
    RegisteredPass("layers recomputed", (Recompute,), recompute.run),
    RegisteredPass("values kept", (Keep,), keep.run),
    RegisteredPass("values offloaded", (Offload,), offload.run),
    RegisteredPass("sorts per shard", (SortPerShard,), sorts.run),
    RegisteredPass("matrices stacked", (StackMatrices,), matrices.run),
    RegisteredPass("values pinned", (PinArgument, PinValue), values.run),
    RegisteredPass("tied tables", (GatherTable,), tied.run, tied.propose),
    RegisteredPass("pins", (Pin,), pins.run),
    RegisteredPass("results pinned", (PinResults,), pin_results.run),
    RegisteredPass("columns interleaved", (InterleaveColumns,), columns.run),
    RegisteredPass("dims first", (MoveFirst,), moved_first.run, moved_first.propose),
    RegisteredPass("updates at boundaries", (UpdateAtBoundary,), boundaries.run),
    RegisteredPass("carried sums", (SumCarried,), carried_sums.run, carried_sums.propose),
    RegisteredPass("batch split", (SplitBatch,), halve.run),
    RegisteredPass("lookups scattered", (ScatterLookup,), embedding_gradients.run),
    RegisteredPass("rings", (MakeRing, ReadGathered), rewrite.run),
    RegisteredPass("gathers ahead", (GatherAhead,), prefetch.run),
    RegisteredPass("transforms per shard", (TransformPerShard,), per_shard.run, per_shard.propose),
    RegisteredPass("late sums", (SumLate,), late_sums.run, late_sums.propose, LATE_SUMS_GAIN),
    RegisteredPass(
        "exchanges in chunks", (SplitExchange,), split_exchange.run, split_exchange.propose
    ),
    RegisteredPass("views shared", (ShareViews,), one_view.run),
)
PASS_OF = {kind: one for one in PASSES for kind in one.edits}
