"""Is an overlapped step ever slower than plain?

python -m benchmarks.drawn                        # the named steps and 40 drawn; 25 minutes
python -m benchmarks.drawn --only "no remat, 7B"  # one of them
python -m benchmarks.drawn --seeds 0:10           # ten drawn, no named
python -m benchmarks.drawn --held-back            # 40 that nobody has looked at

The named steps were found slower by people; the others are drawn at random (`drawing.py`): depth,
sizes, meshes, where weights and activations lie, attention, remat, scans, optimizers. Each is
compiled for a pod by XLA's GPU compiler, plain and overlapped, and both schedules are simulated
(`jaxoverlap.simulate`): nothing was timed on a GPU. Each compile is a child process of its own.
Needs no GPU.
"""

import json
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.drawn.child import measured
from benchmarks.drawn.named import NAMED
from benchmarks.drawn.rows import ROWS, compared, table, verdicts
from benchmarks.drawn.step import Step
from benchmarks.drawn.steps import drawn_name, step_of
from benchmarks.forks import import_first, in_fork
from benchmarks.lanes import Job, Row, dealt, done, kernels
from benchmarks.pod_step import in_child, write_rows
from benchmarks.strangers.__main__ import environment
from benchmarks.strangers.cases import CASES
from jaxoverlap._jax.kernel_cache import Kernels

CHILD_S = 1200  # the longest that one row may take
SEEDS = range(40)
HELD_BACK = range(100_000, 100_040)

console = Console(width=240)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these steps, by name.")] = None,
    seeds: Annotated[str, typer.Option(help="Only drawn steps, of seeds FIRST:END.")] = "",
    held_back: Annotated[bool, typer.Option(help="Only drawn steps, of other seeds.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Compiles at a time.")] = 2,
    row: Annotated[
        list[str] | None, typer.Option(help=f"Only these rows: {', '.join(ROWS)}.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where rows go, as JSON lines; others there stay.")
    ] = Path("out/drawn.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if a step is slower than it may be, or a compile fails."""
    steps = {name: _checked(name) for name in only or names(seeds, held_back)}
    if unknown := set(row or ()) - set(ROWS):
        raise typer.BadParameter(f"--row {', '.join(unknown)}: expected {', '.join(ROWS)}")
    wanted = [(name, kind) for name in steps for kind in row or ROWS[:3]]
    lanes = dealt(wanted, jobs)
    known = kernels(lanes, {name: step.pod for name, step in steps.items()})
    import_first(["benchmarks.drawn.child"])
    pythons = {name: _python(step) for name, step in steps.items() if step.stranger}
    turns = [job for together in zip_longest(*lanes) for job in together if job]
    row_of = rows_in(out)
    with _progress() as progress:
        bar = progress.add_task("compiling", total=len(wanted))
        for job, made in done(turns, jobs, partial(compile_in_child, known, pythons)):
            row_of[job] = _of_step(steps[job[0]]) | {"row": job[1], **made}
            progress.update(bar, advance=1, description=", ".join(job))
            write_rows(out, row_of.values())
    together = compared([row for (name, _), row in row_of.items() if name in steps])
    console.print(table(together))
    said, short = verdicts(together)
    console.print("\n".join(said))
    if short:
        console.print("\nfalls short:\n" + "\n".join(short), markup=False)
        raise typer.Exit(1)


def names(seeds: str, held_back: bool) -> list[str]:
    """The steps to compile where none is named.

    Raises:
        typer.BadParameter: if `seeds` is no range.
    """
    if seeds:
        first, _, end = seeds.partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            raise typer.BadParameter(f"--seeds {seeds}: expected FIRST:END, as in 0:40")
        return [drawn_name(seed) for seed in range(int(first), int(end))]
    if held_back:
        return [drawn_name(seed) for seed in HELD_BACK]
    return [*NAMED, *map(drawn_name, SEEDS)]


def rows_in(file: Path) -> dict[Job, Row]:
    """The rows that are in a file already; those that are not measured again stay."""
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {(row["step"], row["row"]): row for row in rows}


def compile_in_child(known: dict[str, Kernels], pythons: dict[str, str], job: Job) -> Row:
    """One row, in a fork; in a process of its own where the step has its own Python."""
    if job[0] in pythons:
        return in_child("benchmarks.drawn.child", *job, python=pythons[job[0]])
    with known[job[0]].lent() as loan:
        flag = f"--xla_gpu_kernel_cache_file={loan.file}"
        row = in_fork(measured, *job, timeout_s=CHILD_S, xla_flags=flag)
        loan.ended_well = "error" not in row
        return row


def _checked(name: str) -> Step:
    try:
        return step_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _python(step: Step) -> str:
    """The Python that has what a stranger's step needs."""
    case = next(case for case in CASES if case.name == step.stranger)
    return environment(case, "0.12.0.1")


def _of_step(step: Step) -> Row:
    return {"step": step.name, "pod": step.pod, "mesh": dict(step.axes), "about": step.about}


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.description}"), console=console)


if __name__ == "__main__":
    app()
