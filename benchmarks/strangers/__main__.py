"""Does overlap() hold on train steps that were not written for it?

python -m benchmarks.strangers                         # all of them; about 25 minutes on 2 cores
python -m benchmarks.strangers --only tunix --only gemma

Installs published trainers, each into an environment of its own under out/, shrinks their
configurations, and runs their train steps plain and overlapped: in float32 on 8 CPU devices, where
losses, gradients and states are compared, and compiled in their own sizes (two layers) for eight
H100s, where the schedules are audited and the picture that decisions rest on is held against what
XLA partitions. Needs no GPU. Every run is a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.frame import Written, add_rows, commit, conclude, sheet, write_rows
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.environments import environment
from benchmarks.strangers.rows import (
    BY_RULES,
    COLUMNS,
    WHAT,
    WORDS,
    Row,
    by_rules,
    error_of,
    markdown,
    shortfalls,
    skipped_lines,
    table_cells,
)
from benchmarks.strangers.stranger import Case

console = Console(width=200)
app = frame.app()


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Cases whose names have this.")] = None,
    only_what: Annotated[
        list[str] | None,
        typer.Option("--what", help=f"Only these runs: {', '.join((*WHAT, *BY_RULES))}."),
    ] = None,
    jax: Annotated[str, typer.Option(help="The jax version to try them on.")] = "0.12.0.1",
    out: Written = Path("out/strangers.jsonl"),
    table: Annotated[Path | None, typer.Option(help="Where the table goes, as Markdown.")] = None,
) -> None:
    """Run, compare, print; exit 1 if a step failed or differs."""
    cases = [c for c in CASES if not only or any(o in c.name for o in only)]
    if not cases:
        names = ", ".join(f"{case.name!r}" for case in CASES)
        raise typer.BadParameter(f"no case has {only} in its name: {names}")
    rows = []
    write_rows(out, ())  # rows are added as they come: all of them take long
    for case in cases:
        python = environment(case, jax, console)
        for what in only_what or (*WHAT, *BY_RULES):
            if what in BY_RULES and not case.takes_dot_general:
                continue
            with console.status(f"{case.name}: {what}"):
                rows.append(in_child(python, case, what))
            add_rows(out, rows[-1])
    print_rows(rows)
    if table:
        table.write_text(markdown(rows))
    conclude([], [p for row in rows for p in shortfalls(row)], console)


def in_child(python: str, case: Case, what: str) -> Row:
    """One run in a process of its own; a row, also where the compiler aborts."""
    command = [python, "-m", "benchmarks.strangers.child", case.name, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)  # whole; a row has room for its last line
        row = {"case": case.name, "what": what, "error": error_of(done.returncode, done.stderr)}
    else:
        row = json.loads(done.stdout.splitlines()[-1])
    again = f"python -m benchmarks.strangers --only {case.name!r}"
    return {**row, "commit": commit(), "command": again}


def print_rows(rows: list[Row]) -> None:
    table = sheet("published train steps, plain and overlapped", COLUMNS, words=COLUMNS[:WORDS])
    for cells in table_cells(rows):
        table.add_row(*cells)
    console.print(table)
    for line in (*skipped_lines(rows), *by_rules(rows)):
        console.print(line, markup=False)


if __name__ == "__main__":
    app()
