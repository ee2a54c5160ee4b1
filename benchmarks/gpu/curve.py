"""Lagom's curve: how much matmuls and an all-gather slow each other, by the CTAs that NCCL may use.

Lagom (arXiv 2602.20656) chooses channels by this trade. NCCL reads NCCL_MAX_CTAS when a process
starts, so each point has processes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.frame import Row
from benchmarks.gpu.child import Process
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.wires import WIRES

CTAS = (1, 2, 4, 8, 16)
COLUMNS = (
    *("CTAs", "gather ms", "matmuls ms", "both ms", "share taken", "matmuls' factor"),
    *("cost model's factor", "notes"),
)
NUMBERS = COLUMNS[:-1]


def jobs(ctas: Sequence[int] = CTAS) -> Iterator[Job]:
    """Yield a job for each number of CTAs."""
    copies = WIRES["copies, 2 CTAs"]
    for count in ctas:
        wire = replace(copies, name=f"copies, {count} CTAs", ctas=count)
        arguments = dict(ctas=count)
        yield Job("curve", str(count), "benchmarks.gpu.curve:point", arguments, wire=wire)


def point(here: Process, *, ctas: int) -> None:
    """Send a point of the curve."""
    import jax

    from benchmarks.gpu.race_child import REHEARSED, about
    from jaxoverlap.calibrate import links
    from jaxoverlap.cost.find import cost_model
    from jaxoverlap.cost.groups import Group
    from jaxoverlap.cost.nccl import Channels
    from jaxoverlap.hardware.cluster import chips

    here.send("device", **about())
    on_cpu = jax.devices()[0].platform == "cpu"
    sizes = REHEARSED if on_cpu else links.USUAL
    found = links.concurrently("all-gather", sizes, lambda what: here.send("doing", what=what))
    kind = jax.devices()[0].device_kind
    chip = next((c.name for c in chips() if c.device_name == kind), "h100-sxm")
    model, count = cost_model(f"{chip}:1x4/4"), len(jax.devices())
    moved = round(4 * sizes.elements[-2] * (count - 1) / count)
    beside = model.share("all-gather", moved, Group(count), Channels(ctas))
    predicted = model.matmul_s(*sizes.dims, beside=beside) / model.matmul_s(*sizes.dims)
    here.send(
        "row",
        row=str(ctas),
        gather_s=found.collective_s,
        matmuls_s=found.compute_s,
        both_s=found.together_s,
        taken=found.taken,
        predicted=predicted,
        matmuls=found.matmuls,
    )


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row under COLUMNS."""
    cells = []
    for row in rows:
        if "error" in row:
            empty = ("",) * (len(COLUMNS) - 2)
            cells.append((row["row"], *empty, row["error"].replace("|", "/")))
            continue
        times = (f"{row[key] * 1e3:.2f}" for key in ("gather_s", "matmuls_s", "both_s"))
        factor = f"{1 / (1 - row['taken']):.2f}" if row["taken"] < 1 else "stopped"
        numbers = f"{row['taken']:.2f}", factor, f"{row['predicted']:.2f}"
        cells.append((row["row"], *times, *numbers, ""))
    return cells


def shown(rows: Sequence[Row]) -> Any:
    """Return the columns, the numbers among them, and the cells."""
    return COLUMNS, NUMBERS, table(rows)
