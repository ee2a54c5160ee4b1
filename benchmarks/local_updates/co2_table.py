"""Show what each of CO2's options is worth: docs/local_updates.md's second table."""

from __future__ import annotations

import statistics
from typing import Any

BASE = "AdamW, synchronous, rate x2"  # all methods here have twice the task's rate
SHOWN = {  # name of a row without its rate, and how the page calls it
    "LocalSGD": "LocalSGD",
    "SlowMo": "SlowMo",
    "eager DiLoCo": "eager DiLoCo, outer rate 1",
    "CO2": "CO2, momentum 0.2",
    "CO2, momentum 0": "CO2, momentum 0",
    "CO2, waits": "+ `rounds=`",
    "CO2, waits, by leaf": '+ `over="leaf"`',
    "CO2, waits, by element": '+ `over="element"`',
    "CO2, waits, rates by leaf": "+ rates by leaf",
    "CO2, waits, eager, penalty": "+ `eager=True`",
    "CO2, waits, eager": "+ `eager=True`, no penalty",
    "CO2, waits, eager half": "+ `eager=0.5`, no penalty",
    "CO2, waits, eager half, momentum": "+ `eager=0.5`, momentum 0.2",
}


def columns(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the table's titles: loss and accuracy at each length."""
    every = max(row["every"] for row in rows)
    lengths = sorted({row["steps"] // every for row in rows})
    return ("", *(t for n in lengths for t in (f"{n} rounds: loss", "points", "seeds")))


def page_table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the page's cells, each compared with AdamW of the same seed and length.

    Losses are over AdamW's, the mean of the seeds with their spread; points are percent of
    pictures that are classified rightly, less AdamW's.
    """
    lengths = sorted({row["steps"] for row in rows})
    known = {(row["name"], row["steps"], row["seed"]): row for row in rows}

    def cells(name: str, steps: int) -> tuple[str, str, str]:
        full = f"{name}, rate x2"
        seeds = [s for n, t, s in known if (n, t) == (full, steps)]
        pairs = [(known[full, steps, s], known[BASE, steps, s]) for s in seeds]
        if not pairs:
            return "", "", ""
        losses = [one["loss"] / base["loss"] for one, base in pairs]
        points = [100 * (one["accuracy"] - base["accuracy"]) for one, base in pairs]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        mean, point = statistics.mean(losses), statistics.mean(points)
        return f"{mean:.3f}{spread}", f"{point:.1f}", str(len(pairs))

    return [
        (shown, *(c for steps in lengths for c in cells(name, steps)))
        for name, shown in SHOWN.items()
    ]
