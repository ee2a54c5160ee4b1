"""Draw configurations: seconds by term of the best, time against memory, and who sends to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxoverlap.parallelism import traffic
from jaxoverlap.parallelism.configure import Configurations
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.placement import Placement
from jaxoverlap.parallelism.search import Scored
from jaxoverlap.parallelism.stack import Stack
from jaxoverlap.parallelism.terms import StepTerms
from jaxoverlap.parallelism.traffic import Sent
from jaxoverlap.plan.collectives import PERMUTE

_TERMS = tuple(StepTerms().by_term)
_COLOURS = dict(zip(_TERMS, (
    "#4c72b0", "#a1b8dc", "#dd8452", "#937860", "#da8bc3", "#c44e52", "#8172b3", "#ccb974",
    "#bbbbbb", "#55a868", "#64b5cd",
), strict=True))  # fmt: skip


def draw(found: Configurations, path: str | Path) -> None:
    """Write a figure of three plots, in the format of the file's suffix (.png, .svg).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2.6))
    _bars(figure.add_subplot(grid[0, :]), found)
    _pareto(figure.add_subplot(grid[1, 0]), found)
    _matrix(figure.add_subplot(grid[1, 1]), found)
    figure.suptitle(f"{found.model.name} on {found.cluster}, batch {found.global_batch}")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, found: Configurations) -> None:
    names = [f"{i}  {scored.configuration}" for i, scored in enumerate(found, 1)]
    left = np.zeros(len(found))
    for term in _TERMS:
        seconds = np.array([scored.terms.by_term[term] for scored in found])
        if seconds.max() > 1e-3 * found[0].step_s:
            axes.barh(names, seconds, left=left, color=_COLOURS[term], label=term, height=0.72)
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("estimated seconds per step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes.tick_params(axis="y", labelsize=8)


def _pareto(axes: Any, found: Configurations) -> None:
    memory = np.array([scored.memory.total / 1e9 for scored in found])
    seconds = np.array([scored.step_s for scored in found])
    front = [i for i in range(len(found)) if i == int(np.argmin(memory[: i + 1]))]
    axes.scatter(memory, seconds, color="#4c72b0", s=22)
    axes.step(memory[front], seconds[front], where="pre", color="#c44e52", lw=1, label="Pareto")
    for i, (x, y) in enumerate(zip(memory, seconds, strict=True), 1):
        axes.annotate(str(i), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("estimated GB per GPU")
    axes.set_ylabel("estimated seconds per step")
    axes.legend(fontsize=8, frameon=False)


def _matrix(axes: Any, found: Configurations) -> None:
    shown = min(found.cluster.num_devices, 64)
    sent = matrix(found.model, found[0], found.stack, found.global_batch, shown)
    image = axes.imshow(np.log10(np.maximum(sent, 1)), cmap="Blues", vmin=6, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="log10 of bytes per step")
    axes.set_title(f"traffic between the first {shown} GPUs, choice 1", fontsize=9)
    axes.set_xlabel("to GPU")
    axes.set_ylabel("from GPU")


def matrix(
    model: Transformer, scored: Scored, stack: Stack, global_batch: int, devices: int
) -> np.ndarray:
    """Bytes that each of the first devices sends to each other in a step: [from, to].

    Rings send to the next device of their group; an all-to-all sends each its part.
    """
    config, placement = scored.configuration, scored.placement
    micro_batches = config.micro_batches(global_batch)
    total = np.zeros((devices, devices))
    for sent, times in (
        *(
            (s, micro_batches * config.stage_layers(model))
            for s in traffic.of_layer(model, config, stack)
        ),
        *((s, micro_batches) for s in traffic.of_tables(model, config, stack)),
        *((s, micro_batches * config.interleave) for s in traffic.of_stage(model, config, stack)),
        *((s, 1) for s in traffic.of_step(model, config, stack, micro_batches)),
    ):
        each = sent.sent_bytes * sent.count * times
        for device in range(devices):
            for peer, share in _receivers(sent, placement, device).items():
                if peer < devices:
                    total[device, peer] += share * each
    return total


def _receivers(sent: Sent, placement: Placement, device: int) -> dict[int, float]:
    """Return who receives what share of the bytes that a device sends."""
    members = placement.members(device, sent.axes)
    rank, size = members.index(device), len(members)
    if sent.term == "pipeline" and sent.phase == "end" and sent.kind == "all-reduce":
        ends = {0: members[-1], size - 1: members[0]}
        return {ends[rank]: 1.0} if rank in ends else {}
    if sent.kind == "all-to-all":
        return {peer: 1 / (size - 1) for peer in members if peer != device}
    step = -1 if sent.kind == PERMUTE and sent.phase == "backward" else 1
    return {members[(rank + step) % size]: 1.0}
