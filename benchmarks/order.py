"""Does the form of `jaxoverlap configure` order meshes as the simulator does?

python -m benchmarks.order                    # ten models, the form's top three: 40 min on 2 cores
python -m benchmarks.order --only 7b-h100-8   # one of them
python -m benchmarks.order --dry              # the form's lists alone, in seconds

Each model of the pods' suite keeps its pod, depth and batch; the form ranks the meshes of the two
axes that it takes. The first three are overlapped, compiled by XLA's GPU compiler and simulated:
nothing was timed on a GPU. Exit 1 if fewer than eight lists agree. Needs no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.frame import Only, Written, chosen, conclude, in_ms, rows_in, sheet, write_rows
from benchmarks.pods.child import measure
from benchmarks.pods.names import SCHEDULED
from benchmarks.pods.suite import STEPS, Step
from jaxoverlap.cost.find import cost_or_data_sheet
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import peak
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import place
from jaxoverlap.parallelism.stack import JAX

TOP = 3
ASKED = 8  # lists of ten that are to agree
CHILD_S = 1200
# The suite's models write attention as einsums, which compute all scores and keep them.
EINSUMS = replace(JAX, name="JAX, attention as einsums", fused_attention=False, causal=False)
_AXES = {"fsdp": "fsdp", "tp": "model", "data": "fsdp", "model": "model", "expert": "expert",
         "context": "context"}  # fmt: skip

console = Console(width=160)
app = frame.app()


@dataclass(frozen=True)
class Ranked:
    """A mesh by the form: its axes, as the step names them, and its seconds."""

    axes: dict[str, int]
    step_s: float

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items())


def described(step: Step) -> tuple[Transformer, int]:
    """A step of the suite as the form takes it: the model, and sequences of a step."""
    if step.gpt is not None:
        g = step.gpt
        model = Transformer(
            name="GPT", layers=g.layers, hidden=g.hidden, heads=g.heads, mlp=g.mlp, vocab=g.vocab,
            sequence=g.sequence, biases=False, tied=False,
        )  # fmt: skip
        return model, g.batch
    config = config_of(step)
    model = Transformer(
        name=step.model,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        mlp=config.mlp,
        vocab=getattr(config, "vocab", 0) or config.classes,
        sequence=getattr(config, "sequence", 0) or config.patches,
        experts=getattr(config, "experts", 0),
        choices=getattr(config, "choices", 0),
        biases=False,
    )
    return model, config.batch


def config_of(step: Step) -> Any:
    """The sizes of a step of models/, on the mesh that the suite has."""
    return importlib.import_module(f"models.{step.model}").RECIPE.config.pod(
        **step.axes, **step.changes
    )


def ranked(step: Step) -> list[Ranked]:
    """The meshes of a step's two axes that are legal and fit, fastest first by the form."""
    cluster = parse_cluster(step.pod)
    model, batch = described(step)
    times = IterationTime(model, cost_or_data_sheet(cluster), EINSUMS, global_batch=batch)
    budget = cluster.chip.memory_bytes / EINSUMS.reserve
    found = []
    for axes in meshes(step, cluster.num_devices):
        config = configuration(axes, batch)
        if (
            config is None
            or config.illegal(model, batch)
            or peak(model, config, EINSUMS, batch).total > budget
        ):
            continue
        found.append(Ranked(axes, times.terms(config, place(config, cluster)).step_s))
    return sorted(found, key=lambda mesh: mesh.step_s)


def meshes(step: Step, devices: int) -> Iterator[dict[str, int]]:
    """Yield sizes of a step's two axes, of which the second is a power of two."""
    first, second = step.axes
    size = 1
    while devices % size == 0:
        yield {first: devices // size, second: size}
        size *= 2


def configuration(axes: dict[str, int], batch: int) -> Configuration | None:
    """A mesh as the form takes it: each layer recomputed, one micro-batch; None if it does not fit.

    Weights lie over both axes in the suite's models; the form splits them over fsdp and model.
    """
    sizes: dict[str, Any] = {_AXES[axis]: size for axis, size in axes.items()}
    shards = sizes["fsdp"] * sizes.get("expert", 1)
    if batch % shards:
        return None
    return Configuration(
        **sizes,
        micro_batch=batch // shards,
        recompute="full",
        sequence_parallel=sizes.get("model", 1) > 1,
        overlap=True,
    )


def on(step: Step, axes: dict[str, int]) -> Step:
    """A step on another mesh, with the batch and the experts that it has on its own."""
    changes = dict(step.changes)
    if step.gpt is None:
        config = config_of(step)
        changes["batch"] = config.batch
        if hasattr(config, "experts"):
            changes["experts"] = config.experts
    return replace(step, axes=axes, changes=changes)


def measured(name: str, axes: dict[str, int]) -> dict[str, Any]:
    """Overlap, compile and simulate a step of the suite on another mesh."""
    return measure(on(STEPS[name], axes), SCHEDULED)


@app.command()
def main(
    only: Only = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the form's lists; compile no step.")] = (
        False
    ),
    out: Written = Path("out/order.jsonl"),
) -> None:
    """Rank, compile the first three and compare."""
    lists = {name: ranked(STEPS[name])[:TOP] for name in chosen("only", only, STEPS)}
    rows = rows_in(out)
    if not dry:
        import_first(["benchmarks.order"])
        for name, of_step in lists.items():
            for mesh in of_step:
                made = in_fork(measured, name, mesh.axes, timeout_s=CHILD_S)
                rows[name, str(mesh)] = {
                    "step": name,
                    "row": str(mesh),
                    "form_s": mesh.step_s,
                    **{k: v for k, v in made.items() if k != "by_line"},
                }
                console.print(
                    f"{name}, {mesh}: {in_ms(made.get('step_s'))} {made.get('error', '')}"
                )
                write_rows(out, rows.values())
    console.print(table(lists, rows))
    if not dry:
        agreeing = [name for name, of_step in lists.items() if agrees(name, of_step, rows)]
        line = f"{len(agreeing)} of {len(lists)} lists agree in order"
        conclude([line], [line] if len(agreeing) < min(ASKED, len(lists)) else [], console)


def agrees(name: str, of_step: Sequence[Ranked], rows: dict[tuple[str, str], Any]) -> bool:
    """Whether the simulated seconds of a list rise as the form's do; not if one is missing."""
    seconds = [rows.get((name, str(mesh)), {}).get("step_s") for mesh in of_step]
    return None not in seconds and seconds == sorted(seconds)


def table(lists: dict[str, list[Ranked]], rows: dict[tuple[str, str], Any]) -> Table:
    """Make a table with a line a mesh."""
    columns = ("step", "mesh", "form ms", "simulated ms", "agree")
    title = "the first three meshes by the form, and by simulation of overlapped steps"
    grid = sheet(title, columns, words=("step", "mesh", "agree"))
    for name, of_step in lists.items():
        for number, mesh in enumerate(of_step):
            simulated = rows.get((name, str(mesh)), {}).get("step_s")
            first = number == 0
            done = first and simulated is not None
            word = ("yes" if agrees(name, of_step, rows) else "no") if done else ""
            grid.add_row(
                name if first else "", str(mesh), in_ms(mesh.step_s), in_ms(simulated), word,
                end_section=number == len(of_step) - 1,
            )  # fmt: skip
    return grid


if __name__ == "__main__":
    app()
