"""Say whether a candidate fits a device's memory, by its partitioned program."""

from __future__ import annotations

from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.layouts.memory import argument_bytes
from jaxoverlap.plan.edits import MakeRing
from jaxoverlap.plan.limits import (
    LAYERS_AHEAD_MEMORY,
    LAYOUT_MEMORY,
    SMALL_MEMORY,
    SPLIT_MEMORY,
    UNROLLED_MEMORY,
    XLA_MEMORY_SHARE,
)
from jaxoverlap.search.candidate import Candidate


def layout_fits(cost: CostModel, made: Candidate) -> str:
    """Return why a candidate needs too much memory for a layout or the like; empty if not."""
    return _more_than(LAYOUT_MEMORY, cost, made)


def split_fits(cost: CostModel, made: Candidate) -> str:
    """Return why the parts of a batch need too much memory; empty if they do not."""
    return _more_than(SPLIT_MEMORY, cost, made)


def unrolled_fits(cost: CostModel, made: Candidate) -> str:
    """Return why XLA has no memory for unrolled scans; empty if it has.

    XLA gathers the weights of both steps of a scan at once, which the estimate does not see: the 7B
    step of the suite then needs a fifth more.
    """
    arguments = argument_bytes(made.known.program.module)
    temporaries = made.evaluation.peak_bytes - arguments
    if arguments + temporaries * UNROLLED_MEMORY <= _most_bytes(cost):
        return ""
    return f"they may need {UNROLLED_MEMORY:g} times {human_bytes(made.evaluation.peak_bytes)}"


def ahead_fits(cost: CostModel, made: Candidate) -> str:
    """Return why XLA has no memory for layers gathered ahead; empty if it has."""
    early = made.known.program.joined_bytes or not made.has(MakeRing)
    if not early or made.evaluation.peak_bytes <= _most_bytes(cost):
        return ""
    return _more_than(LAYERS_AHEAD_MEMORY, cost, made)


def _more_than(times: float, cost: CostModel, made: Candidate) -> str:
    before, after = made.line[0].evaluation.peak_bytes, made.evaluation.peak_bytes
    small = cost.cluster.chip.memory_bytes * SMALL_MEMORY
    if after <= max(before * times, before + small):
        return ""
    return f"they need about {human_bytes(after)} of memory, the plain step {human_bytes(before)}"


def _most_bytes(cost: CostModel) -> float:
    return cost.cluster.chip.memory_bytes * XLA_MEMORY_SHARE
