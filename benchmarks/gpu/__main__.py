"""Measure on one GPU that several JAX processes share, or rehearse on CPU devices.

python -m benchmarks.gpu race                       # every wire and step
python -m benchmarks.gpu race --wire sockets --step tensor --minutes 6
python -m benchmarks.gpu race --rehearse            # on CPU devices: nothing is worth reading

It needs one NVIDIA GPU with its driver and MPS, and an environment with jax[cuda13], flax, optax,
msgspec, numpy, rich, scipy, typer and nvidia-nccl-cu13 of 2.30.3 or later (or that library by
--nccl). It needs no network, and ends within --minutes. Rows go to --out as JSON lines, each as
soon as it is measured; `python -m benchmarks.report` makes the page of those in benchmarks/results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.frame import Only, Written, chosen, filled
from benchmarks.gpu import race as races
from benchmarks.gpu.machine import MissingError
from benchmarks.gpu.wires import WIRES
from benchmarks.lab.lab import ended_by_signals

console = Console(width=180)
app = frame.app(help=__doc__)


@app.callback()
def main() -> None:
    """Measure on one GPU that several processes share, or rehearse on CPU devices."""


Rehearse = Annotated[bool, typer.Option("--rehearse", help="On CPU devices, at small sizes.")]
Library = Annotated[Path | None, typer.Option("--nccl", help="libnccl.so.2 of 2.30.3 or later.")]
Minutes = Annotated[float, typer.Option(min=0.2, help="It ends within these.")]
Logs = Annotated[Path, typer.Option(help="A folder for what processes write.")]


@contextmanager
def _ended() -> Iterator[None]:
    """Clean up on signals too; say in one line what this machine lacks, and exit 1."""
    try:
        with ended_by_signals():
            yield
    except MissingError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _say(line: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, highlight=False)


@app.command()
def race(
    wire: Annotated[list[str] | None, typer.Option(help="Only these wires.")] = None,
    step: Only = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Only these, and plain.")] = None,
    processes: Annotated[int, typer.Option(min=4, max=4, help="That share the GPU.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="That each candidate runs.")] = 9,
    minutes: Minutes = 60.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = Path("out/gpu/logs"),
    out: Written = Path("out/gpu/race.jsonl"),
) -> None:
    """Race ways to compile six train steps over several wires, on processes that share the GPU."""
    from benchmarks.gpu.candidates import CANDIDATES
    from benchmarks.gpu.steps import STEPS

    wires = [WIRES[name] for name in chosen("wire", wire, WIRES)]
    steps, candidates = chosen("step", step, STEPS), chosen("candidate", candidate, CANDIDATES)
    with _ended():
        place = races.place(
            rehearse=rehearse, given_nccl=nccl, processes=processes, logs=logs / "race"
        )
        until = time.monotonic() + 60 * minutes
        one = races.Race(place, out, rounds, until, _say)
        one.run(wires, steps, candidates)
    rows = list(one.rows.values())
    words = ("step", "wire", "candidate", "notes")
    console.print(filled("the race", races.COLUMNS, races.table(rows), words=words))
    console.print("\n".join(races.verdicts(rows)))


if __name__ == "__main__":
    app()
