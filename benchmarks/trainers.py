"""Do the trainers learn the same with overlap, and how much of their communication hides?

python -m benchmarks.trainers                              # all four; about 25 minutes on 2 cores
python -m benchmarks.trainers --only moe --no-pods         # one, and only its losses

For each trainer: the largest relative difference of the losses of 100 steps, plain and overlapped,
on 8 devices simulated on a CPU, in float32 and in float64, with its rows whole and in halves; and
the audit of its step, at a pod's sizes, compiled for pods of 8 and of 64 H100s. Needs no GPU.
"""

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from benchmarks import frame
from benchmarks.children import in_child
from benchmarks.frame import Row, Written, chosen, commit, conclude, sheet, write_rows
from benchmarks.pod_step import COVERAGE_COLUMNS, compile_step, coverage_cells
from jaxoverlap.search.stages import SPLIT

TRAINERS = ("gpt", "moe", "vit", "long_context")  # modules of models/
PODS = {"h100-sxm:1x8": (1, 8), "h100-sxm:8x8": (8, 8)}  # sizes of a trainer's two axes
STEPS = ("plain", "overlapped")
# Sums in another order round differently, and training lets that grow, most where it makes a
# choice (models/moe.py). In float64 it stays tiny, which the error of a wrong ring would not.
MOST = {"float32": 1e-4, "float64": 1e-10}
HALVES = (None, 2)  # parts of the batch; None: by estimate, and so one part on CPUs
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy")

console = Console(width=160)
app = frame.app()


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these trainers.")] = None,
    steps: Annotated[int, typer.Option(help="Of training; 0 leaves it out.")] = 100,
    pods: Annotated[bool, typer.Option(help="Compile for pods.")] = True,
    audits: Annotated[bool, typer.Option(help="Print every audit whole.")] = False,
    out: Written = Path("out/trainers.jsonl"),
) -> None:
    """Train and compile, plain and overlapped; exit 1 if losses part or something fails."""
    rows = []
    for job in jobs(chosen("only", only, TRAINERS), steps, pods):
        with console.status(" ".join(map(str, job.values()))):
            rows.append(job | in_child("benchmarks.trainers", json.dumps(job)))
        if audits and "audit" in rows[-1]:
            print(f"\n{job['trainer']}, {job['step']}, {job['pod']}\n{rows[-1]['audit']}")
    write_rows(out, rows)
    print_losses([row for row in rows if "dtype" in row])
    print_pods([row for row in rows if "pod" in row])
    conclude([], shortfalls(rows), console)


def jobs(trainers: Any, steps: int, pods: bool) -> list[Row]:
    """List the jobs, one child process each."""
    train = [dict(dtype=d, steps=steps, halves=h) for d in MOST for h in HALVES] if steps else []
    compile = [dict(pod=pod, step=step) for pod in PODS for step in STEPS] if pods else []
    return [{"trainer": trainer, **job} for trainer in trainers for job in (*train, *compile)]


def child(job: Row) -> Row:
    """Do one job: the row of a child process."""
    model = importlib.import_module(f"models.{job['trainer']}")
    if "pod" in job:
        sizes = zip(model.RECIPE.config.AXES, PODS[job["pod"]], strict=True)
        row = compile_step(model, job["pod"], dict(sizes), job["step"])
    else:
        row = compare(model, job["dtype"], job["steps"], job["halves"])
    return row | {
        "commit": commit(),
        "versions": {name: metadata.version(name) for name in VERSIONS},
    }


def compare(model: Any, dtype: str, steps: int, halves: int | None) -> Row:
    """Train plain and overlapped from one seed."""
    from models.trainer import train  # not where another jax is only compiled for

    jax.config.update("jax_enable_x64", dtype == "float64")
    losses = []
    for plain in (True, False):
        config = model.RECIPE.config(
            dtype=dtype, param_dtype=dtype, steps=steps, plain=plain, halves=halves
        )
        trained = train(model.RECIPE, config)
        losses.append([row["loss"] for row in trained.rows])
    args = model.RECIPE.abstract_args(config, model.RECIPE.make_mesh(config))
    plan = trained.step.explain(*args)
    why_not = (one.why_not for one in plan.trail if one.stage == SPLIT)
    apart = [abs(b - a) / abs(a) for a, b in zip(*losses, strict=True)]
    return {
        "mesh": config.mesh,
        "parts": plan.split.parts if plan.split else 0,
        "why_not": "" if plan.split else next(why_not, ""),
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
        "difference": max(apart),
        "at_step": apart.index(max(apart)) + 1,
    }


def print_losses(rows: list[Row]) -> None:
    if not rows:
        return
    words = ("trainer", "mesh", "dtype", "rows")
    numbers = ("steps", "first loss", "last loss", "largest relative difference", "at step")
    title = "losses of the plain and of the overlapped step, 8 devices on a CPU"
    table = sheet(title, (*words, *numbers), words=words)
    left: list[str] = []
    for row in rows:
        rows_in = f"{row['parts']} parts" if row.get("parts") else "whole"
        head = (row["trainer"], mesh_of(row), row["dtype"], rows_in, str(row["steps"]))
        if "error" in row:
            table.add_row(*head, row["error"])
            continue
        if row.get("why_not"):
            left.append(f"{row['trainer']}: not in {row['halves']} parts: {row['why_not']}")
        numbers = (f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}")
        table.add_row(*head, *numbers, f"{row['difference']:.1e}", str(row["at_step"]))
    console.print(table, *dict.fromkeys(left), sep="\n")


def print_pods(rows: list[Row]) -> None:
    if not rows:
        return
    words = ("trainer", "pod", "mesh", "step")
    title = "schedules of the steps at the sizes of each Config.pod"
    table = sheet(title, (*words, *COVERAGE_COLUMNS), words=words)
    plain: Row = {}
    for row in rows:
        head = (row["trainer"], row["pod"], mesh_of(row), row["step"])
        if "error" in row:
            table.add_row(*head, row["error"])
            continue
        plain = row if row["step"] == "plain" else plain
        same = (plain.get("trainer"), plain.get("pod")) == (row["trainer"], row["pod"])
        table.add_row(*head, *coverage_cells(row, plain if same else None))
    console.print(table)


def mesh_of(row: Row) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in row.get("mesh", {}).items())


def shortfalls(rows: list[Row]) -> list[str]:
    """List what went wrong, a line each."""
    problems = []
    for row in rows:
        where = f"{row['trainer']}, {row.get('dtype') or row['step'] + ' for ' + row['pod']}"
        if "error" in row:
            problems.append(f"{where}: {row['error']}")
        elif "dtype" in row and not row["difference"] <= MOST[row["dtype"]]:
            problems.append(f"{where}: losses differ by {row['difference']:.1e}")
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        app()
