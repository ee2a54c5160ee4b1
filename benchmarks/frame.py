"""Rows of JSON lines, resumed runs, checked names, tables and verdicts, for all benchmarks."""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxoverlap._util.files import write_atomically

Row = dict[str, Any]
Out = Annotated[Path, typer.Option(help="Add rows to this file.")]
MaybeOut = Annotated[Path | None, typer.Option(help="Add rows to this file.")]
Written = Annotated[Path, typer.Option("--out", help="Where rows go, as JSON lines.")]
Only = Annotated[list[str] | None, typer.Option(help="Only these steps, by name.")]
OnlyRows = Annotated[list[str] | None, typer.Option(help="Only these rows.")]
AtOnce = Annotated[int, typer.Option(min=1, help="Compiles at a time.")]
Shown = Annotated[
    Path | None, typer.Option("--table", help="Print the rows of a file, and make none.")
]


def app(**options: Any) -> typer.Typer:
    """Make a command, or a group of them."""
    return typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, **options)


# -- rows -----------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """Read rows from JSON lines; there are none in a file that is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_in(path: Path) -> dict[tuple[str, str], Row]:
    """Read a file's rows by step and row; those that are not measured again stay."""
    return {(row["step"], row["row"]): row for row in read_rows(path)}


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically, in the place of what the file has."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))


def add_rows(out: Path | None, *rows: Mapping[str, Any]) -> None:
    """Add rows to a file; nothing where none is given."""
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


Job = tuple[Row, Callable[[], Row]]  # what names a row, and what makes the rest of it


def add_missing(out: Path, jobs: Iterable[Job], *, timed: bool = False) -> None:
    """Make the rows that a file lacks, and add each when it is made.

    Args:
        out: the file.
        jobs: the rows; one whose labels some row has is there already.
        timed: whether a row has the seconds that it took to make.
    """
    known = read_rows(out)
    missing = [
        (labels, make)
        for labels, make in jobs
        if not any(labels.items() <= {k: row.get(k) for k in labels}.items() for row in known)
    ]
    for labels, make in track(missing, "rows"):
        began = time.perf_counter()
        row = {**labels, **make()}
        if timed:
            row["seconds"] = time.perf_counter() - began
        add_rows(out, row)


def shown_or_out(shown: Path | None, out: Path | None, show: Callable[[Path], object]) -> Path:
    """Print the rows of a file and end, where one is given to be shown; else return `out`.

    Raises:
        typer.BadParameter: if neither is given.
    """
    if shown is not None:
        show(shown)
        raise typer.Exit
    if out is None:
        raise typer.BadParameter("give --out, a file for the rows")
    return out


def provenance() -> dict[str, str]:
    """Return the versions, commit and date that a row is from."""
    today = datetime.date.today().isoformat()
    return {"jax": metadata.version("jax"), "commit": commit(), "date": today}


def commit() -> str:
    """Return the commit of the checkout, and whether files differ from it."""
    git = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


# -- the command line -----------------------------------------------------------------------------


def chosen(option: str, given: Collection[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names that an option gives, all known ones if it gives none.

    Raises:
        typer.BadParameter: if a name is not known.
    """
    names = list(known)
    if unknown := sorted(set(given or ()) - set(names)):
        raise typer.BadParameter(f"--{option} {', '.join(unknown)}: expected {', '.join(names)}")
    return list(given or names)


def conclude(verdicts: Sequence[str], short: Sequence[str], console: Console) -> None:
    """Print the verdicts on a benchmark's rows; exit 1 if anything falls short."""
    if verdicts:
        console.print("\n".join(verdicts))
    if short:
        console.print("\nfalls short:\n" + "\n".join(short), markup=False)
        raise typer.Exit(1)


# -- tables ---------------------------------------------------------------------------------------


def sheet(title: str, columns: Iterable[str], *, words: Collection[str] = ()) -> Table:
    """Make a table for the terminal; columns that are not named in `words` hold numbers."""
    grid = Table(title=title)
    for column in columns:
        grid.add_column(column, justify="left" if column in words else "right")
    return grid


def filled(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str] = (),
) -> Table:
    """Make a table of such columns, with its rows."""
    grid = sheet(title, columns, words=words)
    for cells in rows:
        grid.add_row(*cells)
    return grid


def markdown(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> str:
    """Write a table of Markdown; the columns of numbers are set to the right."""
    rule = ["---:" if column in numbers else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def in_ms(seconds: float | None) -> str:
    """Write seconds as milliseconds for a table; nothing where there are none."""
    return "" if seconds is None else f"{seconds * 1e3:.1f}"
