"""A candidate of the search, and the answer about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.plan.edits import LAYOUTS, Edit


@dataclass(frozen=True)
class Evaluation:
    """The answer about a candidate.

    Attributes:
        step_s: seconds of the step; None where the cluster has no prices.
        peak_bytes: bytes that a device needs at most.
        refusal: why it cannot be taken; empty if it can.
    """

    step_s: float | None = None
    peak_bytes: int = 0
    refusal: str = ""

    @property
    def seconds(self) -> float:
        """Its seconds; infinity where they are not known, or it cannot be taken."""
        return math.inf if self.step_s is None or self.refusal else self.step_s


@dataclass(frozen=True, eq=False)
class Candidate:
    """A step after edits, as one row of the search's trail.

    Attributes:
        stage: the name of the stage that proposed it; "plain" for the step as it is.
        edits: its edits, but for the last one, `ShareViews`.
        evaluation: the answer about it.
        proposal: what was proposed; the edits of it are among `edits`.
        parent: the candidate that it was proposed for; None for the step as it is.
        evaluated: the step after the edits; None where it was not partitioned.
    """

    stage: str
    edits: tuple[Edit, ...]
    evaluation: Evaluation
    proposal: Proposal = field(default_factory=Proposal)
    parent: Candidate | None = None
    evaluated: Evaluated | None = None

    @property
    def seconds(self) -> float:
        """Its seconds; infinity where they are not known, or it cannot be taken."""
        return self.evaluation.seconds

    @property
    def known(self) -> Evaluated:
        """The step after the edits, for one that was partitioned."""
        assert self.evaluated is not None
        return self.evaluated

    @property
    def line(self) -> list[Candidate]:
        """The candidates that it came from, the step as it is first, and itself."""
        return [*(self.parent.line if self.parent else ()), self]

    @property
    def only_lays_out(self) -> bool:
        """Whether its batch is not split, and it has no rings or the like."""
        return all(isinstance(edit, LAYOUTS) for edit in self.edits)

    def has(self, *kinds: type) -> bool:
        """Return whether some edits are of these kinds."""
        return any(isinstance(edit, kinds) for edit in self.edits)
