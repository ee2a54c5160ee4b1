"""A candidate of the search: edits, the step after them, and its estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.plan.decisions import Decision, ScatteredSum, Skip
from jaxoverlap.plan.edits import (
    DropTypes,
    MakeRing,
    PinResults,
    ReadGathered,
    ScatterLookup,
    SplitExchange,
    SumLate,
)
from jaxoverlap.plan.halves import Halves
from jaxoverlap.plan.layouts import Layouts
from jaxoverlap.step.context import StepContext


@dataclass(frozen=True)
class StepCandidate:
    """A step after edits, which is compared with others by its estimate.

    Attributes:
        edited: the step; its results are pinned to the shardings of the original step.
        program: its partitioned program; None where it was not partitioned.
        step_s: estimated seconds of that; None where they are not known, or it cannot be taken.
        why_not: why it cannot be taken; empty if it can.
        entries: the decision on each matmul; none before rings are decided on.
        sums: the sums of activations that stay scattered.
        layouts: the results that are pinned; None if no layout was searched for.
        halves: the batch split; None if none was considered.
    """

    edited: EditedStep
    program: SpmdProgram | None = None
    step_s: float | None = None
    why_not: str = ""
    entries: tuple[Decision | Skip, ...] = ()
    sums: tuple[ScatteredSum, ...] = ()
    layouts: Layouts | None = None
    halves: Halves | None = None

    @property
    def jaxpr(self) -> Any:
        """The step's jaxpr."""
        return self.edited.jaxpr

    @property
    def spmd(self) -> SpmdProgram:
        """Its partitioned program, where it has one."""
        assert self.program is not None
        return self.program

    @property
    def seconds(self) -> float:
        """Its estimated seconds; infinity where they are not known."""
        return math.inf if self.step_s is None else self.step_s

    @property
    def differs(self) -> bool:
        """Whether it differs from the original step in more than pins of the step's results."""
        return any(not isinstance(e, DropTypes | PinResults) for e in self.edited.edits)

    @property
    def rewrites(self) -> bool:
        """Whether edits change anything but the sharding of values."""
        return self.edited.has(MakeRing, ReadGathered, ScatterLookup, SumLate, SplitExchange)

    @property
    def is_split(self) -> bool:
        """Whether its batch is split."""
        return self.halves is not None and not self.halves.why_not

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The matmuls that become rings, or read what was gathered before."""
        return tuple(e for e in self.entries if isinstance(e, Decision))


def evaluate(step: StepContext, candidate: StepCandidate) -> StepCandidate:
    """Partition and estimate a candidate.

    Raises:
        RewriteError: if XLA does not partition it.
    """
    spmd = step.partitioned_after(candidate.edited)
    why_not = changed(step.plain, spmd)
    step_s = None if why_not else step.seconds(spmd)
    return replace(candidate, program=spmd, why_not=why_not, step_s=step_s)


def evaluated(step: StepContext, candidate: StepCandidate) -> StepCandidate:
    """Partition and estimate a candidate; candidates of one step with equal edits once.

    Their programs stay in memory, for searches with other options.

    Raises:
        RewriteError: as `evaluate`.
    """
    known = step.once(("evaluated", candidate.edited.edits), lambda: evaluate(step, candidate))
    return replace(candidate, program=known.program, why_not=known.why_not, step_s=known.step_s)


def changed(plain: SpmdProgram, after: SpmdProgram) -> str:
    """Say how sharding or donation differ from the plain step's; empty if they do not."""
    pairs = zip(plain.results, after.results, strict=True)
    moved = [str(position) for position, (one, other) in enumerate(pairs) if one != other]
    if moved:
        return f"XLA would give result {', '.join(moved[:3])} another sharding"
    lost = {argument for _, argument in plain.donated - after.donated}
    return f"XLA would not donate argument {', '.join(sorted(lost)[:3])}" if lost else ""
