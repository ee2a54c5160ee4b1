"""Record the candidates of a search: what was proposed, its estimate, and why it was not taken."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxoverlap._util.text import table
from jaxoverlap.plan.speedup import milliseconds


class Proposed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate of a search.

    Attributes:
        stage: the pass that proposed it, or the stage of the search.
        edits: the kinds of edits that were proposed, each with their number.
        step_s: estimated seconds of the step with them; None if it was not estimated.
        why_not: why they were not taken; empty if they were.
    """

    stage: str
    edits: str
    step_s: float | None = None
    why_not: str = ""


def trail_table(trail: Sequence[Proposed]) -> list[str]:
    """Write the table of a search's candidates, in the order in which they were made."""
    rows = []
    for one in trail:
        estimated = milliseconds(one.step_s) if one.step_s is not None else ""
        rows.append((one.stage, one.edits, estimated, one.why_not or "taken"))
    columns = ("proposed by", "edits", "estimated", "outcome")
    return [table("candidates", columns, rows, right=("estimated",))] if rows else []
