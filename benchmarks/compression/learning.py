"""Compare what compressed training learns: held-out losses on real data, several seeds.

    python -m benchmarks.compression.learning --task images --out rows.jsonl
    python -m benchmarks.compression.learning --task text --out rows.jsonl
    python -m benchmarks.compression.learning --table rows.jsonl

A row is a run: the loss on what was held out, and the bytes that a worker sent in all. Rows that
the file has already are not run again. `--steps` shortens the runs.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Job, MaybeOut, Shown, add_missing, read_rows, shown_or_out
from benchmarks.local_updates.learning import held_out_loss, make_step, rounds, start
from benchmarks.local_updates.tasks import FASHION, Task, images, mesh_of, text
from jaxoverlap.train import LocalUpdates, co2
from jaxoverlap.train import compression as c

WORKERS, SEEDS, OUTER_EVERY = 4, 3, 12
COMPRESSORS: dict[str, Any] = dict(PowerSGD=c.power_sgd(4), QSGD=c.qsgd(4), TopK=c.top_k(0.01))
EQUAL: dict[str, Any] = {"PowerSGD 3": c.power_sgd(3)}  # about the bytes of L-GreCo's on PowerSGD
# The first tenth of the steps goes raw with these.
GENTLE: dict[str, Any] = {"PowerSGD 16": c.power_sgd(16), "TopK 10%": c.top_k(0.1)}
OUTER: dict[str, Any] = {
    "none": None,
    "int4": c.uniform(c.qsgd(4, error_feedback=True)),
    "PowerSGD": c.uniform(c.power_sgd(4)),
    "L-GreCo, PowerSGD": c.lgreco(c.power_sgd(4), every=12, accumulate=6, beside=1),
}


def syncs(steps: int) -> dict[tuple[str, str], Any]:
    """Return the synchronisations that are compared, by name and compressor."""
    every = max(steps // 6, 10)
    found: dict[tuple[str, str], Any] = {("none", "none"): c.uniform(c.none())}
    when: dict[str, Any] = dict(every=every, accumulate=10, beside=2)
    for name, compressor in COMPRESSORS.items():
        found["uniform", name] = c.uniform(compressor)
        found["L-GreCo", name] = c.lgreco(compressor, **when)
    found |= {("uniform", name): c.uniform(compressor) for name, compressor in EQUAL.items()}
    for name, compressor in GENTLE.items():
        found["uniform", name] = c.uniform(compressor, start=steps // 10)
        found["L-GreCo", name] = c.lgreco(compressor, start=steps // 10, **when)
    # The low end is above the least rank, so that the programme has something to choose there.
    switch = c.accordion(COMPRESSORS["PowerSGD"], low=4, high=8, **when)
    found["Accordion", "PowerSGD"] = switch
    both = c.lgreco(switch, **when)
    found["L-GreCo on Accordion", "PowerSGD"] = both
    return found


def run(task: Task, seed: int, sync: Any) -> dict[str, Any]:
    """Train by data parallelism; return the loss, and what was sent at which settings."""
    mesh = mesh_of(WORKERS)
    loss = task.loss(mesh)
    step = c.data_parallel(
        jax.value_and_grad(loss),
        task.optimizer(),
        mesh,
        axis="worker",
        sync=replace(sync, seed=seed),
        stacked=("layers",) if task.name == "text" else (),
    )
    state, sent = step.init(task.new_params(seed)), 0.0
    uncompressed = c.data_parallel(
        jax.value_and_grad(loss), task.optimizer(), mesh, axis="worker", sync=c.uniform(c.none())
    )
    for batch in islice(task.batches(seed), task.steps):
        state, _ = step(state, batch)
        sent += step.sent_bytes(state)
    step.check()
    averager = step._loop.averager(state.params)
    averager_now = averager.at(np.asarray(state.control.settings))
    settings = averager_now.settings
    layers = [layer.name for layer in averager.layers]
    return dict(
        loss=held_out_loss(task, jax.device_get(state.params)),
        sent_bytes=sent,
        raw_bytes=uncompressed.sent_bytes(uncompressed.init(task.new_params(seed))) * task.steps,
        settings=dict(zip(layers, settings, strict=True)),
        default=sync.compressor.setting,
        layer_bytes=sum(map(averager_now.layer_bytes, range(len(layers)))),
        uniform_bytes=sum(map(averager.layer_bytes, range(len(layers)))),
    )


def run_outer(task: Task, seed: int, sync: Any) -> dict[str, Any]:
    """Train by CO2, its outer gradients compressed."""
    mesh = mesh_of(WORKERS)
    updates = LocalUpdates(
        make_step(task, mesh),
        mesh,
        axis="worker",
        outer=co2(every=OUTER_EVERY, momentum=0.2),
        sync=sync,
        stacked=("layers",) if task.name == "text" and sync else (),
        overlap=False,
    )
    state, sent, taken = updates.init(start(task, seed)), 0.0, 0
    for batches in rounds(task, seed, OUTER_EVERY):
        state, _ = updates.round(state, batches)
        sent, taken = sent + (updates.sent_bytes(state) if sync else 0.0), taken + 1
    params = jax.device_get(updates.params(state))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    uncompressed = 2 * (WORKERS - 1) / WORKERS * 4 * size * taken
    return dict(
        loss=held_out_loss(task, params), sent_bytes=sent or uncompressed, raw_bytes=uncompressed
    )


def main(
    task: Annotated[str, typer.Option(help="images or text.")] = "images",
    out: MaybeOut = None,
    folder: Annotated[Path, typer.Option(help="Where Fashion-MNIST lies.")] = FASHION,
    steps: Annotated[int | None, typer.Option(help="Of a run; the task's own if none.")] = None,
    seeds: int = SEEDS,
    only: Annotated[str, typer.Option(help="Part of the names of what is run.")] = "",
    shown: Shown = None,
) -> None:
    out = shown_or_out(shown, out, show)
    jax.config.update("jax_num_cpu_devices", WORKERS)
    what = images(folder) if task == "images" else text()
    what = replace(what, steps=steps or what.steps)
    jobs: list[Job] = []
    for seed in range(seeds):
        named = dict(task=what.name, seed=seed, steps=what.steps)
        for (sync, compressor), made in syncs(what.steps).items():
            labels = {**named, "sync": sync, "compressor": compressor}
            jobs.append((labels, partial(run, what, seed, made)))
        for compressor, made in OUTER.items() if task == "text" else ():
            labels = {**named, "sync": "co2", "compressor": compressor}
            jobs.append((labels, partial(run_outer, what, seed, made)))
    wanted = [job for job in jobs if only in f"{job[0]['sync']}, {job[0]['compressor']}"]
    add_missing(out, wanted, timed=True)
    show(out)


def show(path: Path) -> None:
    """Print losses with their spread, and how many times fewer bytes were sent."""
    found = read_rows(path)
    for name, steps in dict.fromkeys((r["task"], r["steps"]) for r in found):
        sheet = Table(
            "", "held-out loss", "over none", "bytes: raw / sent", "uniform / these",
            title=f"{name}, {steps} steps, {WORKERS} workers",
        )  # fmt: skip
        matching = [r for r in found if (r["task"], r["steps"]) == (name, steps)]
        for sync, compressor in dict.fromkeys((r["sync"], r["compressor"]) for r in matching):
            base_of = ("co2", "none") if sync == "co2" else ("none", "none")
            these, base, uniform = (
                [r for r in matching if (r["sync"], r["compressor"]) == which]
                for which in ((sync, compressor), base_of, ("uniform", compressor))
            )
            losses = [r["loss"] for r in these]
            spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
            mean = statistics.mean(losses)
            over = mean / statistics.mean(r["loss"] for r in base) if base else float("nan")
            factor = np.mean([r["raw_bytes"] / r["sent_bytes"] for r in these])
            sent = np.mean([r["sent_bytes"] for r in these])
            gain = np.mean([r["sent_bytes"] for r in uniform]) / sent if uniform else float("nan")
            sheet.add_row(
                f"{sync}, {compressor} ({len(losses)})",
                f"{mean:.4f} ± {spread:.4f}",
                f"{over:.3f}",
                f"{factor:.1f}",
                "" if np.isnan(gain) else f"{gain:.2f}",
            )
        Console(width=110).print(sheet)


if __name__ == "__main__":
    typer.run(main)
