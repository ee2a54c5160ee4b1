"""Measure rows of steps in child processes, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.drawn.child import measured
from benchmarks.drawn.rows import Compared, compared
from benchmarks.drawn.step import Step
from benchmarks.forks import import_first, in_fork
from benchmarks.lanes import Job, Row, dealt, done, kernels
from benchmarks.pod_step import in_child, read_rows, write_rows
from benchmarks.strangers.cases import CASES
from benchmarks.strangers.environments import environment
from jaxoverlap._jax.kernel_cache import KnownKernels

CHILD_S = 1200  # the longest that one row may take


def measure_all(
    steps: Mapping[str, Step], wanted: list[Job], jobs: int, out: Path, console: Console
) -> list[Compared]:
    """Measure the wanted rows, and write each to a file when it is there.

    Args:
        steps: by name.
        wanted: steps' names, and rows of `benchmarks.drawn.child.measured`.
        jobs: compiles at a time.
        out: rows as JSON lines; those that are there and not measured again stay.
        console: where the bar is shown.

    Returns:
        The steps with all their rows of the file, old and new.
    """
    lanes = dealt(wanted, jobs)
    known = kernels(lanes, {name: step.pod for name, step in steps.items()})
    import_first(["benchmarks.drawn.child"])
    pythons = {name: _python(step, console) for name, step in steps.items() if step.stranger}
    turns = [job for together in zip_longest(*lanes) for job in together if job]
    row_of = rows_in(out)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("compiling", total=len(wanted))
        for job, made in done(turns, jobs, partial(compile_in_child, known, pythons)):
            row_of[job] = _of_step(steps[job[0]]) | {"row": job[1], **made}
            progress.update(bar, advance=1, description=", ".join(job))
            write_rows(out, row_of.values())
    return compared([row for (name, _), row in row_of.items() if name in steps])


def conclude(verdicts: Sequence[str], short: Sequence[str], console: Console) -> None:
    """Print the verdicts on a benchmark's rows; exit 1 if anything falls short."""
    console.print("\n".join(verdicts))
    if short:
        console.print("\nfalls short:\n" + "\n".join(short), markup=False)
        raise typer.Exit(1)


def rows_in(file: Path) -> dict[Job, Row]:
    """The rows that are in a file already; those that are not measured again stay."""
    return {(row["step"], row["row"]): row for row in read_rows(file)}


def compile_in_child(known: dict[str, KnownKernels], pythons: dict[str, str], job: Job) -> Row:
    """One row, in a fork; in a process of its own where the step has its own Python."""
    if job[0] in pythons:
        return in_child("benchmarks.drawn.child", *job, python=pythons[job[0]])
    with known[job[0]].lent() as loan:
        flag = f"--xla_gpu_kernel_cache_file={loan.file}"
        row = in_fork(measured, *job, timeout_s=CHILD_S, xla_flags=flag)
        loan.ended_well = "error" not in row
        return row


def _python(step: Step, console: Console) -> str:
    """The Python that has what a stranger's step needs."""
    case = next(case for case in CASES if case.name == step.stranger)
    return environment(case, "0.12.0.1", console)


def _of_step(step: Step) -> Row:
    return {"step": step.name, "pod": step.pod, "mesh": dict(step.axes), "about": step.about}
