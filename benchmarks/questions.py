"""What does a user gain who may choose mesh and flags, with jaxoverlap and without?

python -m benchmarks.questions                    # all ten; two hours on 2 cores
python -m benchmarks.questions --only "70B, 64"   # those with this in their names

Each question is a model, a cluster and a global batch (`benchmarks/pods/questions.py`). Every mesh
that fits is compiled by XLA's GPU compiler with XLA's defaults, with each published preset, and
overlapped; the schedules are simulated (`jaxoverlap.simulate`): nothing was timed on a GPU. Needs
no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.frame import AtOnce, OnlyRows, Written, chosen
from benchmarks.pods.__main__ import compile_all
from benchmarks.pods.questions import ASKED_ROWS, MESH_STEPS, QUESTIONS, mesh_name, named
from benchmarks.pods.rows import Row, unfinished
from benchmarks.pods.suite import DEFAULT, PLAIN, PRESET_ROWS

COLUMNS = ("question", "best without", "ms", "best with", "ms", "times")
MESH_COLUMNS = (
    *("question", "mesh", "XLA's defaults"),
    *(kind.removeprefix("plain, ") for kind in PRESET_ROWS),
    *("overlap()", "it took"),
)
console = Console(width=160)
app = frame.app()


class Answer(NamedTuple):
    """The fastest step that fits the memory: its mesh, its setting and its milliseconds."""

    mesh: str
    setting: str
    ms: float


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Questions whose names have this.")] = None,
    row: OnlyRows = None,
    jobs: AtOnce = 2,
    out: Written = Path("out/questions.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if a user loses by using the library."""
    names = [name for name in QUESTIONS if not only or any(o in name for o in only)]
    if not names:
        raise typer.BadParameter(f"no question has {only} in its name: {', '.join(QUESTIONS)}")
    kinds = chosen("row", row, ASKED_ROWS)
    steps = [named(name, axes) for name in names for axes in QUESTIONS[name].meshes]
    wanted = [(step, kind) for step in steps for kind in kinds]
    rows = compile_all(MESH_STEPS, wanted, jobs, out)
    grid = Table(*COLUMNS, title="the best mesh and setting, without and with jaxoverlap")
    for cells in table(rows):
        grid.add_row(*cells)
    console.print(grid)
    failed = (f"{r['step']}, {r['row']}: {unfinished(r)}" for r in rows if unfinished(r))
    console.print("\n".join((*summary(rows), *failed)))
    if any(times < 1 for times in gains(rows).values()):
        raise typer.Exit(1)


def best(rows: Iterable[Row], question: str, kinds: Sequence[str]) -> Answer | None:
    """The fastest of some rows of a question over its meshes, of those that fit the memory."""
    meshes = {named(question, axes): mesh_name(axes) for axes in QUESTIONS[question].meshes}
    answers = [
        Answer(meshes[row["step"]], _setting(row), row["step_s"] * 1e3)
        for row in rows
        if row["step"] in meshes and row["row"] in kinds and _fits(row)
    ]
    return min(answers, key=lambda answer: answer.ms, default=None)


def answers(rows: Sequence[Row]) -> dict[str, tuple[Answer, Answer]]:
    """The best without and the best with jaxoverlap, of each question that has both."""
    found = {}
    for question in QUESTIONS:
        without = best(rows, question, (PLAIN, *PRESET_ROWS))
        overlapped = best(rows, question, (DEFAULT,))
        if without and overlapped:
            found[question] = without, overlapped
    return found


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """How many times as fast each question's best is with jaxoverlap."""
    return {name: without.ms / with_it.ms for name, (without, with_it) in answers(rows).items()}


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The answers under COLUMNS."""
    return [
        (
            question,
            f"{without.mesh}, {without.setting}",
            f"{without.ms:.0f}",
            f"{with_it.mesh}, {with_it.setting}",
            f"{with_it.ms:.0f}",
            f"{without.ms / with_it.ms:.2f}",
        )
        for question, (without, with_it) in answers(rows).items()
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """The geometric mean and the worst, in a sentence."""
    times = gains(rows)
    if not times:
        return ["no question has both answers yet"]
    mean = math.exp(math.fsum(map(math.log, times.values())) / len(times))
    worst = min(times, key=lambda name: times[name])
    return [
        f"{mean:.2f} times as fast in geometric mean over {len(times)} questions; "
        f"the least is {times[worst]:.2f} ({worst})"
    ]


def without_figure(rows: Iterable[Row]) -> str:
    """Name the rows that have no seconds, and why, in a sentence; empty if all have."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if why := unfinished(row):
            question = row["step"].partition(" | ")[0]
            kinds.setdefault((question, why.partition(":")[0]), []).append(_setting(row))
    failed = [
        f"{question}, {', '.join(dict.fromkeys(settings))} ({why})"
        for (question, why), settings in kinds.items()
    ]
    return f"No figure, so not among the answers: {'; '.join(failed)}." if failed else ""


def by_mesh(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Each question's meshes under MESH_COLUMNS: milliseconds, empty where there are none."""
    found = {(row["step"], row["row"]): row for row in rows}
    lines = []
    for question, asked in QUESTIONS.items():
        for axes in asked.meshes:
            step = named(question, axes)
            of_step = [found[step, kind] for kind in ASKED_ROWS if (step, kind) in found]
            if len(of_step) == len(ASKED_ROWS):
                took = _setting(of_step[-1]) if _fits(of_step[-1]) else "no figure that fits"
                lines.append((question, mesh_name(axes), *map(_ms, of_step), took))
    return lines


def _fits(row: Row) -> bool:
    """Return whether a step was simulated, and fits the memory of a GPU."""
    return not unfinished(row) and row["peak_bytes"] <= row["chip_bytes"]


def _ms(row: Row) -> str:
    return "" if unfinished(row) else f"{row['step_s'] * 1e3:.0f}"


_TAKEN = {"reordered": "scheduler pass alone", "plain": "XLA's defaults"}


def _setting(row: Row) -> str:
    """Name the setting of a row; of overlap(), what it took."""
    if row["row"] != DEFAULT:
        return "XLA's defaults" if row["row"] == PLAIN else row["row"].removeprefix("plain, ")
    taken = row.get("taken", "overlapped")
    if taken in ("overlapped", "other rows", "other loops"):
        return "overlapped"
    return _TAKEN.get(taken, f"{taken} and the scheduler pass")


if __name__ == "__main__":
    app()
