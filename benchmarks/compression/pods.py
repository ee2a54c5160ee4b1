"""Simulate a 7B GPT's step on eight hosts of a slow network.

    python -m benchmarks.compression.pods rows --out rows.jsonl
    python -m benchmarks.compression.pods table rows.jsonl

Eight workers of eight GPUs with tensor parallelism inside each, a100-sxm-80:8x8@80: 80 Gbit/s a
host. Nothing runs on a GPU. Rows that the file has are not made again. `--ranks FILE` adds a row at
the ranks that the rows of `learning` have for the small GPT, scaled by rule: the same share of the
default rank for each kind of weight.
"""

from __future__ import annotations

import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame
from benchmarks.frame import Out, add_missing, read_rows
from jaxoverlap import parse_cluster, pod_mesh
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.train import compression
from models.config import Config
from models.gpt import RECIPE
from models.recipe import make_optimizer

CLUSTER, WORKERS, INSIDE = "a100-sxm-80:8x8@80", 8, 8
app = frame.app()


def config_of(layers: int, sequences: int) -> Config:
    """Return a 7B GPT in bfloat16, so many sequences a worker."""
    return Config.pod(
        data=1,
        model=INSIDE,
        layers=layers,
        batch=sequences * WORKERS,
        param_dtype="bfloat16",
        workers=WORKERS,
        compress="none",
        plain=True,
    )


def mesh_of() -> Mesh:
    return pod_mesh(CLUSTER, {"worker": WORKERS, "data": 1, "model": INSIDE})


def compiled(config: Config, sync: Any, *, in_backward: bool, settings: Any = None) -> Any:
    """Compile a step; return it, and what describes it."""
    mesh = mesh_of()
    state, _ = RECIPE.abstract_args(config, mesh)
    step = compression.data_parallel(
        jax.value_and_grad(RECIPE.make_loss(config, mesh), has_aux=True),
        make_optimizer(config),
        mesh,
        axis="worker",
        sync=sync,
        stacked=("layers",),
        in_backward=in_backward,
        overlap={"cluster": CLUSTER},
    )
    sharding = NamedSharding(mesh, P("worker"))
    like = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32, sharding=sharding)
    start = step.abstract(state["params"])
    chosen = None if settings is None else settings(step, start)
    lowered = step.lower(start, dict(inputs=like, targets=like), settings=chosen)
    return lowered.compile(compiler_options()), step, start


def row_of(config: Config, sync: Any, **options: Any) -> dict[str, Any]:
    """Return seconds and bytes of a step, simulated."""
    made, step, start = compiled(config, sync, **options)
    cluster = parse_cluster(CLUSTER)
    simulation = jaxoverlap.simulate(made.as_text(), cluster)
    groups = [c for c in jaxoverlap.audit(made).collectives if "compressed_average" in c.op_name]
    estimate = step.price(start, cost_model(CLUSTER))
    memory = made.memory_analysis()
    return dict(
        seconds=simulation.step_s,
        exposed_s=simulation.exposed_s,
        compute_s=simulation.compute_s,
        network_s=simulation.link_s["network"],
        sent_bytes=sum(c.runs * c.bytes_moved for c in groups),
        covered_bytes=sum(c.runs * c.bytes_moved for c in groups if c.covered),
        peak_bytes=memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        priced_raw_s=estimate.raw_s,
        priced_s=estimate.wire_s + estimate.arithmetic_s,
    )


@app.command()
def rows(
    out: Out,
    layers: int = 32,
    sequences: Annotated[int, typer.Option(help="Of 4096 bytes, a worker's batch.")] = 8,
    after: Annotated[
        bool, typer.Option(help="PowerSGD behind the scan too: compiles long.")
    ] = False,
    ranks: Annotated[Path | None, typer.Option(help="Rows of the learning benchmark.")] = None,
) -> None:
    """Compile the step without compression, with uniform and with L-GreCo's ranks."""
    config = config_of(layers, sequences)
    uniform, rank4 = compression.uniform, compression.power_sgd(4)
    jobs: dict[str, Any] = {
        "none": (uniform(compression.none()), dict(in_backward=False)),
        "none, in the backward scan": (
            uniform(WholeMatrices()),
            dict(in_backward=True),
        ),
        "PowerSGD 4, in the backward scan": (uniform(rank4), dict(in_backward=True)),
        "PowerSGD 32, in the backward scan": (
            uniform(compression.power_sgd(32)),
            dict(in_backward=True),
        ),
    }
    if after:
        jobs["PowerSGD 4"] = (uniform(rank4), dict(in_backward=False))
    if ranks:
        shares = shares_of(ranks)
        jobs["L-GreCo of PowerSGD 4, in the backward scan"] = (
            compression.lgreco(rank4),
            dict(in_backward=True, settings=lambda step, start: scaled(step, start, shares)),
        )
    sizes = dict(layers=layers, sequences=sequences)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        add_missing(
            out,
            [
                (dict(name=name, **sizes), partial(row_of, config, sync, **options))
                for name, (sync, options) in jobs.items()
            ],
        )
    table(out)


class WholeMatrices(type(compression.none())):
    """No compression, with a layer for each matrix all the same, to be averaged in the scan.

    Its closed form and its price are therefore not those of what it sends.
    """

    def requests(self, layer: Any, setting: Any, workers: int) -> Any:
        return [("mean", layer.size * layer.itemsize / 2)]  # counts as compressed twofold


def shares_of(path: Path) -> dict[str, float]:
    """Return the median share of the default rank that each kind of weight ended with."""
    found: dict[str, list[float]] = {}
    for row in read_rows(path):
        if row["task"] == "text" and row["sync"] == "L-GreCo" and row["compressor"] == "PowerSGD":
            for name, setting in row["settings"].items():
                kind = name.partition("[")[0]
                found.setdefault(kind, []).append(setting / row["default"])
    return {kind: statistics.median(shares) for kind, shares in found.items()}


def scaled(step: Any, start: Any, shares: dict[str, float]) -> list[int]:
    """Return the candidates that are nearest to the shares of the default rank."""
    chosen = []
    for layer in step._loop.averager(start.params).layers:
        wanted = shares[layer.name] * step.sync.compressor.rank
        candidates = step.sync.candidates(layer)
        chosen.append(int(np.argmin([abs(c - wanted) for c in candidates])))
    return chosen


@app.command()
def table(path: Path) -> None:
    """Print the rows of a file."""
    found = read_rows(path)
    sheet = Table("step", "ms", "exposed", "network", "MB sent", "peak GB", "priced: average, raw")
    for row in found:
        sheet.add_row(
            f"{row['name']} ({row['layers']} layers, {row['sequences']} sequences)",
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['exposed_s'] * 1e3:.0f}",
            f"{row['network_s'] * 1e3:.0f}",
            f"{row['sent_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            f"{row['priced_s'] * 1e3:.0f}, {row['priced_raw_s'] * 1e3:.0f}",
        )
    Console(width=120).print(sheet)


if __name__ == "__main__":
    app()
