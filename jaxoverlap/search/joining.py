"""Propose XLA options that join the gathers of unrolled layers' weights, and their gradients' sums.

XLA joins collectives up to a size, which it counts in what a device receives: 30 MiB of gathered
weights, a fraction of a layer, and 30 MiB of its part of the gradients, which over 64 devices are 2
GB, the most of a model. So gathers take mostly latency, and the sums of all layers end the step as
one, behind which nothing is left to hide. Layers in a scan have edits for this (`GatherAhead`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags.required import MOST_GATHERED
from jaxoverlap.plan.limits import JOINED_FOR_LATENCIES, LEAST_JOINED
from jaxoverlap.simulation.replay import group_of
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.simulation.timeline import Spent

SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_XLAS_OWN = 30 << 20  # bytes up to which XLA joins by default
_SMALL, _LARGE = 1 << 20, 1 << 30  # bytes, between which a gather's seconds are a straight line


def joining(text: str, cost: CostModel, options: Mapping[str, str]) -> list[dict[str, str]]:
    """Return options to try for a step: none if it has no gathers that they would join.

    A gather of b bytes takes a + b / r seconds; sizes b are a few times a r.

    Args:
        text: the scheduled module of the step.
        cost: the cost model of its cluster.
        options: the options that it was compiled with.
    """
    by_groups: dict[str, list[Spent]] = defaultdict(list)
    for spent in simulate(text, cost).spent:
        if spent.collective.kind == "all-gather" and spent.runs == 1:
            by_groups[spent.collective.groups].append(spent)
    gathers = max(by_groups.values(), key=lambda s: sum(one.seconds for one in s), default=[])
    if len(gathers) < LEAST_JOINED:
        return []
    group = group_of(gathers[0].collective, cost.cluster.num_devices, cost.cluster)
    small_s, large_s = (cost.collective_s("all-gather", b, group) for b in (_SMALL, _LARGE))
    rate = (_LARGE - _SMALL) / (large_s - small_s)
    sizes = (int(times * (small_s * rate - _SMALL)) for times in JOINED_FOR_LATENCIES)
    received = sorted(one.collective.bytes_moved for one in gathers)
    apart = received[0] > int(options.get(MOST_GATHERED, _XLAS_OWN))  # none is of joined ones
    return [
        {MOST_GATHERED: str(size), SCATTERS: str(size // group.size)}
        for size in sizes
        if size >= received[0] + received[1] or not apart
    ]
