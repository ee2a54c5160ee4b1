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

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.drawn.measure import measure_all
from benchmarks.drawn.named import NAMED
from benchmarks.drawn.rows import ROWS, table, verdicts
from benchmarks.drawn.step import Step
from benchmarks.drawn.steps import drawn_name, step_of
from benchmarks.frame import AtOnce, Only, Written, chosen, conclude

SEEDS = range(40)
HELD_BACK = range(100_000, 100_040)

console = Console(width=240)
app = frame.app()


@app.command()
def main(
    only: Only = None,
    seeds: Annotated[str, typer.Option(help="Only drawn steps, of seeds FIRST:END.")] = "",
    held_back: Annotated[bool, typer.Option(help="Only drawn steps, of other seeds.")] = False,
    jobs: AtOnce = 2,
    row: Annotated[
        list[str] | None, typer.Option(help=f"Only these rows: {', '.join(ROWS)}.")
    ] = None,
    out: Written = Path("out/drawn.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if a step is slower than it may be, or a compile fails."""
    steps = {name: _checked(name) for name in only or names(seeds, held_back)}
    kinds = chosen("row", row, ROWS) if row else ROWS[:3]
    wanted = [(name, kind) for name in steps for kind in kinds]
    together = measure_all(steps, wanted, jobs, out, console)
    console.print(table(together))
    conclude(*verdicts(together), console)


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


def _checked(name: str) -> Step:
    try:
        return step_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
