"""Name the tools of this library that a configuration uses, with the seconds that each saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxoverlap.cost.groups import Group
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.search import Scored, Space, search

_SLOW_SUMS = 0.1  # of a step: exposed network collectives from which on less traffic is advised
_BETWEEN = 12  # steps between local updates, as docs/local_updates.md has them


def tools(
    times: IterationTime, best: Scored, without: Scored | None, space: Space
) -> Iterator[str]:
    """Yield what of this library the first configuration uses.

    Args:
        times: estimates the steps of the ranking.
        best: the first configuration.
        without: the fastest without `jaxoverlap.overlap`; None where nothing is overlapped.
        space: the space of the search.
    """
    if without is not None:
        yield overlap_line(best, without)
    if best.configuration.pipeline > 1:
        yield "jaxoverlap.pipeline.value_and_grad: its stages (docs/configure.md)"
    if best.configuration.context > 1:
        yield "jaxoverlap.train.varlen, if the lengths of sequences vary (docs/varlen.md)"
    yield from _less_traffic(times, best, space)


def overlap_line(best: Scored, without: Scored) -> str:
    """Return the seconds with `jaxoverlap.overlap`, and without it on the best mesh."""
    where = "this mesh" if without.placement == best.placement else "the best mesh"
    return (
        f"jaxoverlap.overlap(step): {best.step_s:.3g} s (estimated)\n"
        f"  without it: {without.step_s:.3g} s by XLA's best published options, on {where}:\n"
        f"  {without.shown}"
    )


def _less_traffic(times: IterationTime, best: Scored, space: Space) -> Iterator[str]:
    """Yield advice where the network exposes much of a step: local updates, compression."""
    terms, placement = best.terms, best.placement
    far = {
        "data": placement.group("data", "context", "expert").domains > 1,
        "fsdp": placement.group("fsdp").domains > 1,
    }
    exposed = {name: getattr(terms, name) for name, is_far in far.items() if is_far}
    seconds = sum(exposed.values())
    if seconds <= _SLOW_SUMS * best.step_s:
        return
    text = (
        f"{' and '.join(exposed)} on the network take {seconds:.3g} s of {best.step_s:.3g}: "
        "compress gradients\n  (docs/compression.md)"
    )
    rounds = _local_updates(times, space)
    if rounds and rounds[1] < best.step_s:
        workers, step_s = rounds
        text += (
            f" or train {workers} workers with local updates every {_BETWEEN} steps, "
            f"{step_s:.3g} s a step\n  (docs/local_updates.md)"
        )
    yield text + "; both change what is learnt, as these pages say"


def _local_updates(times: IterationTime, space: Space) -> tuple[int, float] | None:
    """Return the workers of local updates and their seconds of a step; None if none fits.

    A worker has as few hosts as hold the model; the average over workers comes every so many steps.
    """
    cluster = times.cost.cluster
    for hosts in (n for n in range(1, cluster.num_hosts) if cluster.num_hosts % n == 0):
        workers = cluster.num_hosts // hosts
        if times.global_batch % workers:
            continue
        small = replace(cluster, num_hosts=hosts)
        alone = IterationTime(
            times.model,
            replace(times.cost, cluster=small),
            times.stack,
            global_batch=times.global_batch // workers,
        )
        if best := search(times.model, small, alone, space=replace(space, axes={}), keep=1).best:
            each = times.stack.reduced_bytes * times.model.params / small.num_devices
            sent = int(2 * each * (workers - 1) / workers)
            average_s = times.cost.collective_s("all-reduce", sent, Group(workers, workers))
            return workers, best[0].step_s + average_s / _BETWEEN
    return None
