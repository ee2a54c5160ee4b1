"""Record the candidates of a search: what was proposed, the answer, and why it was not taken."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jaxoverlap._util.text import table
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.speedup import milliseconds


class Proposed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate of a search, or of a tuning.

    Attributes:
        stage: the pass that proposed it, or the stage of the search; of a compiled candidate its
            name: "plain" is the step as it is, "rules" what `overlap` does by default.
        edits: the kinds of edits that were proposed, each with their number; empty for a compiled
            one.
        evaluation: the answer about the step with them.
        why_not: why it was not taken; empty if it was.
    """

    stage: str
    edits: str = ""
    evaluation: Evaluation = Evaluation()
    why_not: str = ""

    @property
    def taken(self) -> bool:
        """Whether it was taken."""
        return not self.why_not


def trail_table(trail: Iterable[Proposed]) -> list[str]:
    """Write the table of the candidates that were estimated, in the order in which they were."""
    rows = []
    for one in trail:
        step_s = one.evaluation.step_s
        estimated = milliseconds(step_s) if step_s is not None else ""
        rows.append((one.stage, one.edits, estimated, one.why_not or "taken"))
    columns = ("proposed by", "edits", "estimated", "outcome")
    return [table("candidates", columns, rows, right=("estimated",))] if rows else []
