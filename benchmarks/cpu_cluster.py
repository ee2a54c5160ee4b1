"""Compare simulated with measured train steps on this machine, as a cluster of CPU devices.

python -m benchmarks.cpu_cluster                 # calibrates and times the trainers; minutes

The trainers' steps, plain and overlapped, run on eight simulated CPU devices. What `python -m
jaxoverlap.calibrate --here` measures is measured in the same minutes, round by round, and each step
is held against its simulation by those tables. Nothing is fitted to a trainer's step. Let nothing
else run on the machine meanwhile.
"""

import datetime
import importlib
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.frame import Row, Written, chosen, conclude, provenance, sheet, write_rows
from benchmarks.trainers import TRAINERS
from jaxoverlap.calibrate import calibrate, this_machine
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.model import CostModel

DEVICES = 8
RUNS = 3  # of each step in a round of the calibration
MOST_ERROR = 0.15

console = Console(width=160)
app = frame.app()


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these trainers.")] = None,
    out: Written = Path("out/cpu_cluster.jsonl"),
) -> None:
    """Calibrate, time and compare; exit 1 if a prediction is further off than it may be."""
    trainers = chosen("only", only, TRAINERS)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    with console.status("") as status:
        steps = []
        for trainer in trainers:
            for how in ("plain", "overlapped"):
                status.update(f"compiling {trainer}, {how}")
                steps.append(compile_step(trainer, how))
        tables = this_machine.tables_here(
            datetime.date.today().isoformat(),
            status.update,
            each_round=lambda: [step.time() for step in steps],
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    table = out.with_name("cpu_cluster_tables.json")
    calibrate.write(tables, table)
    rows = [step.row(cost_model(table=table)) for step in steps]
    write_rows(out, rows)
    report(rows)


@dataclass
class Step:
    """A trainer's compiled step, with what it runs on, and how long its runs took."""

    trainer: str
    how: str
    compiled: Any
    state: Any
    batch: Any
    taken: list[float] = field(default_factory=list)

    def time(self) -> None:
        """Run a few times."""
        for _ in range(RUNS):
            began = time.perf_counter()
            self.state, _ = jax.block_until_ready(self.compiled(self.state, self.batch))
            self.taken.append(time.perf_counter() - began)

    def row(self, cost: CostModel) -> Row:
        """Measured and simulated seconds."""
        simulation = jaxoverlap.simulate(self.compiled.as_text(), cost)
        return {
            "trainer": self.trainer,
            "step": self.how,
            **provenance(),
            "runs": len(self.taken),
            "measured_s": statistics.median(self.taken),
            "fastest_s": min(self.taken),
            "slowest_s": max(self.taken),
            "step_s": simulation.step_s,
            "compute_s": simulation.compute_s,
            "communication_s": simulation.communication_s,
            "unknown": simulation.unknown,
        }


def compile_step(trainer: str, how: str) -> Step:
    model = importlib.import_module(f"models.{trainer}")
    config = model.RECIPE.config(dtype="float32", param_dtype="float32")
    mesh = model.RECIPE.make_mesh(config)
    function: Any = model.RECIPE.make_step(config, mesh)
    if how == "overlapped":
        function = jaxoverlap.overlap(function)
    state, batch = model.RECIPE.init_state(config, mesh, 0), model.RECIPE.batches(config)(0)
    compiled = function.lower(state, batch).compile()
    batch = jax.device_put(batch, model.RECIPE.batch_shardings(config, mesh))
    state, _ = jax.block_until_ready(compiled(state, batch))
    return Step(trainer, how, compiled, state, batch)


def report(rows: list[Row]) -> None:
    numbers = ("measured", "fastest", "slowest", "predicted", "compute", "communication", "off")
    words = ("trainer", "step")
    table = sheet(f"train steps on {DEVICES} CPU devices; ms", (*words, *numbers), words=words)
    keys = ("measured_s", "fastest_s", "slowest_s", "step_s", "compute_s", "communication_s")
    short = []
    for row in rows:
        head = row["trainer"], row["step"]
        off = row["step_s"] / row["measured_s"] - 1
        table.add_row(*head, *(f"{row[key] * 1e3:.1f}" for key in keys), f"{off:+.0%}")
        if abs(off) > MOST_ERROR:
            short.append(f"{' '.join(head)}: {off:+.0%}, more than {MOST_ERROR:.0%}")
    console.print(table)
    conclude([], short, console)


if __name__ == "__main__":
    app()
