"""Time contenders on the hosts of a lab: in turn, run after run, all hosts at once.

A host's side is `interleaved`, called by a function that the lab runs there; the lab's side is
`Timed`, which reads what all hosts gave.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = dict[str, dict[str, list[float]]]  # by contender: seconds and bytes sent of each run


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    barrier: Callable[[], object],
    sent_bytes: Callable[[], int],
) -> Rows:
    """Run each contender in turn, `runs` times round, after one round that is not counted.

    Args:
        contenders: each starts a step and waits until it is done.
        barrier: waits until all hosts are here; not timed.
        sent_bytes: the bytes that this host has sent so far.
    """
    rows: Rows = {name: {"seconds": [], "sent_bytes": []} for name in contenders}
    for turn in range(runs + 1):
        for name, step in contenders.items():
            barrier()
            before, began = sent_bytes(), time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            if turn:
                rows[name]["seconds"].append(seconds)
                rows[name]["sent_bytes"].append(sent_bytes() - before)
    return rows


def turn(
    host: Any,
    run: Callable[[int], object],
    count: int,
    *,
    barrier: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Time some rounds of one contender on one host, after one round that is not counted.

    Args:
        host: the host, which counts the bytes that it has sent.
        run: takes a number of rounds, and returns when they are done.
        count: how many.
        barrier: waits until all hosts are here; not timed.

    Returns:
        The seconds and the bytes sent of a round.
    """
    run(1)
    barrier()
    sent, began = host.sent_bytes(), time.perf_counter()
    run(count)
    seconds = time.perf_counter() - began
    barrier()
    return dict(seconds=seconds / count, sent_bytes=(host.sent_bytes() - sent) / count)


def slowest(hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Put together what `turn` gave on all hosts: a round takes as long as on the slowest."""
    return {name: max(row[name] for row in hosts) for name in ("seconds", "sent_bytes")}


@dataclass(frozen=True)
class Timed:
    """One contender's step on all hosts: a run takes as long as on its slowest host.

    Attributes:
        seconds: of each run.
        sent_bytes: that a host sends in a step, the median over runs and hosts; with headers.
    """

    seconds: tuple[float, ...]
    sent_bytes: float

    @property
    def median_s(self) -> float:
        """Return the median over the runs."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Return (slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


def timed(hosts: Sequence[Mapping[str, Any]]) -> dict[str, Timed]:
    """Put together what `interleaved` gave on all hosts."""
    return {
        name: Timed(
            tuple(map(max, zip(*(rows[name]["seconds"] for rows in hosts), strict=True))),
            statistics.median(b for rows in hosts for b in rows[name]["sent_bytes"]),
        )
        for name in hosts[0]
    }


def hidden(step_s: float, compute_s: float, communication_s: float) -> float:
    """Return the share hidden of what could be: (compute + communication - step) / the smaller.

    One if the step takes as long as the longer of the two, zero if as long as both in turn; below
    zero where it takes longer than that.
    """
    return (compute_s + communication_s - step_s) / min(compute_s, communication_s)
