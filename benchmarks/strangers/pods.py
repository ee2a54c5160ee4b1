"""What does one line bring to published train steps at the size of pods?

python -m benchmarks.strangers.pods                 # all of them; an hour on 2 cores
python -m benchmarks.strangers.pods --only maxtext  # one trainer's

Trainers are those of `benchmarks.strangers`, four layers of their models, 4096 wide, with 4096
tokens a row and a row a GPU, in bfloat16, on four meshes (kauldron knows one axis). Plain and
overlapped steps are compiled for the pod by XLA's GPU compiler, and their schedules simulated:
nothing was timed on a GPU. Needs no GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.drawn.measure import measure_all
from benchmarks.drawn.rows import OVERLAPPED, PLAIN, Compared
from benchmarks.frame import AtOnce, OnlyRows, Row, Written, chosen, conclude, sheet
from benchmarks.pods.rows import MAX_MEMORY_RATIO, unfinished
from benchmarks.strangers.pod_steps import POD_STEPS

MOST_OF_BOUND = 1.10  # of plain's, that an overlapped step may take
MUCH_EXPOSED = 0.2  # of plain's step; of steps with so much, a gain is asked
LEAST_GAIN = 1.2  # of those, in geometric mean
MOST_COMPILE = 3.0  # of plain's seconds

COLUMNS = (
    "plain ms", "overlapped", "times", "of plain's bound", "compute", "exposed", "peak GB",
    "compile s", "decided",
)  # fmt: skip

console = Console(width=200)
app = frame.app()


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Steps whose names have this.")] = None,
    row: OnlyRows = None,
    jobs: AtOnce = 2,
    out: Written = Path("out/strangers_pods.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if a step misses its aim, or a compile fails."""
    steps = {n: s for n, s in POD_STEPS.items() if not only or any(o in n for o in only)}
    if not steps:
        raise typer.BadParameter(f"no step has {only} in its name: {', '.join(POD_STEPS)}")
    kinds = chosen("row", row, (PLAIN, OVERLAPPED))
    wanted = [(name, kind) for name in steps for kind in kinds]
    together = measure_all(steps, wanted, jobs, out, console)
    console.print(table(together))
    conclude(*verdicts(together), console)


def verdicts(steps: Sequence[Compared]) -> tuple[list[str], list[str]]:
    """(what the steps come to, what falls short), a line each."""
    short, gains = [], []
    for step in steps:
        failed = {n: why for n, r in step.rows.items() if (why := unfinished(r))}
        short += [f"{step.name}, {name}: {why}" for name, why in failed.items()]
        if {PLAIN, OVERLAPPED} <= step.known.keys():
            plain, mine = step.known[PLAIN], step.known[OVERLAPPED]
            short += [f"{step.name}: {line}" for line in _too_much(plain, mine)]
            if plain["exposed_s"] >= MUCH_EXPOSED * plain["step_s"]:
                gains.append(plain["step_s"] / mine["step_s"])
    if not gains:
        return [], short
    mean = statistics.geometric_mean(gains)
    line = f"{mean:.3f} times as fast in geometric mean over the {len(gains)} that expose a fifth"
    return [line], short + ([line] if mean < LEAST_GAIN else [])


def _too_much(plain: Row, mine: Row) -> list[str]:
    """List what the overlapped step takes more of than it may."""
    aims = (
        ("plain's bound", mine["step_s"] / plain["bound_s"], MOST_OF_BOUND),
        ("plain's peak memory", mine["peak_bytes"] / plain["peak_bytes"], MAX_MEMORY_RATIO),
        ("plain's compile time", mine["compile_s"] / plain["compile_s"], MOST_COMPILE),
    )
    return [f"{ratio:.3f} times {what}" for what, ratio, most in aims if ratio > most]


def table(steps: Sequence[Compared]) -> Table:
    """Make a table with a line a step; "a → b" is of plain and overlapped."""
    title = "published train steps by simulation of XLA's schedules; ms and GB a GPU"
    grid = sheet(title, ("step", *COLUMNS), words=("step", "decided"))
    for step in steps:
        grid.add_row(step.name, *cells(step))
    return grid


def cells(step: Compared) -> tuple[str, ...]:
    """A step under COLUMNS; what failed is left empty."""
    plain, mine = step.known.get(PLAIN), step.known.get(OVERLAPPED)
    if plain is None or mine is None:
        ms = [f"{row['step_s'] * 1e3:.1f}" if row else "" for row in (plain, mine)]
        return (*ms, *[""] * (len(COLUMNS) - 2))
    both = (plain, mine)
    scaled = {"compute": ("compute_s", 1e3), "exposed": ("exposed_s", 1e3)}
    scaled |= {"peak GB": ("peak_bytes", 1e-9), "compile s": ("compile_s", 1.0)}
    pairs = [" → ".join(f"{row[key] * by:.1f}" for row in both) for key, by in scaled.values()]
    return (
        *(f"{row['step_s'] * 1e3:.1f}" for row in both),
        f"{plain['step_s'] / mine['step_s']:.3f}",
        f"{mine['step_s'] / plain['bound_s']:.3f}",
        *pairs,
        _decided(mine),
    )


def _decided(row: Row) -> str:
    """Say in a few words what was done to the step."""
    words = [f"{row['parts']} parts"] if "parts" in row else []
    if row.get("unroll", 1) > 1:
        words.append(f"unrolled {row['unroll']}")
    counts = {"pins": "pins", "rings": "rings", "slices": "slices"}
    return ", ".join([*words, *(f"{row[k]} {word}" for k, word in counts.items() if row.get(k))])


if __name__ == "__main__":
    app()
