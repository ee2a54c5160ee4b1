"""Draw the rows of `pods`: throughput of OPT-175B over GPUs, and device memory over models.

python -m benchmarks.zeroth_order.pictures benchmarks/results/zeroth_order_pods.jsonl \
    docs/zeroth_order.svg
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import typer

from benchmarks.zeroth_order.pods import PUBLISHED_GB

CHIP = "a100-sxm-80"


def main(pods: Path, out: Path) -> None:
    """Draw tokens per second against GPUs, sliced and not, and compiled bytes against ZO2's."""
    rows = [json.loads(line) for line in pods.read_text().splitlines()]
    rows = [r for r in rows if r["chip"] == CHIP]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    large = [r for r in rows if r["model"] == "175b" and r["layers"] == 96]
    alone = next(r for r in large if r["gpus"] == 1)
    for sliced, name in ((True, "each GPU uploads a slice"), (False, "each uploads whole blocks")):
        several = [r for r in large if r["gpus"] > 1 and r["sliced"] == sliced]
        line = sorted((r["gpus"], r["tokens_per_s"]) for r in [alone, *several])
        left.plot(*zip(*line, strict=True), marker="o", label=name)
    left.set(xlabel="GPUs of one host", ylabel="tokens/s", ylim=0, title="OPT-175B, simulated")
    left.legend(frameon=False)
    names = list(PUBLISHED_GB)
    right.plot(names, list(PUBLISHED_GB.values()), "k--", marker="x", label="ZO2, published")
    for gpus in (1, 4):
        found = {r["model"]: r["device_bytes"] for r in rows if r["gpus"] == gpus and r["sliced"]}
        known = [name for name in names if name in found]
        values = [found[name] / 1e9 for name in known]
        right.plot(known, values, marker="o", label=f"{gpus} GPU{'s' * (gpus > 1)}")
    right.set(xlabel="OPT", ylabel="GB on a device", ylim=0, title="compiled memory")
    right.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
