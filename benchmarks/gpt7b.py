"""Audit a 7B GPT's train step on 64 GPUs, collective by collective.

python -m benchmarks.gpt7b                      # about 2 minutes on 2 cores
python -m benchmarks.gpt7b --only overlapped    # or plain, or trace

The step of models/gpt.py with 32 scanned layers, hidden 4096, sequence 4096, batch 64, remat and
AdamW, data 8 x model 8 on eight hosts of eight H100s, plain and overlapped. It shows what a device
sends, what is covered, every all-reduce, whether `explain()` lists what XLA puts in, and how long
tracing takes. Needs no GPU.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jax
import msgspec
import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks.pod_step import (
    COVERAGE_COLUMNS,
    Compiled,
    compile_on,
    coverage_cells,
    in_child,
    provenance,
    write_rows,
)
from benchmarks.yardstick import (
    SECONDS_COLUMNS,
    dims,
    exposed_table,
    seconds_cells,
    seconds_row,
    yardstick,
)
from jaxoverlap._util.text import human_bytes
from jaxoverlap.plan.collectives import KIND_OF, RING_PASSES
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.device_groups import axes_of
from jaxoverlap.step import ways
from models import gpt
from models.config import Config

POD, GPUS_PER_HOST, MESH = "h100-sxm:8x8", 8, {"data": 8, "model": 8}
SIZES = {"layers": 32, "batch": 64}
JOBS = ("plain", "overlapped", "trace")
PARTS = {"ask": "partitioned", "price": "estimate", "decide": "_entries", "rewrite": "rewrite"}
REPEATS = 5
SAME = 0.02  # a relative difference of bytes that is none: rounded plans, padded halves

Row = dict[str, Any]
console = Console(width=160)
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Only plain, overlapped or trace.")] = None,
    audits: Annotated[bool, typer.Option(help="Print every audit whole.")] = True,
    out: Annotated[Path, typer.Option(help="Where rows go, as JSON lines.")] = Path(
        "out/gpt7b.jsonl"
    ),
) -> None:
    """Compile and time; exit 1 if the overlapped step falls short."""
    rows = []
    for job in only or JOBS:
        with console.status(job):
            row = in_child("benchmarks.gpt7b", job)
        rows.append({"command": "python -m benchmarks.gpt7b", "job": job, **row})
        if audits and "audit" in row:
            print(f"\n{job} step for {POD}\n{row['audit']}")
    write_rows(out, rows)
    print_steps([row for row in rows if row["job"] != "trace"])
    for row in rows:
        if "parts" in row:
            print_trace(row)
        elif "error" not in row:
            print_row(row)
    if problems := [line for row in rows for line in shortfalls(row)]:
        console.print("\n".join(problems))
        raise typer.Exit(1)


def child(job: str) -> Row:
    """Do one job: the row of a child process."""
    mesh = jaxoverlap.pod_mesh(POD, MESH)
    config = Config.pod(**MESH, **SIZES)
    args = gpt.abstract_args(config, mesh)
    if job == "trace":
        return time_traces(lambda: gpt.make_step(config, mesh), args)
    compiled = compile_on(gpt.make_step(config, mesh), args, mesh, POD, job)
    least = config.hidden**2 // mesh.size
    row = compiled.row | seconds_row(yardstick(compiled.text, GPUS_PER_HOST))
    row["all_reduces"] = all_reduces(compiled, least)
    if job == "overlapped":
        plan = compiled.function.explain(*args)
        row["remaining"] = [msgspec.structs.asdict(r) for r in plan.remaining]
        row["accounts"] = accounts(compiled, plan)
    return row


# -- all-reduces ----------------------------------------------------------------------------------


def all_reduces(compiled: Compiled, least: int) -> list[Row]:
    """List every all-reduce of a schedule, largest first.

    Args:
        compiled: the step.
        least: elements of the smallest part of a layer's weight that a device holds; an all-reduce
            of so many is taken to be a weight's gradient.
    """
    module = hlo.parse(compiled.text)
    rows = []
    for c in compiled.audit.collectives:
        if c.kind != "all-reduce":
            continue
        shapes = {i.name: i.shape for i in module.body(c.computation)}
        start = next(i for i in module.body(c.computation) if i.name == c.name)
        arrays = [array_of(shapes, operand) for operand in start.operands]
        rows.append(
            {
                "arrays": arrays,
                "source": c.source,
                "devices": c.group_size,
                "runs": c.runs,
                "bytes_moved": c.bytes_moved * c.runs,
                "of_weight": any(math.prod(dims(array)) >= least for array in arrays),
            }
        )
    return sorted(rows, key=lambda row: -row["bytes_moved"])


def array_of(shapes: dict[str, str], operand: str) -> str:
    """Name the array that an operand is, as in "f32[8192]"; "pair#1" is an element of a tuple."""
    name, _, element = operand.partition("#")
    return hlo.array_shapes(shapes[name])[int(element or 0)]


# -- what explain() lists, and what XLA does ------------------------------------------------------


def accounts(compiled: Compiled, plan: jaxoverlap.Plan) -> list[Row]:
    """Bytes that a device sends in XLA's own collectives, by kind and axes, most first.

    Each as `explain()` lists them ("XLA's own"), as the plan's rings keep them for XLA ("XLA
    keeps", which names some of the former again), and as the schedule has them, less the whole
    collectives that sliced rings are made of.
    """
    by_kind: dict[tuple[str, tuple[str, ...]], Row] = {}

    def row(kind: str, axes: tuple[str, ...]) -> Row:
        new = {"kind": kind, "axes": axes, "listed": 0, "kept": 0, "scheduled": 0}
        return by_kind.setdefault((kind, axes), new)

    for r in plan.remaining:
        row(r.kind, r.axes)["listed"] += r.bytes_moved
    for decision in plan.decisions:
        for axis, kind, sent in map(_kept, decision.others):
            row(kind, (axis,))["kept"] += decision.runs * sent
        if decision.variant.style == "sliced":
            row(_COLLECTIVE[decision.kind], (decision.axis,))["scheduled"] -= decision.bytes_moved
    devices = hlo.parse(compiled.text).num_devices
    for c in compiled.audit.collectives:
        if not c.ring:
            kind = KIND_OF[c.kind]
            row(kind, axes_of(c.groups, devices, dict(plan.mesh)))["scheduled"] += (
                c.runs * c.bytes_moved
            )
    rows = sorted(by_kind.values(), key=lambda r: -max(r["listed"], r["kept"], r["scheduled"]))
    return [r | {"verdict": verdict(r)} for r in rows]


_COLLECTIVE = {name: kind for kind, name in RING_PASSES.items()}
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def _kept(text: str) -> tuple[str, str, int]:
    """(axis, kind, bytes) of what a plan's row says that XLA keeps: "data all_gather, 8.2 kB"."""
    motion, _, size = text.partition(", ")
    axis, kind = motion.rsplit(" ", 1)
    number, unit = size.split(" ")
    return axis, kind, round(float(number) * _UNITS[unit])


def verdict(row: Row) -> str:
    """Say in words whether the schedule has what the plan says."""
    listed, kept, scheduled = row["listed"], row["kept"], row["scheduled"]
    if _same(scheduled, listed):
        return "as listed"
    if not listed and _same(scheduled, kept):
        return "not among XLA's own; as kept beside rings"
    if _same(scheduled, listed + kept):
        return "as listed, and as kept beside rings"
    if listed <= scheduled <= listed + kept:
        return "as listed, and part of what is kept beside rings"
    if not scheduled:
        return "listed, but not in the schedule"
    if not listed + kept:
        return "in the schedule, but not listed"
    return f"{scheduled / max(listed, kept):.2f} times what is listed"


def _same(a: int, b: int) -> bool:
    return abs(a - b) <= SAME * max(a, b)


# -- seconds to trace -----------------------------------------------------------------------------


def time_traces(new_step: Callable[[], Any], args: tuple[Any, ...]) -> Row:
    """Time a step until it can be compiled, plain and overlapped; medians of REPEATS.

    The runs take turns, with every cache of jax's cleared before each, so that what else the
    machine does meets both. The first pair is not counted.
    """
    plain, overlapped = [], []
    for _ in range(REPEATS + 1):
        plain.append(time_plain(new_step, args))
        overlapped.append(time_overlapped(new_step, args))

    def medians(rows: list[dict[str, float]]) -> dict[str, float]:
        return {name: round(statistics.median(r[name] for r in rows[1:]), 4) for name in rows[0]}

    whole = statistics.median(sum(row.values()) for row in overlapped[1:])
    base = statistics.median(sum(row.values()) for row in plain[1:])
    parts = {"plain": medians(plain), "overlapped": medians(overlapped)}
    return {"parts": parts, "ratio": round(whole / base, 3), "repeats": REPEATS, **provenance()}


def time_plain(new_step: Callable[[], Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Time tracing and lowering."""
    jax.clear_caches()
    step = new_step()
    began = time.perf_counter()
    traced = step.trace(*args)
    between = time.perf_counter()
    traced.lower()
    return {"trace": between - began, "lower": time.perf_counter() - between}


def time_overlapped(new_step: Callable[[], Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Seconds of each of PARTS; "trace" is jax's own trace and whatever is in no other part."""
    jax.clear_caches()
    step: Any = jaxoverlap.overlap(new_step(), cluster=POD)
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - began
            return result

        return run

    parts: Any = {of: timed(name, getattr(ways, of)) for name, of in PARTS.items()}
    with mock.patch.multiple(ways, **parts):
        began = time.perf_counter()
        step.trace(*args)
        whole = time.perf_counter() - began
    return seconds | {"trace": whole - sum(seconds.values())}


# -- what is printed ------------------------------------------------------------------------------


def print_steps(rows: list[Row]) -> None:
    table = Table(title=f"7B GPT step on {POD}: 32 layers, hidden 4096, sequence 4096, batch 64")
    for name in ("step", *COVERAGE_COLUMNS, "synchronous", *SECONDS_COLUMNS):
        table.add_column(name, justify="left" if name == "step" else "right")
    plain = next((row for row in rows if row["job"] == "plain" and "error" not in row), None)
    for row in rows:
        if "error" in row:
            table.add_row(row["job"], row["error"])
            continue
        synchronous = str(row["all"]["synchronous"])
        table.add_row(row["job"], *coverage_cells(row, plain), synchronous, *seconds_cells(row))
    console.print(table)
    console.print("bytes are what a device sends in one step; ms are benchmarks/yardstick.py's")


def print_row(row: Row) -> None:
    """Print what one step's schedule has in it."""
    console.print(exposed_table(row, f"{row['job']}: exposed longest"))
    table = Table(title=f"{row['job']}: all-reduces")
    for name in ("arrays", "source", "devices", "runs", "bytes", "of a weight"):
        table.add_column(name)
    for r in row["all_reduces"]:
        arrays, weight = ", ".join(r["arrays"]), "yes" if r["of_weight"] else "no"
        counts = (str(r["devices"]), str(r["runs"]), human_bytes(r["bytes_moved"]))
        table.add_row(arrays, r["source"], *counts, weight)
    console.print(table)
    if "accounts" in row:
        print_remaining(row["remaining"])
        print_accounts(row["accounts"])


def print_remaining(rows: list[Row]) -> None:
    table = Table(title="overlapped: XLA's own, as explain() lists them")
    for name in ("collective", "axes", "source"):
        table.add_column(name)
    for name in ("runs", "bytes"):
        table.add_column(name, justify="right")
    for r in rows:
        counts = (str(r["runs"]), human_bytes(r["bytes_moved"]))
        table.add_row(r["kind"], " x ".join(r["axes"]), r["source"], *counts)
    console.print(table)


def print_accounts(rows: list[Row]) -> None:
    table = Table(title="overlapped: what explain() lists of XLA's own, and what is scheduled")
    for name in ("kind", "axes"):
        table.add_column(name)
    for name in ("XLA's own", "XLA keeps", "scheduled"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in rows:
        sizes = (human_bytes(r[key]) for key in ("listed", "kept", "scheduled"))
        table.add_row(r["kind"], " x ".join(r["axes"]), *sizes, r["verdict"])
    console.print(table)


def print_trace(row: Row) -> None:
    table = Table(title=f"seconds until it can be compiled, medians of {row['repeats']}")
    for name in ("step", "part", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for step, parts in row["parts"].items():
        for part, seconds in parts.items():
            table.add_row(step, part, f"{seconds:.3f}")
    console.print(table)
    console.print(
        f"overlapped (trace + ask + price + decide + rewrite, all ways that were compared) is "
        f"{row['ratio']:.2f} times plain (trace + lower)"
    )


def shortfalls(row: Row) -> list[str]:
    """List what a row has to keep and does not, a line each."""
    if "error" in row:
        return [f"{row['job']}: {row['error']}"]
    if row["job"] != "overlapped":
        return []
    problems = []
    if row["hops"]["covered"] < row["hops"]["count"] or not row["hops"]["count"]:
        problems.append(f"{row['hops']['covered']} of {row['hops']['count']} hops covered")
    if row["all"]["synchronous"]:
        problems.append(f"{row['all']['synchronous']} collectives are synchronous")
    weights = [r for r in row["all_reduces"] if r["of_weight"]]
    problems += [
        f"a weight's gradient is all-reduced: {r['arrays']}, {r['source']}" for r in weights
    ]
    return problems


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(*sys.argv[2:])))
    else:
        app()
