"""Write rows as a table of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> str:
    """A table; the columns of numbers are set to the right."""
    rule = ["---:" if column in numbers else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))
