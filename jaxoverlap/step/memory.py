"""Say whether a candidate fits a device's memory, by its partitioned program."""

from __future__ import annotations

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.layouts.memory import argument_bytes, estimated_peak_bytes
from jaxoverlap.plan.limits import (
    LAYERS_AHEAD_MEMORY,
    SPLIT_MEMORY,
    UNROLLED_MEMORY,
    XLA_MEMORY_SHARE,
)


def fits(unrolled: SpmdProgram, cost: CostModel | None) -> bool:
    """Return whether XLA has memory for unrolled scans.

    XLA gathers the weights of both steps of a scan at once, which the estimate does not see: the 7B
    step of the suite then needs a fifth more.
    """
    if cost is None:
        return False
    arguments = argument_bytes(unrolled.module)
    temporaries = estimated_peak_bytes(unrolled.module) - arguments
    return arguments + temporaries * UNROLLED_MEMORY <= _most_bytes(cost)


def exceeds(plain: SpmdProgram, after: SpmdProgram, cost: CostModel) -> bool:
    """Return whether layers gathered ahead need memory that XLA has not."""
    peak = estimated_peak_bytes(after.module)
    if peak <= _most_bytes(cost):
        return False
    return peak > estimated_peak_bytes(plain.module) * LAYERS_AHEAD_MEMORY


def too_large(plain: SpmdProgram, split: SpmdProgram) -> str:
    """Say by how much a split step exceeds the plain step's memory; empty if it does not."""
    before, after = (estimated_peak_bytes(p.module) for p in (plain, split))
    if after <= before * SPLIT_MEMORY:
        return ""
    return f"they need about {human_bytes(after)} of memory, the plain step {human_bytes(before)}"


def _most_bytes(cost: CostModel) -> float:
    return cost.cluster.chip.memory_bytes * XLA_MEMORY_SHARE
