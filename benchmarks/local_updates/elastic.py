"""Train on four hosts of the lab while one of them is killed, and comes back.

    python -m benchmarks.local_updates.elastic --out elastic.jsonl      # in the lab; as root
    python -m benchmarks.local_updates.elastic --table elastic.jsonl

The GPT on text of `learning`, CO2 with 12 steps a round, a worker a host. A host is killed in the
middle of a round, some rounds later its process is started again. Compared by held-out loss with
four hosts that nothing happens to, and with three throughout. Seconds are those of a machine whose
cores all hosts share, and of the waits that are asked for here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.frame import MaybeOut, Shown, add_rows, chosen, read_rows, shown_or_out
from benchmarks.lab import Host, Lab, Network

HOSTS, EVERY, SEED = 4, 12, 0
HEARTBEAT_S, COLLECTIVE_S = 10, 20  # until a process, and a collective, is given up
DIES_AT, BACK_AFTER = 12, 10  # the round in which the last host is killed; rounds without it
MID_ROUND_S = 0.3  # into that round
CASES = ("four hosts", "one killed, back", "one killed for good", "three hosts")
app = frame.app()


def train_here(host: Host, steps: int, workers: int) -> None:
    """Train as one of the hosts; write a row after each round, and host 0 the held-out loss."""
    os.environ["XLA_FLAGS"] = f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_S}"
    import jax

    jax.config.update("jax_enable_recoverability", True)
    host.start_jax(devices=2, heartbeat_timeout_seconds=HEARTBEAT_S)
    import numpy as np

    from benchmarks.local_updates.learning import held_out_loss, make_step, start
    from benchmarks.local_updates.tasks import text
    from jaxoverlap.train import Elastic, LocalUpdates, co2

    task, rows = text(), Path(host.folder) / f"rows{host.rank}"
    mesh = host.mesh(worker=host.count, data=1, model=2)
    mesh = jax.sharding.Mesh(
        mesh.devices[:workers, :, :1], mesh.axis_names, axis_types=mesh.axis_types
    )
    stream, made = task.batches(SEED), list[Any]()

    def batches(number: int, worker: int) -> Any:
        made.extend(islice(stream, (number + 1) * EVERY - len(made)))
        size = task.batch // HOSTS
        own = slice(worker * size, (worker + 1) * size)
        return jax.tree.map(
            lambda *steps: np.stack([step[own] for step in steps]), *made[number * EVERY :]
        )

    def make(mesh: Any) -> LocalUpdates:
        outer = co2(every=EVERY, momentum=0.2)
        return LocalUpdates(
            make_step(task, mesh), mesh, axis="worker", outer=outer, overlap=False, donate=False
        )

    elastic = Elastic(
        make, mesh, axis="worker", init=lambda mesh: start(task, SEED), batches=batches
    )
    with rows.open("a", buffering=1) as file:
        while elastic.number < steps // EVERY:
            began = time.monotonic()
            done = elastic.round()
            row = dict(number=done.number, workers=sorted(done.workers), discarded=done.discarded)
            print(json.dumps(row | dict(seconds=time.monotonic() - began)), file=file)
        params = jax.tree.map(np.asarray, elastic.updates.params(elastic.state))
        if host.rank == 0:
            print(json.dumps(dict(loss=held_out_loss(task, params))), file=file)
    elastic.finish()
    os._exit(0)  # leaving JAX in order waits for all processes, of which some may be gone


def run(
    case: str, steps: int, folder: Path, *, dies_at: int = DIES_AT, back_after: int = BACK_AFTER
) -> dict[str, Any]:
    """Run one case in a lab; return what host 0 wrote.

    Args:
        case: one of CASES.
        steps: of training.
        folder: for what hosts write, new.
        dies_at: the round in which the last host is killed.
        back_after: rounds after that until its process is started again.
    """
    workers = 3 if case == "three hosts" else HOSTS
    with Lab(Network(hosts=workers, rate_mbit=1000), folder=folder) as lab:

        def begin(rank: int) -> Any:
            module = ("-m", "benchmarks.local_updates.elastic", "--steps", str(steps))
            environment = {"JAX_PLATFORMS": "cpu", "ELASTIC_WORKERS": str(workers)}
            return lab.spawn(rank, (sys.executable, *module), environment=environment)

        def rows() -> list[dict[str, Any]]:
            return read_rows(folder / "rows0")

        processes = [begin(rank) for rank in range(workers)]

        def until(happened: Callable[[], bool]) -> None:
            while not happened():
                if processes[0].poll() not in (None, 0):
                    raise RuntimeError(lab.output(0))
                time.sleep(0.02)

        if case.startswith("one killed"):
            until(lambda: len(rows()) >= dies_at)
            time.sleep(MID_ROUND_S)
            processes[-1].kill()
        if case == "one killed, back":
            until(lambda: len(rows()) >= dies_at + back_after)
            processes[-1] = begin(workers - 1)
        until(lambda: processes[0].poll() is not None)
        found = rows()
    if not found or "loss" not in found[-1]:
        raise RuntimeError(f"{case}: host 0 did not finish")
    return dict(case=case, steps=steps, loss=found[-1]["loss"], rounds=found[:-1])


def show(path: Path) -> None:
    """Print the table of a file of rows."""
    sheet = Table(
        "case", "held-out loss", "worker rounds", "discarded", "round, s", "lost: s", "back: s",
        title="CO2 at 12 on four hosts, one of which is killed in mid-round",
    )  # fmt: skip
    for row in read_rows(path):
        rounds = row["rounds"]
        seconds = sorted(one["seconds"] for one in rounds)
        lost = [one["seconds"] for one in rounds if one["discarded"]]
        more = [
            after["seconds"]
            for before, after in pairwise(rounds)
            if len(after["workers"]) > len(before["workers"])
        ]
        sheet.add_row(
            row["case"],
            f"{row['loss']:.4f}",
            str(sum(len(one["workers"]) for one in rounds)),
            str(sum(one["discarded"] for one in rounds)),
            f"{seconds[len(seconds) // 2]:.2f}",
            *(f"{one[0]:.1f}" if one else "-" for one in (lost, more)),
        )
    Console().print(sheet)


@app.command()
def main(
    out: MaybeOut = None,
    shown: Shown = None,
    case: Annotated[
        list[str] | None, typer.Option(help="One of the cases; by default all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 576,
) -> None:
    """Race in a lab, or train as one of its hosts where the lab started this."""
    if "JAXOVERLAP_LAB_HOST" in os.environ:
        train_here(Host.here(), steps, int(os.environ["ELASTIC_WORKERS"]))
    out = shown_or_out(shown, out, show)
    for name in chosen("case", case, CASES):
        folder = out.absolute().parent / f"elastic-{name.replace(' ', '-')}"
        add_rows(out, run(name, steps, folder))
    show(out)


if __name__ == "__main__":
    app()
