"""Run AutoCCL's coordinate descent, the yardstick of the search, as its code has it, with no GPU.

Source: gbxu/autoccl @ a0bf96bf (NSDI'25), coordinate_descent_job.h. Candidates are spread over the
whole space by a fixed stride; from the best of them the walk asks, along one axis and direction,
for the three nearest that were not tried, moves to the best of these if it is faster, else turns to
the other direction, then to the next axis. Once all have failed in a row it starts again from a
candidate that was not tried, five times at most. Left out: repeats and their mean (there is no
noise), and the distance of the three, which shrinks with the gain (axes here are short).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

Point = tuple[int, ...]
_RESTARTS, _ASKED = 5, 3  # TUNER_RETRY, ACCESS_TOPK
_SAMPLES = 20  # TUNER_PRETRAIN_STEPS
_STEPS = 50  # TUNER_TRAIN_STEPS: rounds of three


def descend(
    axes: Sequence[int], seconds: Callable[[Point], float], *, seed: int
) -> tuple[Point, int]:
    """Find the fastest point on axes of so many settings; say how many points were tried.

    Args:
        seconds: of a point; asked once for each.
        seed: of the restarts.
    """
    return _Descent(axes, seconds, seed).run()


class _Descent:
    def __init__(self, axes: Sequence[int], seconds: Callable[[Point], float], seed: int):
        self.axes, self.seconds = tuple(axes), seconds
        self.tried: dict[Point, float] = {}
        self.random = random.Random(seed)

    def run(self) -> tuple[Point, int]:
        self.sample()
        point = self.best()
        steps = 0
        for restart in range(_RESTARTS + 1):
            steps = self.walk(point, steps)
            start = self.untried()
            if steps >= _STEPS or start is None or restart == _RESTARTS:
                break
            self.ask(start)
            point = start
        return self.best(), len(self.tried)

    def ask(self, point: Point) -> float:
        if point not in self.tried:
            self.tried[point] = self.seconds(point)
        return self.tried[point]

    def best(self) -> Point:
        return min(self.tried, key=lambda p: (self.tried[p], p))

    def sample(self) -> None:
        """Points spread evenly over the space, in order."""
        size = math.prod(self.axes)
        for at in range(0, size, max(1, size // _SAMPLES)):
            self.ask(self.point(at))

    def point(self, at: int) -> Point:
        coordinates = []
        for n in reversed(self.axes):
            at, p = divmod(at, n)
            coordinates.append(p)
        return tuple(reversed(coordinates))

    def walk(self, point: Point, steps: int) -> int:
        """Descend from a point until every axis and direction has failed in a row."""
        moves = list(itertools.product(range(len(self.axes)), (+1, -1)))
        move = failed = 0
        while failed < len(moves) and steps < _STEPS:
            axis, by = moves[move]
            candidates = self.ahead(point, axis, by)
            fastest = min(candidates, key=self.ask, default=point)
            steps += bool(candidates)
            if self.ask(fastest) < self.ask(point):
                point, failed = fastest, 0
            else:
                move, failed = (move + 1) % len(moves), failed + 1
        return steps

    def ahead(self, point: Point, axis: int, by: int) -> list[Point]:
        """List the nearest points ahead that were not tried."""
        last = self.axes[axis] if by > 0 else -1
        ahead = (
            (*point[:axis], to, *point[axis + 1 :]) for to in range(point[axis] + by, last, by)
        )
        return [p for p in ahead if p not in self.tried][:_ASKED]

    def untried(self) -> Point | None:
        size = math.prod(self.axes)
        if len(self.tried) >= size:
            return None
        while (point := self.point(self.random.randrange(size))) in self.tried:
            pass
        return point
