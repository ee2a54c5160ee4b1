"""What does jaxoverlap give a user who may choose mesh, recomputation and options?

python -m benchmarks.questions --only "8B, 64 H100" --out FILE   # those with this in their names
python -m benchmarks.questions --table FILE                      # print its rows; make none

For each question of `asked.py`, in some ten minutes on a core (a second process takes others):

1. every mesh, by XLA's defaults, with what matmuls and attention give kept, or less to fit;
2. the fastest mesh with each policy of `jax.checkpoint`, and the second with the two fastest;
3. the two fastest of all with published options, and without Triton's matmuls;
4. on the fastest mesh `overlap()` around the fastest policy, and `overlap(memory=)` alone, which
   chooses what is kept; the latter also on the second mesh, where that is nearly as fast.

XLA compiles them for GPUs that are not there; `jaxoverlap.simulate` gives their seconds. Rows that
the file has are not made again. Needs no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.frame import MaybeOut, Row, Shown, add_missing, conclude, read_rows, shown_or_out
from benchmarks.questions.answers import COLUMNS, gains, summary, table
from benchmarks.questions.asked import QUESTIONS
from benchmarks.questions.measure import (
    CHILD_S,
    DEFAULTS,
    FREE_POLICY,
    OVERLAPPED,
    PLAIN_OPTIONS,
    WITH_MEMORY,
    fastest,
    fits,
    measured,
)
from benchmarks.questions.model import KEPT

Labels = tuple[str, str, str]  # mesh, policy and options
FIRST = ("dots + attention", "attention", "full")  # the next where the one before does not fit
NEARLY = 1.04  # times the fastest mesh's seconds
console = Console(width=200)
app = frame.app()


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Questions whose names have this.")] = None,
    out: MaybeOut = None,
    shown: Shown = None,
) -> None:
    """Compile and simulate; exit 1 if a user loses by using the library."""

    def show(path: Path) -> None:
        rows = read_rows(path)
        console.print(frame.filled("the best answers", COLUMNS, table(rows), words=COLUMNS[:1]))
        conclude(summary(rows), [q for q, times in gains(rows).items() if times < 1], console)

    path = shown_or_out(shown, out, show)
    names = [name for name in QUESTIONS if not only or any(o in name for o in only)]
    if not names:
        raise typer.BadParameter(f"no question has {only} in its name: {', '.join(QUESTIONS)}")
    import_first(["benchmarks.questions.measure"])
    for name in names:
        answer(name, path)
    show(path)


def answer(question: str, out: Path) -> None:
    """Make the rows that a question lacks, stage by stage."""
    for stage in (every_mesh, every_policy, every_option, overlapped):
        while missing := set(stage(question, rows_of(out, question))) - {
            labels(row) for row in rows_of(out, question)
        }:
            add_missing(out, [_job(question, one) for one in sorted(missing)], timed=True)


def _job(question: str, one: Labels) -> frame.Job:
    names = dict(zip(("mesh", "policy", "options"), one, strict=True))
    return {"step": question, **names}, lambda: in_fork(measured, question, *one, timeout_s=CHILD_S)


def rows_of(out: Path, question: str) -> list[Row]:
    return [row for row in read_rows(out) if row["step"] == question]


def labels(row: Row) -> Labels:
    return row["mesh"], row["policy"], row["options"]


# -- stages: rows of a question -> labels of those that it should have ----------------------------


def every_mesh(question: str, rows: Sequence[Row]) -> Iterator[Labels]:
    """Yield each mesh with the first of FIRST that fits, by XLA's defaults."""
    known = {labels(row): row for row in rows}
    for mesh in QUESTIONS[question].meshes:
        for policy in FIRST:
            yield (one := (mesh, policy, DEFAULTS))
            if one not in known or fits(known[one]):
                break


def every_policy(question: str, rows: Sequence[Row]) -> Iterator[Labels]:
    """Yield the fastest mesh with each policy, and the second with the two that are fastest."""
    by_defaults = [row for row in rows if row["options"] == DEFAULTS]
    if not (meshes := fastest_meshes(by_defaults, 2)):
        return
    wanted = [(meshes[0], policy, DEFAULTS) for policy in KEPT]
    yield from wanted
    if {*wanted} <= {*map(labels, rows)}:
        of_first = [row for row in fastest(by_defaults) if row["mesh"] == meshes[0]]
        for mesh, row in itertools.product(meshes[1:], of_first[:2]):
            yield mesh, row["policy"], DEFAULTS


def every_option(question: str, rows: Sequence[Row]) -> Iterator[Labels]:
    """Yield the two fastest by XLA's defaults with each other set of options."""
    by_defaults = [row for row in rows if row["options"] == DEFAULTS]
    for row, options in itertools.product(fastest(by_defaults)[:2], PLAIN_OPTIONS):
        yield row["mesh"], row["policy"], options


def overlapped(question: str, rows: Sequence[Row]) -> Iterator[Labels]:
    """Yield the fastest mesh by its policy and by the library's, and a mesh that is near it."""
    without = fastest([row for row in rows if row["options"] in PLAIN_OPTIONS])
    for best in without[:1]:
        yield best["mesh"], best["policy"], OVERLAPPED
        near = [row for row in without if row["step_s"] <= NEARLY * best["step_s"]]
        for mesh in fastest_meshes(near, 2):
            yield mesh, FREE_POLICY, WITH_MEMORY


def fastest_meshes(rows: Sequence[Row], most: int) -> list[str]:
    return list(dict.fromkeys(row["mesh"] for row in fastest(rows)))[:most]


if __name__ == "__main__":
    app()
