"""Compare what local updates learn: final losses on real data, several seeds.

    python -m benchmarks.local_updates.learning --task images --out images.jsonl
    python -m benchmarks.local_updates.learning --table images.jsonl

A row is a run: the loss on what was held out, after as many samples as every other run. Rows that
the file has already are not run again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.local_updates.tasks import FASHION, Task, images, mesh_of, text
from benchmarks.pod_step import read_rows
from jaxoverlap.train import LocalUpdates, Outer, co2, diloco, local_sgd, slowmo

WORKERS = 4
EVERY = (4, 12, 48)
SEEDS = 3


def outers(every: int, task: Task) -> dict[str, Outer]:
    """Return the algorithms that are compared.

    Settings are published ones, but for tight clips and for the last, the best of a dozen that were
    tried on the pictures: rates of 0.25 to 1, with and without momentum and penalty.
    """
    return {
        "LocalSGD": local_sgd(every=every),
        "SlowMo": slowmo(every=every, inner_learning_rate=task.learning_rate, momentum=0.2),
        "DiLoCo": diloco(every=every),
        "DiLoCo, a round late": diloco(every=every, delay=1),
        "CO2": co2(every=every),
        "CO2, no penalty": co2(every=every, staleness=1),
        "CO2, no clip": co2(every=every, clip=None),
        "CO2, clip 0.02": co2(every=every, clip=0.02),
        "CO2, neither": co2(every=every, staleness=1, clip=None),
        "CO2, tuned": co2(every=every, staleness=1, momentum=0.0, learning_rate=0.7),
    }


def make_step(task: Task, mesh: Any) -> Any:
    """Return the ordinary train step."""
    loss, optimizer = task.loss(mesh), task.optimizer()

    @jax.jit
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return dict(params=params, optimizer=inner), value

    return train_step


def rounds(task: Task, seed: int, every: int) -> Iterator[Any]:
    """Yield the batches of each round, stacked."""
    batches = task.batches(seed)
    for _ in range(task.steps // every):
        yield jax.tree.map(lambda *b: np.stack(b), *islice(batches, every))


def start(task: Task, seed: int) -> dict[str, Any]:
    params = task.new_params(seed)
    return dict(params=params, optimizer=task.optimizer().init(params))


def synchronous(task: Task, seed: int) -> Any:
    """Train by AdamW on the global batch, on one device."""
    step, state = make_step(task, mesh_of(1)), start(task, seed)
    for batch in islice(task.batches(seed), task.steps):
        state, _ = step(state, batch)
    return state["params"]


def local(task: Task, seed: int, outer: Outer) -> Any:
    """Train by local updates, on a device for each worker."""
    mesh = mesh_of(WORKERS)
    updates = LocalUpdates(make_step(task, mesh), mesh, axis="worker", outer=outer, overlap=False)
    state = updates.init(start(task, seed))
    for batches in rounds(task, seed, outer.every):
        state, _ = updates.round(state, batches)
    return jax.device_get(updates.params(state))


def held_out_loss(task: Task, params: Any) -> float:
    loss = jax.jit(task.loss(mesh_of(1)))
    return float(np.mean([loss(params, batch) for batch in task.held_out]))


def main(
    task: Annotated[str, typer.Option(help="images or text.")] = "images",
    out: Annotated[Path | None, typer.Option(help="Add rows to this file.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Algorithms, by name.")] = None,
    every: Annotated[list[int] | None, typer.Option(help="Steps of a round.")] = None,
    folder: Annotated[Path, typer.Option(help="Where Fashion-MNIST lies.")] = FASHION,
    table: Annotated[Path | None, typer.Option(help="Print the rows of a file instead.")] = None,
) -> None:
    if table:
        show(table)
        return
    if out is None:
        raise typer.BadParameter("give --out, a file for the rows")
    jax.config.update("jax_num_cpu_devices", WORKERS)
    what = images(folder) if task == "images" else text()
    names = [name for name in outers(EVERY[0], what) if not only or name in only]
    known = {(r["name"], r["every"], r["seed"]) for r in read_rows(out)}
    runs = [
        run
        for seed in range(SEEDS)
        for run in [
            ("AdamW, synchronous", 1, seed),
            *((name, steps, seed) for steps in every or EVERY for name in names),
        ]
        if run not in known
    ]
    with out.open("a", buffering=1) as file:
        for name, steps, seed in track(runs, "runs"):
            began = time.perf_counter()
            if steps == 1:
                params = synchronous(what, seed)
            else:
                params = local(what, seed, outers(steps, what)[name])
            row = dict(task=what.name, name=name, every=steps, seed=seed, steps=what.steps)
            row |= dict(loss=held_out_loss(what, params), seconds=time.perf_counter() - began)
            print(json.dumps(row), file=file)
    show(out)


def show(path: Path) -> None:
    """Print mean and spread of the seeds, and the mean over that of synchronous AdamW."""
    found = read_rows(path)
    if not found:
        raise typer.BadParameter(f"no rows in {path}")

    def losses(name: str, every: int) -> list[float]:
        return [r["loss"] for r in found if (r["name"], r["every"]) == (name, every)]

    base = statistics.mean(losses("AdamW, synchronous", 1))
    titles = ("algorithm", *(f"every {every}" for every in EVERY))
    sheet = Table(*titles, title=f"{found[0]['task']}: held-out loss, {WORKERS} workers")
    for name in dict.fromkeys(r["name"] for r in found):
        cells = [losses(name, every) or losses(name, 1) for every in EVERY]
        sheet.add_row(name, *(cell(c, base) for c in cells))
    Console().print(sheet)


def cell(losses: list[float], base: float) -> str:
    if not losses:
        return "-"
    mean = statistics.mean(losses)
    spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
    return f"{mean:.4f} ± {spread:.4f} ({mean / base:.3f} x)"


if __name__ == "__main__":
    typer.run(main)
