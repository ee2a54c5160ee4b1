"""Choose which task computes next: the one that leads to the start of a collective soonest.

Where a batch is split in two, both parts run through the same layers, and the kernels of one are to
hide the collectives of the other. If the task with the longest path to the end always ran first,
the parts would advance in lockstep, as the part that is behind has the longer path; their
collectives would then start together, with no kernel to hide behind. Here the task nearest to the
start of its next collective runs first, so that one part runs ahead and computes while the other
part's collective is in flight. (A start is the first of the two HLO instructions of an asynchronous
collective.)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


class NearestCollective:
    """The tasks that are ready and lead to a collective, and which of them is nearest to one.

    A task of an unrolled step leads to hundreds of starts, so what is known of starts is in arrays.
    """

    def __init__(self, feeds: Feeds, seconds: Sequence[float]):
        """Begin before anything has run.

        Args:
            feeds: the starts that each task leads to, with no other start in between.
            seconds: the time that each computes.
        """
        self._seconds = seconds
        self._feeds, self._masks = feeds.positions, feeds.masks
        self._remaining_s = np.zeros(feeds.count)  # of all tasks left that lead to each start
        self._ready_feeders = np.zeros(feeds.count, int)  # ready tasks that lead to each start
        self._ready: list[int] = []  # tasks
        for fed, own_s in zip(self._feeds, seconds, strict=True):
            if own_s and fed.size:
                self._remaining_s[fed] += own_s

    def arrive(self, index: int) -> None:
        """Take note that a task could run."""
        if self._feeds[index].size:
            insort(self._ready, index)
            self._ready_feeders[self._feeds[index]] += 1

    def run(self, index: int) -> None:
        """Take note that a task has run."""
        fed = self._feeds[index]
        if not fed.size:
            return
        if own_s := self._seconds[index]:
            self._remaining_s[fed] -= own_s
        at = bisect_left(self._ready, index)
        if at < len(self._ready) and self._ready[at] == index:
            del self._ready[at]
            self._ready_feeders[fed] -= 1

    def next(self, fits: Callable[[int], bool]) -> int | None:
        """Return the first ready task that fits of those before the nearest start.

        The first is so in XLA's order; if none of them fits, the next start's count. None if no
        ready task fits.

        Args:
            fits: whether a task stays under the ceiling of memory.
        """
        if not self._ready:
            return None
        ready_s = np.where(self._ready_feeders > 0, self._remaining_s, np.inf)
        nearest = int(ready_s.argmin())
        for index in self._ready:
            if self._masks[index] >> nearest & 1 and fits(index):
                return index
        fitting = [index for index in self._ready if fits(index)]
        return min(fitting, key=self._nearest, default=None)

    def _nearest(self, index: int) -> tuple[float, int]:
        """Return the seconds before the nearest start that a task leads to, and which one it is."""
        fed = self._feeds[index]
        first = int(self._remaining_s[fed].argmin())
        return float(self._remaining_s[fed[first]]), int(fed[first])

    def remaining_s(self, index: int) -> float:
        """Return the seconds of compute before the nearest start that a task leads to."""
        return float(self._remaining_s[self._feeds[index]].min(initial=math.inf))


@dataclass(frozen=True)
class Feeds:
    """The starts that each task leads to, with no other start in between.

    Attributes:
        count: the number of starts.
        masks: for each task a bit for each start, in XLA's order.
        positions: the same as numbers of the starts.
    """

    count: int
    masks: Sequence[int]
    positions: Sequence[np.ndarray]


def starts_fed(
    is_start: Sequence[bool], wanted: Sequence[bool], users: Sequence[Sequence[int]]
) -> Feeds:
    """Find for each of some tasks the starts that it leads to.

    Args:
        is_start: whether each task is a start.
        wanted: whether the starts are wanted for each task; the others get none.
        users: the tasks that need each task; all come after it, so one walk backwards is enough.
    """
    starts = [index for index, starts_here in enumerate(is_start) if starts_here]
    bit = {start: 1 << position for position, start in enumerate(starts)}
    masks = [0] * len(is_start)
    for index in reversed(range(len(is_start))):
        for user in users[index]:
            masks[index] |= bit[user] if is_start[user] else masks[user]
    masks = [mask if listed else 0 for mask, listed in zip(masks, wanted, strict=True)]
    return Feeds(len(starts), masks, [_positions(mask) for mask in masks])


_NONE = np.zeros(0, int)


def _positions(mask: int) -> np.ndarray:
    """Return the positions of the bits that are set."""
    if not mask:
        return _NONE
    octets = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))
