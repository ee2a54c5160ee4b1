"""A candidate of the search: a step after edits, and the settings that it is compiled with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.plan.decisions import Variant
from jaxoverlap.plan.edits import LAYOUTS, Edit, TransformPerShard
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Candidate:
    """A step after edits, as one row of the search's trail.

    Attributes:
        stage: the name of the stage that proposed it, or its own, where it has one; "plain" for the
            step as it is.
        edits: its edits; but for the last one, `ShareViews`, where they are estimated.
        evaluation: the answer about it.
        proposal: what was proposed; the edits of it are among `edits`.
        parent: the candidate that it was proposed for; None for the step as it is.
        evaluated: the step after the edits; None where it was not partitioned.
        plan: the edits with their settings, to compile it; None if it is only estimated.
        changes: the rings that have another variant than in the parent's plan, by their matmul.
        text: returns the scheduled module, once it is compiled.
    """

    stage: str
    edits: tuple[Edit, ...]
    evaluation: Evaluation = field(default_factory=Evaluation)
    proposal: Proposal = field(default_factory=Proposal)
    parent: Candidate | None = None
    evaluated: Evaluated | None = None
    plan: Plan | None = None
    changes: Mapping[int, Variant] = field(default_factory=dict)
    text: Callable[[], str] | None = None

    @classmethod
    def planned(cls, name: str, plan: Plan, **more: Any) -> Candidate:
        """Return a candidate to compile: the edits and settings of a plan, under a name."""
        return cls(name, plan.edits, plan=plan, **more)

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
        return only_lay_out(self.edits)

    def proposes(self, kind: type) -> bool:
        """Return whether it was proposed for edits of a kind."""
        return any(isinstance(edit, kind) for edit in self.proposal.edits)

    def has(self, *kinds: type) -> bool:
        """Return whether some edits are of these kinds."""
        return any(isinstance(edit, kinds) for edit in self.edits)


def only_lay_out(edits: Iterable[Edit]) -> bool:
    """Return whether edits split no batch, and make no rings or the like."""
    return all(isinstance(edit, (*LAYOUTS, TransformPerShard)) for edit in edits)
