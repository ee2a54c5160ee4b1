"""Compare what local updates learn: final losses on real data, several seeds.

    python -m benchmarks.local_updates.learning --task images --out images.jsonl
    python -m benchmarks.local_updates.learning --task text --out text.jsonl --only CO2 --every 12
    python -m benchmarks.local_updates.learning --task moved --out moved.jsonl --length 4 --every 12
    python -m benchmarks.local_updates.learning --table images.jsonl

A row is a run: the loss on what was held out and on what was trained on, after as many samples as
every other run of its length, and the bytes that a worker sent. Rows that the file has already are
not run again.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Job, MaybeOut, Shown, add_missing, chosen, read_rows, shown_or_out
from benchmarks.local_updates.tasks import FASHION, Inner, Task, images, mesh_of, text
from jaxoverlap.train import LocalUpdates, Outer, co2, diloco, eager_diloco, local_sgd, slowmo
from jaxoverlap.train import compression as c

WORKERS = 4
EVERY = (4, 12, 48)
SEEDS = 3
BASE = "AdamW, synchronous"
MOMENTUM: dict[str, Any] = dict(momentum=0.2)
RATES = (2, 4)  # of the task's own rate, which AdamW was tuned to


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that is compared.

    Attributes:
        outer: the outer optimizer; None for synchronous steps.
        sync: how averages are compressed; None for as they are.
        inner: the inner optimizer.
        rate: of the task's learning rate.
        warmup: of the inner rate, as a share of the steps.
    """

    outer: Outer | None = None
    sync: Any = None
    inner: Inner = "adamw"
    rate: float = 1.0
    warmup: float = 0.05


def algorithms(every: int, task: Task) -> dict[str, Algorithm]:
    """Return the algorithms that are compared, by name.

    Settings are published ones, but for tight clips and for "tuned", the best of a dozen that were
    tried on the pictures: rates of 0.25 to 1, with and without momentum and penalty. MuLoCo and
    SparseLoCo are reconstructions: their code books of 2 bits were not found.
    """
    means = c.uniform(c.qsgd(2, error_feedback=True, levels="means"))
    sparse = c.uniform(c.top_k(0.03, bits=2), error_decay=0.95)
    adam, muon = diloco(every=every), diloco(every=every)
    slow = slowmo(every=every, inner_learning_rate=task.learning_rate, momentum=0.2)
    late = partial(co2, every=every, momentum=0.2)  # the released code's of 17 workers and more
    found = {
        BASE: Algorithm(),
        "Muon, synchronous": Algorithm(inner="muon"),
        "LocalSGD": Algorithm(local_sgd(every=every)),
        "SlowMo": Algorithm(slow),
        "DiLoCo": Algorithm(adam),
        "DiLoCo, a round late": Algorithm(diloco(every=every, delay=1)),
        "CO2": Algorithm(late()),
        "CO2, no delay": Algorithm(late(delay=0)),
        "CO2, no penalty": Algorithm(late(staleness=1)),
        "CO2, no clip": Algorithm(late(clip=None)),
        "CO2, clip 0.02": Algorithm(late(clip=0.02)),
        "CO2, neither": Algorithm(late(staleness=1, clip=None)),
        "CO2, tuned": Algorithm(late(staleness=1, momentum=0.0, learning_rate=0.7)),
        "CO2, warm-up of a quarter": Algorithm(late(), warmup=0.25),
        "CO2, Muon": Algorithm(late(), inner="muon"),
        "DiLoCo, 2 bits": Algorithm(adam, means),
        "DiLoCo, Muon": Algorithm(muon, inner="muon"),
        "MuLoCo (Muon, 2 bits)": Algorithm(muon, means, inner="muon"),
        "SparseLoCo (3%, 2 bits)": Algorithm(local_sgd(every=every), sparse),
        "LocalSGD, Muon": Algorithm(local_sgd(every=every), inner="muon"),
    }
    options = with_options(every, task.steps // every)
    found |= {name: Algorithm(outer) for name, outer in options.items()}
    for rate in RATES:
        for name in (BASE, "LocalSGD", "SlowMo", "CO2", "CO2, no delay", *options):
            found[f"{name}, rate x{rate}"] = replace(found[name], rate=rate)
    return found


def with_options(every: int, rounds: int) -> dict[str, Outer]:
    """Return CO2 by what is added to it, one option after the other, and its nearest relative."""
    none: dict[str, Any] = dict(every=every, momentum=0.0)
    waits: dict[str, Any] = none | dict(
        rounds=rounds
    )  # the defaults: a tenth at first, a sixth at last
    return {
        "eager DiLoCo": eager_diloco(every=every, learning_rate=1.0, momentum=0.0),
        "CO2, momentum 0": co2(**none),
        "CO2, waits": co2(**waits),
        "CO2, waits, by leaf": co2(**waits, over="leaf"),
        "CO2, waits, by element": co2(**waits, over="element"),
        "CO2, waits, rates by leaf": co2(**waits, staleness=1, learning_rate="leaf"),
        "CO2, waits, eager": co2(**waits, staleness=1, eager=True),
        "CO2, waits, eager, penalty": co2(**waits, eager=True),
        "CO2, waits, eager half": co2(**waits, staleness=1, eager=0.5),
        "CO2, waits, eager half, momentum": co2(**(waits | MOMENTUM), staleness=1, eager=0.5),
    }


def make_step(task: Task, mesh: Any, optimizer: Any = None) -> Any:
    """Return the ordinary train step; of the task's own optimizer, if none is given."""
    loss = task.loss(mesh)
    transform: Any = optimizer or task.optimizer()

    @jax.jit
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, inner = transform.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return dict(params=params, optimizer=inner), value

    return train_step


def rounds(task: Task, seed: int, every: int) -> Iterator[Any]:
    """Yield the batches of each round, stacked."""
    batches = task.batches(seed)
    for _ in range(task.steps // every):
        yield jax.tree.map(lambda *b: np.stack(b), *islice(batches, every))


def start(task: Task, seed: int, optimizer: Any = None) -> dict[str, Any]:
    params = task.new_params(seed)
    return dict(params=params, optimizer=(optimizer or task.optimizer()).init(params))


def run(task: Task, seed: int, algorithm: Algorithm) -> dict[str, Any]:
    """Train; return the losses, and the bytes that a worker sent."""
    task = replace(task, learning_rate=task.learning_rate * algorithm.rate)
    optimizer = task.optimizer(algorithm.inner, algorithm.warmup)
    state = start(task, seed, optimizer)
    if algorithm.outer is None:
        params, times, sent = synchronous(task, seed, optimizer, state), task.steps, None
    else:
        params, times, sent = local(task, seed, optimizer, state, algorithm)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    raw = 2 * (WORKERS - 1) / WORKERS * size * times
    seen = tuple(islice(task.batches(seed), 40))  # of the first epoch
    row = dict(
        loss=held_out_loss(task, params),
        train_loss=held_out_loss(replace(task, held_out=seen), params),
        sent_bytes=raw if sent is None else sent,
    )
    if task.accuracy is None:
        return row
    return row | dict(accuracy=float(np.mean([task.accuracy(params, b) for b in task.held_out])))


def synchronous(task: Task, seed: int, optimizer: Any, state: Any) -> Any:
    """Train on the global batch, on one device."""
    step = make_step(task, mesh_of(1), optimizer)
    for batch in islice(task.batches(seed), task.steps):
        state, _ = step(state, batch)
    return jax.device_get(state["params"])


def local(
    task: Task, seed: int, optimizer: Any, state: Any, algorithm: Algorithm
) -> tuple[Any, int, float | None]:
    """Train by local updates, on a device for each worker.

    Returns:
        The parameters, the rounds, and the bytes that a worker sent if they were compressed.
    """
    mesh, outer, sync = mesh_of(WORKERS), algorithm.outer, algorithm.sync
    assert outer is not None
    updates = LocalUpdates(
        make_step(task, mesh, optimizer),
        mesh,
        axis="worker",
        outer=outer,
        overlap=False,
        sync=sync,
        stacked=("layers",) if sync and task.name == "text" else (),
    )
    state, sent, taken = updates.init(state), 0.0, 0
    for batches in rounds(task, seed, outer.every):
        state, _ = updates.round(state, batches)
        sent, taken = sent + (updates.sent_bytes(state) if sync else 0.0), taken + 1
    return jax.device_get(updates.params(state)), taken, sent if sync else None


def held_out_loss(task: Task, params: Any) -> float:
    loss = jax.jit(task.loss(mesh_of(1)))
    return float(np.mean([loss(params, batch) for batch in task.held_out]))


def main(
    task: Annotated[str, typer.Option(help="images, moved or text.")] = "images",
    out: MaybeOut = None,
    folder: Annotated[Path, typer.Option(help="Where Fashion-MNIST lies.")] = FASHION,
    only: Annotated[list[str] | None, typer.Option(help="Names of algorithms.")] = None,
    every: Annotated[list[int] | None, typer.Option(help="Steps of a round.")] = None,
    length: Annotated[float, typer.Option(help="Of a run, over the task's own steps.")] = 1.0,
    seeds: int = SEEDS,
    shown: Shown = None,
) -> None:
    out = shown_or_out(shown, out, show)
    jax.config.update("jax_num_cpu_devices", WORKERS)
    if task not in (known_tasks := ("images", "moved", "text")):
        raise typer.BadParameter(f"--task {task}: expected {', '.join(known_tasks)}")
    what = text() if task == "text" else images(folder, moved=task == "moved")
    what = replace(what, steps=round(what.steps * length))
    known = algorithms(EVERY[0], what)
    wanted = chosen("only", only, known)
    alone = [(name, 1) for name in wanted if known[name].outer is None]
    rounds = [
        (name, steps)
        for steps in every or EVERY
        for name in wanted
        if known[name].outer is not None
    ]
    jobs: list[Job] = []
    for seed, (name, steps) in itertools.product(range(seeds), alone + rounds):
        labels = dict(task=what.name, name=name, every=steps, seed=seed, steps=what.steps)
        jobs.append((labels, partial(run, what, seed, algorithms(steps, what)[name])))
    add_missing(out, jobs, timed=True)
    show(out)


def show(path: Path) -> None:
    """Print mean and spread of the seeds, the mean over that of synchronous AdamW, and bytes."""
    found = read_rows(path)
    if not found:
        raise typer.BadParameter(f"no rows in {path}")
    for steps in sorted({r["steps"] for r in found}):
        these = [r for r in found if r["steps"] == steps]
        rounds = sorted({r["every"] for r in these} - {1}) or [1]
        titles = ("algorithm", *(f"every {every}" for every in rounds))
        what = f"{found[0]['task']}, {steps} steps, {WORKERS} workers"
        sheet = Table(*titles, title=f"{what}: held-out loss, over AdamW's; bytes, fewer by")
        base = [r for r in these if r["name"] == BASE]
        for name in dict.fromkeys(r["name"] for r in these):
            of_name = [r for r in these if r["name"] == name]
            cells = [[r for r in of_name if r["every"] in (every, 1)] for every in rounds]
            sheet.add_row(name, *(cell(c, base) for c in cells))
        Console().print(sheet)


SHOWN = {  # on docs/local_updates.md: name of a row, and how the page calls it
    "Muon, synchronous": "Muon, synchronous",
    "LocalSGD": "LocalSGD",
    "LocalSGD, Muon": "LocalSGD, Muon inside",
    "SlowMo": "SlowMo",
    "DiLoCo": "DiLoCo",
    "DiLoCo, Muon": "DiLoCo, Muon inside",
    "DiLoCo, 2 bits": "DiLoCo, 2 bits",
    "MuLoCo (Muon, 2 bits)": "MuLoCo (Muon, 2 bits)",
    "SparseLoCo (3%, 2 bits)": "SparseLoCo (3%, 2 bits)",
    "DiLoCo, a round late": "DiLoCo, a round late",
    "CO2": "CO2",
    "CO2, no penalty": "CO2, no penalty",
    "CO2, no delay": "CO2 without its delay",
    "CO2, rate x2": "CO2, twice the inner rate",
    "CO2, Muon": "CO2, Muon inside",
}
COLUMNS = ("", "images, 4", "12", "48", "text, 12", "MB sent")


def page_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the page's cells: losses over synchronous AdamW's, and MB sent on images at 12.

    A synchronous method is in the columns of 12. Where a row has no bytes, they are those of
    uncompressed averages.
    """
    sent = next(r["sent_bytes"] for r in rows if r["name"] == "Muon, synchronous")

    def over(name: str, task: str, *every: int) -> str:
        of_task = [r for r in rows if r["task"] == task]
        base = [r["loss"] for r in of_task if r["name"] == BASE]
        found = [r["loss"] for r in of_task if r["name"] == name and r["every"] in every]
        if not found:
            return ""
        times = statistics.mean(found) / statistics.mean(base)
        return f"{times:.2f}" if times < 10 else f"{times:.1f}"

    def megabytes(name: str) -> str:
        (row, *_) = (
            r for r in rows if r["name"] == name and r["every"] in (1, 12) and r["task"] == "images"
        )
        mb = row.get("sent_bytes", sent / row["every"]) / 1e6
        return f"{mb:.0f}" if mb > 100 else f"{mb:.1f}"

    return [
        (
            shown,
            over(name, "images", 4),
            over(name, "images", 1, 12),
            over(name, "images", 48),
            over(name, "text", 1, 12),
            megabytes(name),
        )
        for name, shown in SHOWN.items()
    ]


def cell(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    losses = [r["loss"] for r in rows]
    mean = statistics.mean(losses)
    spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
    text = f"{mean:.4f} ± {spread:.4f}"
    if base:
        text += f" ({mean / statistics.mean(r['loss'] for r in base):.3f} x)"
        if "sent_bytes" in rows[0] and "sent_bytes" in base[0]:
            text += f", {base[0]['sent_bytes'] / rows[0]['sent_bytes']:.0f} x"
    return text


if __name__ == "__main__":
    typer.run(main)
