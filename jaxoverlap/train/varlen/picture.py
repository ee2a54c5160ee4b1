"""Draw a plan: a lane a device, its rings one after the other, and the time of the slowest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxoverlap.train.varlen.plan import BatchPlan

_COLOURS = {"inter-node": "#c44e52", "intra-node": "#dd8452", "local": "#4c72b0"}
_LINEAR = "#b0b0b0"


def draw(plan: BatchPlan, path: str | Path) -> None:
    """Write a picture of a plan, as the file's ending says (.png, .svg).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    total, nodes = plan.nodes.total, plan.nodes
    figure = Figure(figsize=(9, 1.6 + 0.22 * min(total, 64)), layout="constrained")
    axes = figure.subplots()
    lanes, left = np.arange(total), np.zeros(total)
    linear = plan.bounds.tokens * plan.costs.linear_s * 1e3
    whole = linear > 0 and not plan.bounds.sent  # devices do not wait between the two
    slowest = plan.layer_seconds if whole else plan.seconds
    for size in sorted(plan.ring_seconds, reverse=True):
        milliseconds = plan.ring_seconds[size] * 1e3
        colour = _COLOURS[nodes.zone(size)]
        axes.barh(lanes, milliseconds, left=left, color=colour, height=0.8, edgecolor="white")
        for ring in range(total // size if size > 1 else 0):
            middle = ring * size + (size - 1) // 2  # a lane, not the gap between two
            if milliseconds[ring * size] > 0.08 * slowest * 1e3:
                at = left[ring * size] + milliseconds[ring * size] / 2
                count = int(((plan.size == size) & (plan.ring == ring)).sum())
                axes.text(at, middle, f"ring of {size}: {count}", ha="center", va="center",
                          fontsize=7, color="white")  # fmt: skip
        left += milliseconds
    if whole:
        axes.barh(lanes, linear, left=left, color=_LINEAR, height=0.8, edgecolor="white")
    axes.axvline(slowest * 1e3, color="black", lw=1, ls="--")
    for edge in range(nodes.devices, total, nodes.devices):
        axes.axhline(edge - 0.5, color="grey", lw=0.6)
    axes.invert_yaxis()
    axes.set(
        xlabel=f"estimated ms per {'layer' if whole else 'attention'}, forward and backward",
        ylabel=f"device ({nodes.devices} per node)",
        title=f"{len(plan.lengths)} sequences, {plan.tokens:,} tokens, the longest "
        f"{plan.lengths.max():,}; attention's balance {plan.balance:.2f}",
    )
    used = {nodes.zone(g) for g in plan.ring_seconds if plan.ring_seconds[g].any()}
    patches = [Patch(color=c, label=name) for name, c in _COLOURS.items() if name in used]
    patches += [Patch(color=_LINEAR, label="linear layers")] if whole else []
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=110, metadata={"Date": None} if str(path).endswith("svg") else None)
