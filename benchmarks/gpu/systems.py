"""Time the training systems on one GPU: local updates, compression, zeroth order, varlen.

Local updates and compressed gradients run on processes that are joined by sockets, the slow network
that they are for; the others on one process that has the GPU alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.frame import Row
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.wires import WIRES

ROUNDS = "local updates, a round"
COMPRESSED = "compressed gradients"
ZEROTH = "zeroth order"
VARLEN = "attention to texts of many lengths"
SYSTEMS = (ROUNDS, COMPRESSED, ZEROTH, VARLEN)
MODELS = ("1.3b", "6.7b", "13b")
COLUMNS = ("system", "row", "median ms", "fastest", "slowest", "of the first", "more", "peak GB")
NUMBERS = (*COLUMNS[2:6], "peak GB")
_CHILD = "benchmarks.gpu.systems_child"


def jobs(systems: Sequence[str], *, rounds: int, models: Sequence[str] = MODELS) -> Iterator[Job]:
    """Yield the jobs of systems; a run of each method in turn, so many rounds.

    Args:
        models: OPT's, of the zeroth order.
    """
    sockets, times = WIRES["sockets"], dict(rounds=rounds)
    if ROUNDS in systems:
        yield Job(ROUNDS, "all", f"{_CHILD}:local_updates", times, sockets)
    if COMPRESSED in systems:
        yield Job(COMPRESSED, "all", f"{_CHILD}:compressed", times, sockets)
    if VARLEN in systems:
        yield Job(VARLEN, "all", f"{_CHILD}:varlen", times)
    if ZEROTH in systems:
        for model in models:
            for host in (False, True):
                name = "streamed from pinned host memory" if host else "resident"
                arguments = dict(model=model, host=host, name=name, **times)
                yield Job(f"{ZEROTH}, OPT-{model}", name, f"{_CHILD}:zeroth_order", arguments)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row; times of the first row of its system."""
    first_s: dict[str, float] = {}
    cells = []
    for row in rows:
        seconds = row.get("seconds")
        if not seconds:
            cells.append((row["step"], row["row"], *("",) * 4, row["error"].replace("|", "/"), ""))
            continue
        median_s = statistics.median(seconds)
        base_s = first_s.setdefault(row["step"], median_s)
        times = (f"{s * 1e3:.1f}" for s in (median_s, min(seconds), max(seconds)))
        tokens = f"{row['tokens'] / median_s:.0f} tokens/s" if "tokens" in row else ""
        sent = f"{row['form_bytes'] / 1e6:.2f} MB sent" if row.get("form_bytes") else ""
        more = "; ".join(filter(None, (tokens, sent)))
        peak = f"{row['used_bytes'] / 1e9:.2f}" if row.get("used_bytes") else ""
        cells.append((row["step"], row["row"], *times, f"{median_s / base_s:.3f}", more, peak))
    return cells


def shown(rows: Sequence[Row]) -> Any:
    """Return the columns, the numbers among them, and the cells."""
    return COLUMNS, NUMBERS, table(rows)
