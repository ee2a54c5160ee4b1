"""Draw the rows of `pods scale` and of `race`.

python -m benchmarks.local_updates.pictures pods.jsonl race.jsonl docs/local_updates.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import typer

from benchmarks.local_updates.race import BYTES, HOSTS, METHODS


def main(pods: Path, race: Path, out: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_pods(left, [r for r in rows(pods) if r["what"] == "scale"])
    draw_race(right, rows(race))
    figure.savefig(out, metadata={"Date": None})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_pods(axes: Any, found: list[dict[str, Any]]) -> None:
    """Draw tokens a second of one GPU, simulated, against the number of GPUs."""
    workers: list[int] = []
    for every in sorted({r["every"] for r in found}, reverse=True):
        line = sorted((r["workers"], r["tokens_per_s"]) for r in found if r["every"] == every)
        name = f"CO2, every {every}" if every else "AdamW, synchronous"
        style = {} if every else dict(color="black", linestyle="--")
        workers = [w for w, _ in line]
        each = [t / w / 1e3 for w, t in line]
        axes.plot(workers, each, marker="o", markersize=4, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0)
    axes.set_xticks(workers, [str(w) for w in workers])
    axes.set(
        xlabel="GPUs, a worker each",
        ylabel="thousand tokens/s of one GPU",
        title="a100-sxm-80, 80 Gbit/s a host (simulated)",
    )
    axes.legend(frameon=False, fontsize=8)


def draw_race(axes: Any, found: list[dict[str, Any]]) -> None:
    """Draw measured throughput, as a share of steps alone, against the links' rate."""
    rates = sorted({r["rate_mbit"] for r in found})

    def seconds(method: str, rate: float) -> float:
        own = [r["seconds"] for r in found if (r["method"], r["rate_mbit"]) == (method, rate)]
        return float(np.median(own))

    alone = float(np.median([seconds("alone", rate) for rate in rates]))
    for method in METHODS[1:]:
        share = [seconds("alone", rate) / seconds(method, rate) for rate in rates]
        axes.plot(rates, share, marker="o", markersize=4, label=method)
    ring_s = [2 * (HOSTS - 1) / HOSTS * BYTES * 8 / (rate * 1e6) for rate in rates]
    ideal = [min(1.0, alone / s) for s in ring_s]
    axes.plot(rates, ideal, color="gray", linestyle=":", label="steps / max(steps, all-reduce)")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(
        xlabel="Mbit/s of each of 4 hosts' links",
        ylabel="throughput / steps alone",
        title="4 hosts in the lab, a round of 12 steps (measured)",
    )
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    typer.run(main)
