"""Measure rows of steps in child processes, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from benchmarks.children import Job, compiled_at_once, import_first, in_child, with_kernels
from benchmarks.drawn.child import measured
from benchmarks.drawn.rows import Compared, compared
from benchmarks.drawn.step import Step
from benchmarks.frame import Row, rows_in, write_rows
from benchmarks.strangers.environments import environment_of
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
    import_first(["benchmarks.drawn.child"])
    pythons = {
        name: environment_of(step.stranger, console)
        for name, step in steps.items()
        if step.stranger
    }
    row_of = rows_in(out)

    def work(job: Job, known: KnownKernels) -> Row:
        if job[0] in pythons:  # a process of its own, as the step has its own Python
            return in_child("benchmarks.drawn.child", *job, python=pythons[job[0]])
        return with_kernels(measured, job, known, CHILD_S)

    pods = {name: step.pod for name, step in steps.items()}
    for job, made in compiled_at_once(wanted, jobs, pods, work, console):
        row_of[job] = _of_step(steps[job[0]]) | {"row": job[1], **made}
        write_rows(out, row_of.values())
    return compared([row for (name, _), row in row_of.items() if name in steps])


def _of_step(step: Step) -> Row:
    return {"step": step.name, "pod": step.pod, "mesh": dict(step.axes), "about": step.about}
