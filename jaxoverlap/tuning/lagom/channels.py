"""Choose NCCL's channels for each communication of a compiled step, by Lagom's co-tuning.

The step's communications and kernels are read off its simulated schedule; those of one kind, size
and group together, as NCCL's tuner tells no more apart. The search is
`jaxoverlap.tuning.lagom.search`'s under `jaxoverlap.tuning.lagom.model`'s model, where all
communications run beside all kernels. What it finds is held against NCCL's own channels by
simulating the schedule again, where each has its place.

Of Lagom's resources only the channels are searched, as NCCL can be told no other of one collective
and not of all. No tuner sets threads, and NCCL_NTHREADS is the whole process's; besides, fewer of
them only make a channel slower here. Chunks a tuner can set since NCCL 2.30, but its example has no
column for them; NCCL_BUFFSIZE would cut the pieces of permutes too; and what small chunks gain, the
L2 that they leave, the simulation does not have. Rows that nobody can put into effect would make
the plan's prediction untrue. `benchmarks/search.py` searches all three.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from jaxoverlap.cost.groups import Sent
from jaxoverlap.cost.model import CostModel
from jaxoverlap.cost.nccl import Channels
from jaxoverlap.passes.scheduling.reorder import SAME
from jaxoverlap.plan.channel_row import TUNED, ChannelRow
from jaxoverlap.plan.collectives import KIND_OF, OPCODE_OF
from jaxoverlap.simulation.device_groups import domains
from jaxoverlap.simulation.replay import group_of, replay
from jaxoverlap.simulation.streams import scheduled_module
from jaxoverlap.simulation.timeline import Timeline
from jaxoverlap.tuning.lagom import search
from jaxoverlap.tuning.lagom.model import (
    CHUNK_BYTES,
    Communication,
    Computation,
    Makespan,
    SettingSpace,
)

# NCCL asks its tuner about these only: permutes and exchanges are sends, with their own channels.
_TUNED = tuple(OPCODE_OF[kind] for kind in TUNED)
SPACE = SettingSpace(chunk_bytes=(CHUNK_BYTES,))


@dataclass(frozen=True)
class CoTuned:
    """The result of Lagom's search on a step.

    Attributes:
        rows: channels for NCCL; none where its own channels are as good.
        step: the step with these channels.
        evaluations: number of evaluations of the model.
    """

    rows: tuple[ChannelRow, ...]
    step: Timeline
    evaluations: int


def co_tune(text: str, cost: CostModel) -> CoTuned:
    """Find the channels under which a scheduled module is fastest."""
    module = replace(scheduled_module(text), num_devices=cost.cluster.num_devices)
    step = replay(module, cost)
    sent = _sent(step, cost)
    if not sent:
        return CoTuned((), step, 0)
    problem = Makespan(
        cost,
        tuple(Communication(*one, runs=runs, space=SPACE) for one, (runs, _) in sent.items()),
        _computations(step),
    )
    searched = search.search(problem)
    chosen = [
        (one, SPACE.setting(place)[0], nodes)
        for (one, (_, nodes)), place, usual in zip(
            sent.items(), searched.config, problem.default, strict=True
        )
        if place != usual
    ]
    given = tuple((one, channels) for one, channels, _ in chosen)
    tuned = replay(module, replace(cost, given=given))
    if tuned.step_s >= step.step_s * (1 - SAME):
        return CoTuned((), step, searched.evaluations)
    return CoTuned(tuple(_row(*one) for one in chosen), tuned, searched.evaluations)


def _sent(step: Timeline, cost: CostModel) -> dict[Sent, tuple[int, int | None]]:
    """Map each communication that can be tuned to its runs and the number of its hosts.

    That number is None where it differs: on NVLink within a rack, groups of one kind may span one
    host or more.
    """
    cluster, runs, nodes = cost.cluster, Counter[Sent](), defaultdict[Sent, set[int]](set)
    for event in step.events:
        c = event.collective
        if event.kind != "collective" or c is None or c.kind not in _TUNED:
            continue
        one = c.kind, c.bytes_moved, group_of(c, cluster.num_devices, cluster)
        if one[2].size > 1:
            runs[one] += event.runs
            nodes[one].add(domains(c.groups, cluster.num_devices, cluster.gpus_per_host))
    only = {one: min(hosts) if len(hosts) == 1 else None for one, hosts in nodes.items()}
    return {one: (count, only[one]) for one, count in runs.items()}


def _computations(step: Timeline) -> tuple[Computation, ...]:
    runs_of = Counter()
    for event in step.events:
        if event.kind in ("matmul", "memory"):
            runs_of[event.work] += event.runs
    return tuple(Computation(work, runs) for work, runs in runs_of.items())


def _row(one: Sent, channels: Channels, nodes: int | None) -> ChannelRow:
    kind, moved, group = one
    size = nccl_bytes(kind, moved, group.size)
    return ChannelRow(
        kind=KIND_OF[kind],
        min_bytes=size,
        max_bytes=size,
        channels=channels.count,
        nodes=nodes,
        ranks=group.size,
    )


def nccl_bytes(kind: str, moved: int, ranks: int) -> int:
    """Return the size by which NCCL knows a collective: all that is gathered, scattered or summed.

    Source: ncclFuncMaxSendRecvCount (NVIDIA/nccl@5067397c, src/include/enqueue.h), which gives
    nBytes of getCollInfo. What XLA launches in one NCCL group, as operands of one dtype of a
    collective, NCCL adds up where none is four times as large as another, and asks about once; else
    it asks more than once, and the row for the sum fits none.

    Args:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        moved: bytes that each device sends by a ring, as `simulation.audit.Collective` has them.
    """
    passes = 2 if kind == "all-reduce" else 1
    return -(-moved * ranks // (passes * (ranks - 1)))
