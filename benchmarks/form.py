"""Does the form of `jaxoverlap configure` say what the trainers' steps do?

python -m benchmarks.form                 # all cases: about a minute each on 2 cores
python -m benchmarks.form --only llama    # those of one model
python -m benchmarks.form --dry           # the form's side alone, in seconds

Small models on several meshes each, by the form and by simulation of the trainers' own overlapped
step as XLA compiles it for the pod. Nothing was timed on a GPU, and none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import frame
from benchmarks.children import import_first, in_fork
from jaxoverlap._util.text import table
from jaxoverlap.cli.configure_model import simulate_one
from jaxoverlap.cost.find import cost_or_data_sheet
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import peak
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.stack import JAX

TRAINER = "models.configured:build"
CHILD_S = 900

app = frame.app()


def _model(name: str, **changes: Any) -> Transformer:
    sizes: dict[str, Any] = dict(
        layers=4, hidden=4096, heads=32, mlp=16384, sequence=4096, vocab=32000
    )
    return Transformer(name=name, biases=False, **{**sizes, **changes})


_LLAMA: dict[str, Any] = dict(kv_heads=8, mlp=14336, gated=True, tied=False)
MODELS = (
    _model("gpt"),
    _model("llama", **_LLAMA),
    _model("mixtral", **_LLAMA, experts=8, choices=2),
    _model("wide", layers=2, hidden=8192, heads=64, mlp=28672, kv_heads=8, gated=True),
)


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    model: Transformer
    configuration: Configuration
    pod: str = "h100-sxm:1x8"
    batch: int = 16

    def predicted(self) -> tuple[float, float]:
        """The form's seconds of a step and bytes of a device."""
        cluster, config = parse_cluster(self.pod), self.configuration
        times = IterationTime(self.model, cost_or_data_sheet(cluster), JAX, global_batch=self.batch)
        seconds = times.terms(config, place(config, cluster)).step_s
        return seconds, peak(self.model, config, JAX, self.batch).total

    def simulated(self) -> dict[str, Any]:
        """The same of the trainer's step, compiled for the pod; {"error"} if that failed."""
        return in_fork(_simulated, self, timeout_s=CHILD_S)


def _simulated(case: Case) -> dict[str, Any]:
    seconds, size, _ = simulate_one(
        TRAINER, case.model, case.configuration, AXES, case.batch, case.pod
    )
    return {"seconds": seconds, "bytes": size}


def cases() -> Iterator[Case]:
    """The legal ones of a grid: each model on the same meshes, in one micro-batch or several."""
    meshes: tuple[dict[str, Any], ...] = (
        dict(fsdp=8), dict(data=8), dict(data=2, fsdp=4), dict(fsdp=2, model=4), dict(model=8),
        dict(data=4, model=2), dict(fsdp=4, context=2), dict(pipeline=2, fsdp=4),
        dict(pipeline=2, model=4), dict(pipeline=2, data=4), dict(data=2, expert=4),
        dict(expert=4, model=2),
    )  # fmt: skip
    for model in MODELS:
        for axes in meshes:
            split = Configuration(**axes, overlap=True)
            here = 16 // split.batch_ways
            micro_batch = max(here // 4, 1) if split.pipeline > 1 else here
            config = replace(
                split, micro_batch=micro_batch, sequence_parallel=split.model > 1,
                zero_stage=1 if split.data > 1 else 0,
            )  # fmt: skip
            if not config.illegal(model, 16, JAX):
                yield Case(model, config)


@dataclass(frozen=True)
class Outcome:
    """A case by the form, and by simulation; an error if it did not compile."""

    case: Case
    predicted_s: float
    predicted_bytes: float
    simulated_s: float = math.nan
    simulated_bytes: float = math.nan
    error: str = ""

    def row(self) -> tuple[str, ...]:
        """The outcome as a row of the table."""
        ratio = self.predicted_s / self.simulated_s
        off = "" if math.isnan(ratio) else f"{ratio - 1:+.1%}"
        return (
            self.case.model.name, str(self.case.configuration), f"{self.predicted_s * 1e3:.1f}",
            self.error[:60] or f"{self.simulated_s * 1e3:.1f}", off,
            f"{self.predicted_bytes / 1e9:.1f}", f"{self.simulated_bytes / 1e9:.1f}",
        )  # fmt: skip


def outcome(case: Case, *, dry: bool = False) -> Outcome:
    """Estimate a case, and simulate it unless `dry`."""
    seconds, size = case.predicted()
    row = {} if dry else case.simulated()
    simulated = row.get("seconds", math.nan), row.get("bytes", math.nan)
    return Outcome(case, seconds, size, *simulated, error=row.get("error", ""))


@app.command()
def main(
    only: Annotated[str | None, typer.Option(help="The cases of this model.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Compile nothing.")] = False,
) -> None:
    """Print predicted and simulated, the mean error, and what the form's choices lose."""
    import_first(["jax", "jaxoverlap", "models.configured"])
    found = list[Outcome]()
    for case in cases():
        if only in (None, case.model.name):
            found.append(outcome(case, dry=dry))
            print(*found[-1].row(), flush=True)
    columns = ("model", "configuration", "form ms", "simulated ms", "off", "GB", "GB, compiled")
    title = "The form and the trainers' steps on eight H100s"
    print(table(title, columns, [one.row() for one in found], right=columns[2:]))
    done = [one for one in found if not math.isnan(one.simulated_s)]
    if done:
        off = np.array([one.predicted_s / one.simulated_s - 1 for one in done])
        memory = np.array([one.predicted_bytes / one.simulated_bytes - 1 for one in done])
        print(f"mean error {abs(off).mean():.1%} of time, {abs(memory).mean():.1%} of memory")
    for name in dict.fromkeys(one.case.model.name for one in done):
        mine = [one for one in done if one.case.model.name == name]
        chosen = min(mine, key=lambda one: one.predicted_s).simulated_s
        best = min(one.simulated_s for one in mine)
        print(f"{name}: the first choice is {chosen / best - 1:.1%} slower than the best simulated")


if __name__ == "__main__":
    app()
