"""Time one device's kernels of a step for many GPUs, on one GPU, and compare with the simulation.

XLA's mock collectives (JAX_MOCK_GPU_TOPOLOGY) let one process compile and run one device's program
of a step for a pod: all kernels, in their order and with their memory; collectives take no time and
leave what was in memory, which is filled with random numbers before, as zeros multiply faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.frame import Row
from benchmarks.gpu.jobs import Job
from jaxoverlap.hardware.cluster import parse_cluster

KINDS = ("matmul", "attention", "memory")
COLUMNS = (
    *("step", "row", "pod", "compute ms", "simulated", "simulated / measured", *KINDS),
    *("peak GB", "XLA's peak", "notes"),
)
NUMBERS = COLUMNS[3:-1]
ROWS = ("plain", "overlapped")
REHEARSED = "rehearsal"  # a small step, in place of the suite's


def jobs(steps: Sequence[str], rows: Sequence[str], pods: dict[str, str]) -> Iterator[Job]:
    """Yield a job for each step and row.

    Args:
        steps: of benchmarks/pods.
        rows: of ROWS.
        pods: the pod of each step, whose hosts and GPUs are mocked with the chip that is here.
    """
    for step in steps:
        cluster = parse_cluster(pods[step])
        shape = f"{cluster.num_hosts}x{cluster.gpus_per_host}"
        for row in rows:
            yield Job(
                step,
                row,
                "benchmarks.gpu.kernels_child:kernels",
                dict(step=step, row=row, hosts_x_gpus=shape),
                devices=cluster.num_devices,
                environment={"JAX_MOCK_GPU_TOPOLOGY": f"{shape}x1"},
            )


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row; of each kind, simulated over measured seconds."""
    return [_cells(row) for row in rows]


def _cells(row: Row) -> tuple[str, ...]:
    head = row["step"], row["row"], row.get("pod", "")
    if "error" in row:
        return *head, *("",) * (len(COLUMNS) - 4), row["error"].replace("|", "/")
    kinds = {kind: (measured, predicted) for kind, _, measured, predicted in row["kinds"]}
    ratios = (f"{kinds[k][1] / kinds[k][0]:.2f}" if k in kinds else "" for k in KINDS)
    measured_s, simulated_s = row["measured_s"], row["simulated_s"]
    memory = (
        f"{row[key] / 1e9:.2f}" if row.get(key) else "" for key in ("used_bytes", "peak_bytes")
    )
    return (
        *head,
        f"{measured_s * 1e3:.1f}",
        f"{simulated_s * 1e3:.1f}",
        f"{simulated_s / measured_s:.3f}",
        *ratios,
        *memory,
        ", ".join(row.get("unknown", ())),
    )


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say how far simulated compute is off, in the mean and at most, by row and by kind."""
    lines = []
    for name in ROWS:
        done = [row for row in rows if row["row"] == name and "error" not in row]
        if done:
            off = [abs(row["simulated_s"] / row["measured_s"] - 1) for row in done]
            mean = sum(off) / len(off)
            lines.append(f"{name}: compute {mean:.1%} off in the mean, {max(off):.1%} at most")
    for kind in KINDS:
        parts = [part for row in rows for part in row.get("kinds", ()) if part[0] == kind]
        measured_s, predicted_s = (sum(part[i] for part in parts) for i in (2, 3))
        if measured_s:
            lines.append(
                f"{kind}: simulated / measured {predicted_s / measured_s:.3f} over all rows"
            )
    return lines


def shown(rows: Sequence[Row]) -> Any:
    """Return the columns, the numbers among them, and the cells."""
    return COLUMNS, NUMBERS, table(rows)
