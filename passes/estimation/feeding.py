"""Choose which task computes next: the one that leads to the start of a collective soonest.

Two parts of a split batch run through the same layers. If the task with the longest path to the end
always ran first, the parts would advance in lockstep, as the part that is behind has the longer
path; their collectives would then start together, with no kernel to hide behind. Here the task
nearest to the start of its next collective runs first, so that one part runs ahead and computes
while the other part's collective is in flight. (A start is the first of the two HLO instructions of
an asynchronous collective.)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence


class Feeding:
    """The tasks that are ready and lead to a collective, by the collective."""

    def __init__(self, feeds: Sequence[tuple[int, ...]], seconds: Sequence[float]):
        """Begin before anything has run.

        Args:
            feeds: the starts that each task leads to, with no other start in between.
            seconds: the time that each computes.
        """
        self._feeds, self._seconds = feeds, seconds
        self._ready: dict[int, list[int]] = {}
        self._remaining_s: dict[int, float] = {}  # of compute before each start
        for starts, own_s in zip(feeds, seconds, strict=True):
            for start in starts:
                self._remaining_s[start] = self._remaining_s.get(start, 0.0) + own_s

    def arrive(self, index: int) -> None:
        """Take note that a task could run."""
        for start in self._feeds[index]:
            insort(self._ready.setdefault(start, []), index)

    def run(self, index: int) -> None:
        """Take note that a task has run."""
        for start in self._feeds[index]:
            self._remaining_s[start] -= self._seconds[index]
            if index in (ready := self._ready.get(start, [])):
                ready.remove(index)
                if not ready:
                    del self._ready[start]

    def next(self, fits: Callable[[int], bool]) -> int | None:
        """Return the first task that fits of those before the nearest start; None if none does."""
        nearest = sorted(self._ready, key=lambda start: (self._remaining_s[start], start))
        return next((i for start in nearest for i in self._ready[start] if fits(i)), None)

    def remaining_s(self, index: int) -> float:
        """Return the seconds of compute before the nearest start that a task leads to."""
        return min((self._remaining_s[start] for start in self._feeds[index]), default=math.inf)


def starts_fed(
    flies: Sequence[bool], leads: Sequence[bool], users: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """List for each of some tasks the starts that it leads to, with no other start in between.

    Args:
        flies: whether each task is a start.
        leads: whether the list is wanted for each task; the others get an empty one.
        users: the tasks that need each task; all come after it, so one walk backwards is enough.
    """
    starts = [index for index, is_start in enumerate(flies) if is_start]
    bit = {start: 1 << position for position, start in enumerate(starts)}
    masks = [0] * len(flies)
    for index in reversed(range(len(flies))):
        for user in users[index]:
            masks[index] |= bit[user] if flies[user] else masks[user]
    return [
        tuple(starts[position] for position in _bits(mask)) if wanted else ()
        for mask, wanted in zip(masks, leads, strict=True)
    ]


def _bits(mask: int) -> list[int]:
    """Return the positions of the bits that are set."""
    positions = []
    while mask:
        low = mask & -mask
        positions.append(low.bit_length() - 1)
        mask ^= low
    return positions
