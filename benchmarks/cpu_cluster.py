"""Does the simulator tell what a train step takes on this machine, as a cluster of CPU devices?

python -m benchmarks.cpu_cluster                 # calibrates, then times the trainers; minutes

`python -m jaxoverlap.calibrate --here` measures eight simulated CPU devices; then each trainer's
step runs on them, plain and overlapped, and is held against its simulation by those tables. Let
nothing else run on the machine meanwhile: predicted and measured are minutes apart.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks.pod_step import in_child, provenance, write_rows
from benchmarks.trainers import TRAINERS
from jaxoverlap.cost import cost_model

DEVICES, RUNS = 8, 15
MOST_ERROR = 0.15

Row = dict[str, Any]
console = Console(width=160)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these trainers.")] = None,
    table: Annotated[Path | None, typer.Option(help="Tables, if measured already.")] = None,
    out: Annotated[Path, typer.Option(help="Where rows go, as JSON lines.")] = Path(
        "out/cpu_cluster.jsonl"
    ),
) -> None:
    """Calibrate, time and compare; exit 1 if a prediction is further off than it may be."""
    if unknown := set(only or ()) - set(TRAINERS):
        raise typer.BadParameter(f"--only {', '.join(unknown)}: expected {', '.join(TRAINERS)}")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    if table is None:
        table = out.with_name("cpu_cluster_tables.json")
        table.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "jaxoverlap.calibrate", "--here", str(table)]
        subprocess.run(command, check=True)
    rows = []
    for trainer in only or TRAINERS:
        for step in ("plain", "overlapped"):
            with console.status(f"{trainer}, {step}"):
                row = in_child("benchmarks.cpu_cluster", trainer, step, str(table))
            rows.append({"trainer": trainer, "step": step, **row})
    write_rows(out, rows)
    report(rows)


def child(trainer: str, step: str, table: str) -> Row:
    """Time a step, and simulate it."""
    model = importlib.import_module(f"models.{trainer}")
    config = model.RECIPE.config(dtype="float32", param_dtype="float32")
    mesh = model.RECIPE.make_mesh(config)
    function: Any = model.RECIPE.make_step(config, mesh)
    if step == "overlapped":
        function = jaxoverlap.overlap(function)
    state, batch = model.RECIPE.init_state(config, mesh, 0), model.RECIPE.batches(config)(0)
    compiled = function.lower(state, batch).compile()
    batch = jax.device_put(batch, model.RECIPE.batch_shardings(config, mesh))
    taken = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, batch))
        taken.append(time.perf_counter() - began)
    simulation = jaxoverlap.simulate(compiled.as_text(), cost_model(table=table))
    return {
        **provenance(),
        "measured_s": statistics.median(taken[1:]),
        "fastest_s": min(taken[1:]),
        "step_s": simulation.step_s,
        "compute_s": simulation.compute_s,
        "communication_s": simulation.communication_s,
        "unknown": simulation.unknown,
    }


def report(rows: list[Row]) -> None:
    table = Table(title=f"train steps on {DEVICES} CPU devices; ms")
    table.add_column("trainer")
    table.add_column("step")
    for name in ("measured", "fastest", "predicted", "compute", "communication", "off"):
        table.add_column(name, justify="right")
    short = []
    for row in rows:
        head = row["trainer"], row["step"]
        if "error" in row:
            table.add_row(*head, row["error"])
            short.append(f"{' '.join(head)}: {row['error']}")
            continue
        names = ("measured_s", "fastest_s", "step_s", "compute_s", "communication_s")
        off = row["step_s"] / row["measured_s"] - 1
        table.add_row(*head, *(f"{row[n] * 1e3:.1f}" for n in names), f"{off:+.0%}")
        if abs(off) > MOST_ERROR:
            short.append(f"{' '.join(head)}: {off:+.0%}, more than {MOST_ERROR:.0%}")
    console.print(table)
    if short:
        console.print("\n".join(short))
        raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        app()
