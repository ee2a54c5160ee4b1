"""Show what a round of local updates exposes on a pod with a slow network, by simulation.

    python -m benchmarks.local_updates.pods peers --out rows.jsonl
    python -m benchmarks.local_updates.pods scale --out rows.jsonl
    python -m benchmarks.local_updates.pods table rows.jsonl

`peers`: algorithms and MaxText's forms on a100-sxm-80:16x8@80, a round of 12 steps. `scale`: tokens
a second against workers and `every`. Nothing runs on a GPU. Rows that the file has are not made
again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame
from benchmarks.frame import Job, Out, add_missing, read_rows
from benchmarks.local_updates import steps
from benchmarks.local_updates.steps import Size
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import LocalUpdates, Outer, co2, diloco, local_sgd, streaming_diloco

GBIT = 80  # a host, as the paper's slow network
EVERY = (1, 4, 12, 48)
WORKERS = (8, 16, 32, 64, 128, 512, 1024)
SIZE = Size()
app = frame.app()


def cluster_of(workers: int) -> str:
    return f"a100-sxm-80:{max(1, workers // 8)}x{min(workers, 8)}@{GBIT}"


def of_round(
    workers: int,
    outer: Outer,
    *,
    overlap: bool = True,
    shard: bool = False,
    check: bool = True,
) -> Any:
    """Compile a round."""
    cluster = cluster_of(workers)
    mesh = pod_mesh(cluster, {"data": workers})
    updates = LocalUpdates(
        steps.train_step,
        mesh,
        outer=outer,
        shard_outer=shard,
        overlap={"cluster": cluster} if overlap else False,
        check=check,
    )
    state = updates.abstract(steps.state_like(mesh, SIZE))
    lowered = updates.lower(state, steps.batch_like(mesh, SIZE, outer.every))
    return lowered.compile(compiler_options())


def of_step(
    workers: int, make: Callable[[Any], Any], arguments: Callable[[Any], Any], *, overlap: bool
) -> Any:
    """Compile a step that is not a round."""
    cluster = cluster_of(workers)
    mesh = pod_mesh(cluster, {"data": workers})
    step: Any = make(mesh)
    if overlap:
        step = jaxoverlap.overlap(step, cluster=cluster)
    return step.lower(*arguments(mesh)).compile(compiler_options())


def synchronous(workers: int, overlap: bool) -> Any:
    def arguments(mesh: Any) -> Any:
        return steps.state_like(mesh, SIZE), steps.batch_like(mesh, SIZE)

    return of_step(workers, steps.synchronous, arguments, overlap=overlap)


def measured(compiled: Any, workers: int, taken: int, **labels: Any) -> dict[str, Any]:
    """Return a row: seconds of a program, simulated, and its memory."""
    simulation = jaxoverlap.simulate(compiled.as_text(), parse_cluster(cluster_of(workers)))
    memory = compiled.memory_analysis()
    return dict(
        **labels,
        workers=workers,
        steps=taken,
        seconds=simulation.step_s,
        exposed_s=simulation.exposed_s,
        compute_s=simulation.compute_s,
        peak_bytes=memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        tokens_per_s=taken * SIZE.tokens * workers / simulation.step_s,
    )


def run(out: Path, jobs: list[Job]) -> None:
    """Make the rows that a file lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overlap says that nothing becomes a ring
        add_missing(out, jobs)
    table(out)


@app.command()
def peers(out: Out, workers: int = 128, every: int = 12) -> None:
    """Compile a round of each algorithm, and MaxText's steps, for one pod."""
    jobs: list[Job] = []

    def add(name: str, make: Callable[[], Any], taken: int) -> None:
        labels = dict(what="peers", name=name, workers=workers, every=every)
        jobs.append((labels, lambda: measured(make(), workers, taken)))

    add("AdamW, synchronous", lambda: synchronous(workers, False), 1)
    add("AdamW, synchronous, overlapped", lambda: synchronous(workers, True), 1)
    add(
        "MaxText's DiLoCo, step that averages",
        lambda: of_step(
            workers,
            lambda mesh: steps.maxtext(mesh, every),
            lambda mesh: steps.maxtext_like(mesh, SIZE),
            overlap=False,
        ),
        1,
    )
    add(
        "MaxText's streaming DiLoCo, step that averages",
        lambda: of_step(
            workers,
            lambda mesh: steps.maxtext_streaming(mesh, every, every // 2, 0.5),
            lambda mesh: steps.maxtext_like(mesh, SIZE, 2),
            overlap=False,
        ),
        1,
    )
    rounds = {
        "LocalSGD": local_sgd(every=every),
        "DiLoCo": diloco(every=every),
        "DiLoCo, a round late": diloco(every=every, delay=1),
        "streaming DiLoCo": streaming_diloco(every=every, fragments=2, delay=every // 2),
        "CO2": co2(every=every),
    }
    for name, outer in rounds.items():
        add(name, lambda outer=outer: of_round(workers, outer), every)
    add("CO2, XLA's order", lambda: of_round(workers, co2(every=every), overlap=False), every)
    add(
        "CO2, outer state scattered", lambda: of_round(workers, co2(every=every), shard=True), every
    )
    run(out, jobs)


@app.command()
def scale(out: Out, workers: list[int] | None = None) -> None:
    """Compile rounds of CO2 and steps of AdamW for pods of all sizes."""
    jobs: list[Job] = []
    for count in workers or WORKERS:
        labels = dict(what="scale", name="AdamW, synchronous", workers=count, every=0)
        jobs.append((labels, lambda count=count: measured(synchronous(count, True), count, 1)))
        for every in EVERY:
            labels = dict(what="scale", name="CO2", workers=count, every=every)
            jobs.append(
                (
                    labels,
                    lambda count=count, every=every: measured(
                        of_round(count, co2(every=every), check=False), count, every
                    ),
                )
            )
    run(out, jobs)


@app.command()
def table(path: Path) -> None:
    """Print the rows of a file."""
    rows = read_rows(path)
    sheet = Table("program", "ms", "exposed ms", "a step", "peak GB", title="on one pod")
    for row in (r for r in rows if r["what"] == "peers"):
        ms = row["seconds"] * 1e3
        a_step, peak = ms / row["steps"], row["peak_bytes"] / 1e9
        cells = (f"{ms:.1f}", f"{row['exposed_s'] * 1e3:.1f}", f"{a_step:.1f}", f"{peak:.1f}")
        sheet.add_row(row["name"], *cells)
    Console().print(sheet)
    found = {(r["every"], r["workers"]): r["tokens_per_s"] for r in rows if r["what"] == "scale"}
    if not found:
        return
    workers = sorted({w for _, w in found})
    sheet = Table("thousand tokens/s", *map(str, workers), title="on 8 to 1024 GPUs")
    for every in sorted({e for e, _ in found}):
        name = f"CO2, every {every}" if every else "AdamW, synchronous"
        cells = (f"{found[every, w] / 1e3:.0f}" if (every, w) in found else "-" for w in workers)
        sheet.add_row(name, *cells)
    Console().print(sheet)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    app()
