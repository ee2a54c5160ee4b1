"""Audit the exposed communication of a 7B GPT step, with few, some and all constraints written.

python -m benchmarks.prototype                        # six compiles; about 4 minutes on 2 cores
python -m benchmarks.prototype --only everywhere      # or weights, or megatron

Three ways to write the same train step of benchmarks/plain_gpt.py (32 scanned layers, hidden 4096,
sequence 4096, batch 64, remat, Adam) for eight hosts of eight H100s, fsdp 8 x tp 8: plain, as XLA
compiles it by default, and overlapped. Beside the audit stands benchmarks/yardstick.py's measure,
and what an overlapped step is to reach on it: goals set after a prototype that made a ring of
every matmul, on tp alone. Needs no GPU.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import plain_gpt
from benchmarks.pod_step import COVERAGE_COLUMNS, compile_on, coverage_cells, in_child, write_rows
from benchmarks.yardstick import (
    SECONDS_COLUMNS,
    exposed_table,
    seconds_cells,
    seconds_row,
    yardstick,
)

POD, GPUS_PER_HOST = "h100-sxm:8x8", 8
STEPS = ("plain", "overlapped")
MAX_TEMP_RATIO, MAX_COMPILE_RATIO = 1.0, 4.0  # of plain's


@dataclass(frozen=True)
class Case:
    """One way to write the step.

    Attributes:
        about: what is pinned, in words.
        pinned: for `plain_gpt.make_step`.
        goal_s: seconds of matmul + exposed that the overlapped step may have at most.
    """

    about: str
    pinned: dict[str, PartitionSpec]
    goal_s: float


CASES = {
    "weights": Case("in_shardings and the residual stream", plain_gpt.STREAM, 0.357 + 0.200),
    "megatron": Case("qkv and the MLP too, not attention", plain_gpt.MEGATRON, 0.357 + 0.400),
    "everywhere": Case("everything, attention too", plain_gpt.EVERYWHERE, 0.357 + 0.100),
}

Row = dict[str, Any]
console = Console(width=160)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these cases.")] = None,
    audits: Annotated[bool, typer.Option(help="Print every audit whole.")] = True,
    out: Annotated[Path, typer.Option(help="Where rows go, as JSON lines.")] = Path(
        "out/prototype.jsonl"
    ),
) -> None:
    """Compile, audit and measure; exit 1 if an overlapped step misses a goal."""
    if unknown := set(only or ()) - set(CASES):
        raise typer.BadParameter(f"--only {', '.join(unknown)}: expected {', '.join(CASES)}")
    rows = []
    for case in only or CASES:
        for step in STEPS:
            with console.status(f"{case}, {step}"):
                row = in_child("benchmarks.prototype", case, step)
            command = "python -m benchmarks.prototype"
            rows.append({"command": command, "case": case, "step": step, **row})
            show(rows[-1], audits)
    write_rows(out, rows)
    print_rows(rows)
    if problems := shortfalls(rows):
        console.print("\n".join(problems))
        raise typer.Exit(1)


def child(case: str, step: str) -> Row:
    """Compile one step: the row of a child process."""
    mesh, sizes = jaxoverlap.pod_mesh(POD, plain_gpt.MESH), plain_gpt.Sizes()
    function = plain_gpt.make_step(sizes, mesh, CASES[case].pinned)
    compiled = compile_on(function, plain_gpt.abstract_args(sizes, mesh), mesh, POD, step)
    return compiled.row | seconds_row(yardstick(compiled.text, GPUS_PER_HOST))


def show(row: Row, audits: bool) -> None:
    name = f"{row['case']}, {row['step']}"
    if "error" in row:
        console.print(f"{name}: {row['error']}")
    elif audits:
        print(f"\n{name}\n{row['audit']}\n")
        console.print(exposed_table(row, f"{name}: exposed longest"))


def print_rows(rows: list[Row]) -> None:
    title = f"7B GPT step on {POD}: 32 layers, hidden 4096, sequence 4096, batch 64"
    print_table(title, (*SECONDS_COLUMNS, "total ms", "goal ms"), rows, measured_cells)
    plain = {row["case"]: plain_of(rows, row) for row in rows}

    def audited(row: Row) -> tuple[str, ...]:
        ratio = row["compile_cpu_s"] / plain[row["case"]]["compile_cpu_s"]
        cpu = f"{row['compile_cpu_s']:.0f} ({ratio:.1f} x)"
        return (*coverage_cells(row, plain[row["case"]]), cpu)

    print_table("what XLA made of it", (*COVERAGE_COLUMNS, "compile CPU s"), rows, audited)
    for name, case in CASES.items():
        console.print(f"{name}: {case.about} pinned")


def measured_cells(row: Row) -> tuple[str, ...]:
    """The yardstick's seconds, and the goal."""
    goal = f"{CASES[row['case']].goal_s * 1e3:.0f}" if row["step"] == "overlapped" else ""
    return (*seconds_cells(row), f"{total_s(row) * 1e3:.0f}", goal)


def print_table(
    title: str, columns: tuple[str, ...], rows: list[Row], cells: Callable[[Row], tuple[str, ...]]
) -> None:
    table = Table(title=title)
    for name in ("case", "step"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        rest = (row["error"],) if "error" in row else cells(row)
        table.add_row(row["case"], row["step"], *rest)
    console.print(table)


def total_s(row: Row) -> float:
    """The yardstick's seconds of a step: matmul + exposed."""
    return row["matmul_s"] + row["exposed_s"]


def plain_of(rows: list[Row], row: Row) -> Row:
    """The plain row of the same case; the row itself if that one failed."""
    same = [r for r in rows if r["case"] == row["case"] and r["step"] == "plain"]
    return next((r for r in same if "error" not in r), row)


def shortfalls(rows: list[Row]) -> list[str]:
    """List what an overlapped step is to reach and does not, a line each."""
    problems = [f"{r['case']}, {r['step']} failed: {r['error']}" for r in rows if "error" in r]
    for row in rows:
        if row["step"] != "overlapped" or "error" in row:
            continue
        case, plain, goal = row["case"], plain_of(rows, row), CASES[row["case"]].goal_s
        if total_s(row) > goal:
            problems.append(f"{case}: {total_s(row) * 1e3:.0f} ms; the goal is {goal * 1e3:.0f}")
        if row["temp_bytes"] > MAX_TEMP_RATIO * plain["temp_bytes"]:
            problems.append(f"{case}: temp memory {row['temp_bytes']} of {plain['temp_bytes']}")
        # CPU time, since the other steps of a busy machine stretch the clock's.
        ratio = row["compile_cpu_s"] / plain["compile_cpu_s"]
        if ratio > MAX_COMPILE_RATIO:
            problems.append(f"{case}: compiles {ratio:.1f} times as long as plain")
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        app()
