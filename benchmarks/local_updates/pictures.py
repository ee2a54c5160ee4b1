"""Draw the rows of `pods scale`.

    python -m benchmarks.local_updates.pictures benchmarks/results/local_updates_pods.jsonl \
        docs/local_updates.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import typer


def main(pods: Path, out: Path) -> None:
    """Draw tokens a second of one GPU, simulated, against the number of GPUs."""
    lines = [json.loads(line) for line in pods.read_text().splitlines()]
    found = [r for r in lines if r["what"] == "scale"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for every in sorted({r["every"] for r in found}, reverse=True):
        line = sorted((r["workers"], r["tokens_per_s"]) for r in found if r["every"] == every)
        name = f"CO2, every {every}" if every else "AdamW, synchronous"
        style: dict[str, Any] = {} if every else dict(color="black", linestyle="--")
        each = [tokens / workers / 1e3 for workers, tokens in line]
        axes.plot([w for w, _ in line], each, marker="o", markersize=4, label=name, **style)
    workers = sorted({r["workers"] for r in found})
    axes.set_xscale("log", base=2)
    axes.set_ylim(0)
    axes.set_xticks(workers, [str(count) for count in workers])
    axes.set(
        xlabel="GPUs, a worker each",
        ylabel="thousand tokens/s of one GPU",
        title="a100-sxm-80, 80 Gbit/s a host (simulated)",
    )
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
