"""Tables, units and warnings for the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path, PurePath

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns of a table, where nothing else is set
_SOURCE_LINE = re.compile(r"\S+:\d+")
_width = ContextVar("table width", default=WIDTH)


@contextlib.contextmanager
def tables_of_width(columns: int) -> Iterator[None]:
    """Make tables at most so many columns wide."""
    token = _width.set(columns)
    try:
        yield
    finally:
        _width.reset(token)


def table_width() -> int:
    """Return the columns that a table may have."""
    return _width.get()


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """A table as plain text; the columns named in `right` are right-aligned.

    Numbers, and the lines that a column "source" names, are never broken.

    Args:
        width: columns at most; None: as `tables_of_width` set it, else `WIDTH`.
    """
    grid = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    rows = list(rows)
    for number, column in enumerate(columns):
        lines = (line for row in rows for line in _SOURCE_LINE.findall(row[number]))
        grid.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column in right,
            min_width=max(map(len, lines), default=None) if column == "source" else None,
        )
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or table_width(),
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as links are sold: 29.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def short_source(file: str, line: int) -> str:
    """A source line as tables show it: folder/file.py:line."""
    return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of an error's message, truncated to `most` characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:most]


def warn(message: str) -> None:
    """Warn at the user's line, however deep in this package, JAX, flax or equinox it shows."""
    found = (find_spec(name) for name in ("jax", "flax", "equinox"))
    libraries = [one.origin for one in found if one is not None and one.origin]
    folders = [Path(__file__).parents[1], *(Path(file).parent for file in libraries)]
    warnings.warn(message, skip_file_prefixes=tuple(f"{folder}{os.sep}" for folder in folders))
