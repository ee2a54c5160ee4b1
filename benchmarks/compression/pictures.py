"""Draw the rows of `race`: how many times as fast as no compression, against the links' rate.

    python -m benchmarks.compression.pictures benchmarks/results/compression_race.jsonl \
        docs/compression.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import typer

COLORS = {"PowerSGD": "#08519c", "QSGD": "#a63603", "TopK": "#006d2c"}


def main(race: Path, out: Path) -> None:
    """Draw a line per method, each with a look of its own: L-GreCo's solid, others dashed."""
    rows = [json.loads(line) for line in race.read_text().splitlines()]
    found = {(r["framework"], r["method"], r["rate_mbit"]): r["step_s"] for r in rows}
    rates = sorted({r["rate_mbit"] for r in rows})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for framework, method in dict.fromkeys((r["framework"], r["method"]) for r in rows):
        if method in ("none", "alone"):
            continue
        kind = method.rpartition(", ")[2]
        line = [
            (rate, found[framework, "none", rate] / found[framework, method, rate])
            for rate in rates
            if (framework, method, rate) in found
        ]
        style: Any = {"ls": "--", "marker": "^", "mfc": "white"}
        if framework == "PyTorch":
            style = {"ls": ":", "marker": "s", "color": "0.4"}
        elif "L-GreCo" in method:
            style = {"ls": "-", "marker": "o"}
        name = f"PyTorch DDP, {method}" if framework == "PyTorch" else method
        style = {"color": COLORS[kind], **style}
        axes.plot(*zip(*line, strict=True), ms=5, label=name, **style)
    axes.axhline(1, color="0.6", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="rate of every link, Mbit/s")
    axes.set(ylabel="times as fast as no compression", title="four hosts, a step")
    axes.minorticks_off()
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ticks = (0.5, 1, 2, 5, 10, 20)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(frameon=False, fontsize=9, handlelength=3.5)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
