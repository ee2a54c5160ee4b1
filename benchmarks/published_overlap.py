"""Simulate the steps of which others measured what overlap gains, on the same configurations.

python -m benchmarks.published_overlap --out FILE      # two steps, four rows each, some 20 minutes
python -m benchmarks.published_overlap --table FILE    # print its rows; make none

torchtitan timed Llama 3.1 with tensor parallelism, without and with its asynchronous one: matmuls
that PyTorch splits into chunks, whose shards move by copy engines over NVLink
(pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md). Here the same model,
mesh, batch and texts run in JAX (`benchmarks/questions/model.py`). XLA compiles them for GPUs that
are not there; `jaxoverlap.simulate` gives their seconds. Needs no GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.frame import MaybeOut, Row, Shown, add_missing, provenance, read_rows, shown_or_out
from benchmarks.questions.model import KEPT, Model, abstract_args, make_step
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import compiler_options, pod_mesh

DEFAULTS, OVERLAPPED = "XLA's defaults", "overlap()"
COLUMNS = (
    "step",
    "measured: plain",
    "overlapped",
    "times",
    "simulated: without",
    "with",
    "times ",
    "without by",
)
CHILD_S = 3000
console = Console(width=200)
app = frame.app()


@dataclass(frozen=True)
class Published:
    """A step that others timed without and with overlap.

    Attributes:
        pod, axes, model: the configuration.
        kept: what a layer keeps, by `benchmarks.questions.model.KEPT`; as near as these come.
        plain, overlapped: tokens a second and GPU, as published.
    """

    pod: str
    axes: dict[str, int]
    model: Model
    kept: str
    plain: float
    overlapped: float


# H100s with HBM2e and a limit of 500 W. torchtitan's selective recomputation by operation runs
# every second matmul again; here matmuls with weights and attention are kept.
CASES = {
    "torchtitan, 8B, 64 H100, fsdp 8 x tp 8": Published(
        "h100-sxm-500w:8x8",
        {"fsdp": 8, "tp": 8},
        Model(32, 4096, 32, 14336, 128256, batch=96, sequence=8192, kv_heads=8),
        "dots + attention",
        4378.0,
        4809.4,
    ),
    "torchtitan, 70B, 256 H100, fsdp 32 x tp 8": Published(
        "h100-sxm-500w:32x8",
        {"fsdp": 32, "tp": 8},
        Model(80, 8192, 64, 28672, 128256, batch=512, sequence=8192, kv_heads=8),
        "full",
        597.3,
        652.4,
    ),
}


def measured(name: str, options: str) -> Row:
    """Compile a step by a set of options, or overlapped, and simulate it."""
    case = CASES[name]
    mesh = pod_mesh(case.pod, case.axes)
    step: Any = make_step(case.model, mesh, KEPT[case.kept])
    xla: dict[str, Any] | None = compiler_options()
    if options == OVERLAPPED:
        step, xla = jaxoverlap.overlap(step, cluster=case.pod), None
    elif options in COMPARED:
        xla |= accepted(options, mesh.devices.flat[0])[0]
    compiled = step.lower(*abstract_args(case.model, mesh)).compile(xla)
    simulation = jaxoverlap.simulate(compiled, case.pod)
    return {
        **provenance(),
        "step_s": simulation.step_s,
        "exposed_s": simulation.exposed_s,
        "unknown": dict(simulation.unknown),
        "peak_bytes": peak_bytes(compiled.memory_analysis()),
    }


@app.command()
def main(out: MaybeOut = None, shown: Shown = None) -> None:
    """Compile and simulate; print a table."""
    out = shown_or_out(shown, out, lambda path: show(read_rows(path)))
    import_first(["benchmarks.published_overlap"])
    jobs = (
        (
            {"step": name, "row": row},
            functools.partial(in_fork, measured, name, row, timeout_s=CHILD_S),
        )
        for name in CASES
        for row in (DEFAULTS, *COMPARED, OVERLAPPED)
    )
    add_missing(out, jobs, timed=True)
    show(read_rows(out))


def show(rows: list[Row]) -> None:
    made = table(rows)
    console.print(frame.filled("tokens a second and GPU", COLUMNS, made, words=("step",)))


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each step of which all rows are there."""
    cells = []
    for name, case in CASES.items():
        mine = {row["row"]: row for row in rows if row["step"] == name and "step_s" in row}
        most = parse_cluster(case.pod).chip.memory_bytes
        fit = [
            row
            for row in mine.values()
            if row["row"] != OVERLAPPED and row["peak_bytes"] <= most and not row["unknown"]
        ]
        if OVERLAPPED not in mine or not fit:
            continue
        best = min(fit, key=lambda row: row["step_s"])
        gpus = parse_cluster(case.pod).num_devices
        tokens = case.model.batch * case.model.sequence / gpus
        without, overlapped = (tokens / row["step_s"] for row in (best, mine[OVERLAPPED]))
        cells.append(
            (
                name,
                f"{case.plain:.0f}",
                f"{case.overlapped:.0f}",
                f"{case.overlapped / case.plain:.2f}",
                f"{without:.0f}",
                f"{overlapped:.0f}",
                f"{overlapped / without:.2f}",
                best["row"],
            )
        )
    return cells


if __name__ == "__main__":
    app()
