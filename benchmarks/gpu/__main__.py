"""Measure on one GPU that several JAX processes share, or rehearse on CPU devices.

python -m benchmarks.gpu all --minutes 8            # what is worth most, in so much time
python -m benchmarks.gpu race                       # every wire and step
python -m benchmarks.gpu race --wire sockets --step tensor --minutes 6
python -m benchmarks.gpu kernels                    # kernels of pods' steps, by mock collectives
python -m benchmarks.gpu curve                      # Lagom's: matmuls and a gather, by CTAs
python -m benchmarks.gpu systems                    # CO2, L-GreCo, DistZO2, varlen
python -m benchmarks.gpu deadlocks                  # 200 steps on 2 x 2; a process that dies
python -m benchmarks.gpu race --rehearse            # on CPU devices: nothing is worth reading

Each needs one NVIDIA GPU with its driver, and an environment with jax[cuda13], flax, grain, optax,
msgspec, numpy, rich, scipy and typer. Those in which processes share the GPU (all but kernels) need
NVIDIA's MPS and nvidia-nccl-cu13 of 2.30.3 or later too, or that library by --nccl. None needs a
network. All end within --minutes. Rows go to files of JSON lines, each as soon as it is measured;
`python -m benchmarks.report` makes the page of those in benchmarks/results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.frame import Only, Written, chosen, filled
from benchmarks.gpu import curve as lagom
from benchmarks.gpu import hang
from benchmarks.gpu import kernels as timed_kernels
from benchmarks.gpu import race as races
from benchmarks.gpu import systems as training
from benchmarks.gpu.jobs import Job, run
from benchmarks.gpu.machine import MissingError
from benchmarks.gpu.place import Place, place
from benchmarks.gpu.wires import WIRES
from benchmarks.lab.lab import ended_by_signals

console = Console(width=180)
app = frame.app(help=__doc__)


@app.callback()
def main() -> None:
    """Measure on one GPU that several processes share, or rehearse on CPU devices."""


Rehearse = Annotated[bool, typer.Option("--rehearse", help="On CPU devices, at small sizes.")]
Library = Annotated[Path | None, typer.Option("--nccl", help="libnccl.so.2 of 2.30.3 or later.")]
Minutes = Annotated[float, typer.Option(min=0.5, help="It ends within these.")]
LOGS = Path("out/gpu/logs")
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
    rounds: Annotated[int, typer.Option(min=1, help="That each candidate runs.")] = 9,
    minutes: Minutes = 60.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    out: Written = Path("out/gpu/race.jsonl"),
) -> None:
    """Race ways to compile six train steps over several wires, on processes that share the GPU."""
    with _ended():
        here = place(rehearse=rehearse, nccl_file=nccl, together=True, logs=logs / "race")
        _race(here, wire, step, candidate, rounds, time.monotonic() + 60 * minutes, out)


def _race(
    here: Place,
    wire: list[str] | None,
    step: list[str] | None,
    candidate: list[str] | None,
    rounds: int,
    until: float,
    out: Path,
) -> None:
    from benchmarks.gpu.candidates import CANDIDATES
    from benchmarks.gpu.steps import STEPS

    wires = [WIRES[name] for name in chosen("wire", wire, WIRES)]
    steps, candidates = chosen("step", step, STEPS), chosen("candidate", candidate, CANDIDATES)
    one = races.Race(here, out, rounds, until, _say)
    one.run(wires, steps, candidates)
    rows = list(one.rows.values())
    words = ("step", "wire", "candidate", "notes")
    console.print(filled("the race", races.COLUMNS, races.table(rows), words=words))
    console.print("\n".join(races.verdicts(rows)))


@app.command()
def kernels(
    step: Only = None,
    row: Annotated[list[str] | None, typer.Option(help="plain or overlapped; or both.")] = None,
    minutes: Minutes = 60.0,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    out: Written = Path("out/gpu/kernels.jsonl"),
) -> None:
    """Time the kernels of one device's program of pods' steps, against the simulation."""
    from benchmarks.pods.suite import STEPS
    from benchmarks.questions.asked import QUESTIONS
    from benchmarks.questions.asked import STEPS as ASKED

    pods = {name: wanted.pod for name, wanted in STEPS.items()}
    pods |= {name: QUESTIONS[question].pod for name, (question, _) in ASKED.items()}
    if rehearse:
        pods = {timed_kernels.REHEARSED: "h100-sxm:1x4"}
    usual = None if rehearse else list(STEPS)
    steps = chosen("step", step or usual, pods)
    rows = chosen("row", row, timed_kernels.ROWS)
    with _ended():
        here = place(rehearse=rehearse, nccl_file=None, together=False, logs=logs / "kernels")
        jobs = timed_kernels.jobs(steps, rows, pods)
        made = _measured(here, jobs, timed_kernels, minutes, out)
        console.print("\n".join(timed_kernels.verdicts(made)))


@app.command()
def curve(
    ctas: Annotated[list[int] | None, typer.Option(help="Only these numbers.")] = None,
    minutes: Minutes = 15.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    out: Written = Path("out/gpu/curve.jsonl"),
) -> None:
    """Time matmuls and an all-gather, alone and at once, by the CTAs that NCCL may use."""
    with _ended():
        here = place(rehearse=rehearse, nccl_file=nccl, together=True, logs=logs / "curve")
        _measured(here, lagom.jobs(ctas or lagom.CTAS), lagom, minutes, out)


@app.command()
def systems(
    system: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="That each method runs.")] = 7,
    minutes: Minutes = 30.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    out: Written = Path("out/gpu/systems.jsonl"),
) -> None:
    """Time the training systems: local updates, compression, zeroth order, varlen."""
    names = chosen("system", system, training.SYSTEMS)
    with _ended():
        several = bool({training.ROUNDS, training.COMPRESSED} & set(names))
        here = place(rehearse=rehearse, nccl_file=nccl, together=several, logs=logs / "systems")
        models = training.MODELS[: 1 if rehearse else None]
        _measured(here, training.jobs(names, rounds=rounds, models=models), training, minutes, out)


@app.command()
def deadlocks(
    minutes: Minutes = 10.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    out: Written = Path("out/gpu/deadlocks.jsonl"),
) -> None:
    """Take 200 steps on 2 x 2 processes with and without CUDA graphs; kill one; see what ends."""
    with _ended():
        here = place(rehearse=rehearse, nccl_file=nccl, together=True, logs=logs / "deadlocks")
        _measured(here, hang.jobs(rehearse=rehearse), hang, minutes, out)


@app.command(name="all")
def everything(
    minutes: Minutes = 8.0,
    nccl: Library = None,
    rehearse: Rehearse = False,
    logs: Logs = LOGS,
    folder: Annotated[Path, typer.Option(help="For the files of rows.")] = Path("out/gpu"),
) -> None:
    """Measure what is worth most, each part within its share of the time.

    A part that ends early leaves its time to the next ones.
    """
    with _ended():
        together = place(rehearse=rehearse, nccl_file=nccl, together=True, logs=logs)
        ends = _ends(time.monotonic(), 60 * minutes)
        steps = ["tensor"] if rehearse else None
        candidates = ["default"] if rehearse else list(_FIRST)
        few = {"rounds": 1 if rehearse else 5}
        _race(
            together, ["copies, 2 CTAs"], steps, candidates, **few,
            until=ends["race"], out=folder / "race.jsonl",
        )  # fmt: skip
        pods = {timed_kernels.REHEARSED: "h100-sxm:1x4"} if rehearse else _first_pods()
        parts = (
            ("kernels", timed_kernels, timed_kernels.jobs(list(pods), timed_kernels.ROWS, pods)),
            ("deadlocks", hang, hang.jobs(rehearse=rehearse)),
            ("curve", lagom, lagom.jobs((2,) if rehearse else (1, 4, 16))),
            ("systems", training, training.jobs(training.SYSTEMS, **few, models=("6.7b",))),
        )
        for name, module, jobs in parts:
            left = (ends[name] - time.monotonic()) / 60
            _measured(together, jobs, module, left, folder / f"{name}.jsonl")


_SHARES = {"race": 0.45, "kernels": 0.2, "deadlocks": 0.12, "curve": 0.08, "systems": 0.15}


_FIRST: tuple[str, ...] = ("options O1", "scheduler pass", "two batch parts", "rings", "default")


def _ends(began: float, seconds: float) -> dict[str, float]:
    """Return when each part has to end."""
    ends, used = {}, 0.0
    for name, share in _SHARES.items():
        used += share
        ends[name] = began + used * seconds
    return ends


def _first_pods() -> dict[str, str]:
    from benchmarks.pods.suite import STEPS

    return {name: STEPS[name].pod for name in ("7b-h100-64", "70b-h100-64", "moe-h100-64")}


def _measured(
    here: Place, jobs: Iterable[Job], module: Any, minutes: float, out: Path
) -> list[frame.Row]:
    """Run jobs, and print the table that their module makes of the rows."""
    rows = run(jobs, here, out, time.monotonic() + 60 * minutes, _say)
    columns, numbers, cells = module.shown(rows)
    words = [column for column in columns if column not in numbers]
    console.print(filled(out.stem, columns, cells, words=words))
    return rows


if __name__ == "__main__":
    app()
