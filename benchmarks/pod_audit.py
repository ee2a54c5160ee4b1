"""Audit how much of a GPT step's communication hides on XLA's own schedule for a pod of GPUs.

python -m benchmarks.pod_audit                                  # the installed jax, both pods
python -m benchmarks.pod_audit --jax 0.11.2 --jax 0.12.0.1      # each in an environment of its own

Four scanned layers at hidden 4096 and sequence 4096, bf16, with remat: plain as XLA compiles it by
default, plain with the options that overlapped steps get, and overlapped. Needs no GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.pod_step import (
    COVERAGE_COLUMNS,
    STEPS,
    compile_step,
    coverage_cells,
    in_child,
    write_rows,
)

PODS = {"h100-sxm:1x8": {"data": 1, "model": 8}, "h100-sxm:8x8": {"data": 8, "model": 8}}
PACKAGES = ("flax", "msgspec", "optax", "rich", "typer")
MIN_HOPS_COVERED, MAX_TEMP_RATIO = 0.90, 1.15  # what an overlapped step has to keep

console = Console(width=160)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    versions: Annotated[
        list[str] | None, typer.Option("--jax", help="A jax version; default: the installed one.")
    ] = None,
    pod: Annotated[list[str] | None, typer.Option(help="Only these pods.")] = None,
    audits: Annotated[bool, typer.Option(help="Print every audit whole.")] = True,
    out: Annotated[Path, typer.Option(help="Where rows go, as JSON lines.")] = Path(
        "out/pod_audit.jsonl"
    ),
) -> None:
    """Compile, audit and compare; exit 1 if an overlapped step falls short."""
    rows = []
    for version in versions or [jax.__version__]:
        python = environment(version)
        for name in pod or PODS:
            for step in STEPS:
                with console.status(f"jax {version}: {step} step for {name}"):
                    row = in_child("benchmarks.pod_audit", name, step, python=python)
                    rows.append({"pod": name, "step": step, **row})
                show(rows[-1], audits)
    write_rows(out, rows)
    print_rows(rows)
    if problems := shortfalls(rows):
        console.print("\n".join(problems))
        raise typer.Exit(1)
    console.print(
        f"every overlapped step: at least {MIN_HOPS_COVERED:.0%} of its hops covered, none "
        f"synchronous, temp memory at most {MAX_TEMP_RATIO} times plain's"
    )


def environment(version: str) -> str:
    """The Python that has this jax: this one, or one in an environment made under out/."""
    if version == jax.__version__:
        return sys.executable
    folder = Path("out/environments") / f"jax-{version}"
    python = folder / "bin" / "python"
    stamp = folder / "finished"  # written last: an install that was cut short starts again
    if not stamp.exists():
        with console.status(f"installing jax {version} into {folder}"):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            jax_itself = f"jax[cuda12-local]=={version}"
            install = [python, "-m", "pip", "install", "--quiet", jax_itself, *PACKAGES]
            subprocess.run(install, check=True)
            stamp.touch()
    return str(python)


def child(pod: str, step: str) -> dict[str, Any]:
    """Compile one step: the row of a child process."""
    from models import gpt

    return compile_step(gpt, pod, PODS[pod], step)


def show(row: dict[str, Any], audits: bool) -> None:
    if "error" in row:
        console.print(f"{row['step']} step for {row['pod']}: {row['error']}")
    elif audits:
        print(f"\n{row['step']} step for {row['pod']}, jax {row['jax']}\n{row['audit']}")


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(title="4-layer GPT step, hidden 4096, sequence 4096, bf16, remat")
    for name in ("jax", "pod", "step"):
        table.add_column(name)
    for name in COVERAGE_COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row("", row["pod"], row["step"], row["error"])
            continue
        cells = coverage_cells(row, plain_of(rows, row))
        table.add_row(row["jax"], row["pod"], row["step"], *cells)
    console.print(table)


def plain_of(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """The plain row of the same pod and jax; the row itself if that one failed."""
    same = [r for r in rows if r["step"] == "plain" and r["pod"] == row["pod"] and "error" not in r]
    return next((r for r in same if r["jax"] == row["jax"]), row)


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    """List what an overlapped step has to keep and does not, a line each."""
    problems = [
        f"{r['step']} step for {r['pod']} failed: {r['error']}" for r in rows if "error" in r
    ]
    for row in rows:
        if row["step"] != "overlapped" or "error" in row:
            continue
        where = f"jax {row['jax']}, {row['pod']}"
        hops, plain = row["hops"], plain_of(rows, row)
        if hops["covered"] < MIN_HOPS_COVERED * hops["count"] or not hops["count"]:
            problems.append(f"{where}: {hops['covered']} of {hops['count']} hops covered")
        if hops["synchronous"]:
            problems.append(f"{where}: {hops['synchronous']} hops are synchronous")
        if row["temp_bytes"] > MAX_TEMP_RATIO * plain["temp_bytes"]:
            problems.append(f"{where}: temp memory {row['temp_bytes']} of {plain['temp_bytes']}")
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        app()
