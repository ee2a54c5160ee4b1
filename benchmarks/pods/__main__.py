"""Simulate train steps on pods: plain, with published presets, by hand, and overlapped.

python -m benchmarks.pods                          # the whole suite
python -m benchmarks.pods --only 7b-h100-64        # one step
python -m benchmarks.pods --layout process-a-gpu   # a process for each GPU, as SLURM starts them

Every row is a step compiled for a pod by XLA's GPU compiler, and its schedule simulated
(`jaxoverlap.simulate`): nothing was timed on a GPU. Plain steps have Megatron's constraints and the
compiler's defaults. Each compile is a child process of its own, so that a compiler that aborts, or
does not end, is a row and not the end. Compile times are with the kernels of earlier rows at hand
(jaxoverlap/_jax/kernel_cache.py). Needs no GPU.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.children import Job, compiled_at_once, import_first, with_kernels
from benchmarks.frame import (
    AtOnce,
    Only,
    OnlyRows,
    Row,
    Written,
    chosen,
    conclude,
    read_rows,
    write_rows,
)
from benchmarks.pods.child import measured
from benchmarks.pods.rows import refused, table, verdicts
from benchmarks.pods.suite import ALL, BY_PROCESS, STEPS, Step
from jaxoverlap._jax.kernel_cache import KnownKernels

CHILD_S = 900  # the longest that one row may take: overlap() compiles up to six programs

console = Console(width=200)


class Layout(StrEnum):
    """The number of processes that each host of a pod runs."""

    HOST = "process-a-host"
    GPU = "process-a-gpu"
    BOTH = "both"

    @property
    def steps(self) -> dict[str, Step]:
        """The suite's steps under it."""
        return {Layout.HOST: STEPS, Layout.GPU: BY_PROCESS, Layout.BOTH: ALL}[self]


app = frame.app()


@app.command()
def main(
    only: Only = None,
    row: OnlyRows = None,
    layout: Annotated[
        Layout, typer.Option(help="A process on each host, or for each GPU.")
    ] = Layout.HOST,
    jobs: AtOnce = 2,
    out: Written = Path("out/pods.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if an overlapped step falls short, or a compile fails."""
    names = chosen("only", only, STEPS)
    steps = [n for n in layout.steps if n.partition(",")[0] in names]
    wanted = [(step, name) for step in steps for name in ALL[step].rows if not row or name in row]
    rows = compile_all(ALL, wanted, jobs, out)
    console.print(table(rows))
    lines, short = verdicts(rows)
    conclude([*refused(rows), *lines], short, console)


def compile_all(steps: Mapping[str, Step], wanted: list[Job], jobs: int, out: Path) -> list[Row]:
    """Compile rows of steps in children, and write those that are done to a file.

    Rows that the file has of other steps stay there.
    """
    import_first(["benchmarks.pods.__main__"])
    others = [row for row in read_rows(out) if (row["step"], row["row"]) not in wanted]
    row_of: dict[Job, Row] = {}
    pods = {name: step.pod for name, step in steps.items()}

    def work(job: Job, known: KnownKernels) -> Row:
        return with_kernels(measured, job, known, CHILD_S)

    for job, result in compiled_at_once(wanted, jobs, pods, work, console):
        row_of[job] = {"step": job[0], "row": job[1], "pod": pods[job[0]], **result}
        write_rows(out, [*others, *(row_of[job] for job in wanted if job in row_of)])
    return [row_of[job] for job in wanted]


if __name__ == "__main__":
    app()
