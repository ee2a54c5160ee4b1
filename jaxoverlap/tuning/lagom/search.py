"""Search by Lagom's walk which communication to give more of the chip next, and when to stop.

Published (arXiv 2602.20656): communications run one after the other beside computation, so a step
takes max(X, Y), X the sum of their seconds, Y the computation's, which grows with what they take of
the chip. All start with little. While they are the longer side, the one with the smallest

    H_j = (Y' - Y) / (x_j - x_j')    computation lost for each second that communication j gains

is given the next more, along one axis of its settings after the other (channels, chunk size,
threads). So N communications cost about N walks, where all combinations would be r to the N.

Not published, and reconstructed: where exactly the walk starts, what becomes of an H that is stale
(kept: one measurement a step), and the rule for a step that does not pay (it is taken back, and the
communication goes to its next axis). Where computation is the longer side from the start, as with
NCCL's default, the walk goes down. Ours: that both walks are taken, and the passes over the better
end, which try each axis whole; `benchmarks/search.py` says what each is worth.

Nothing here knows what is measured: a model (`jaxoverlap/tuning/lagom/model.py`), a simulation or a
clock.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

SettingIndex = tuple[int, ...]  # a setting of one communication: its index on each of its axes
Config = tuple[SettingIndex, ...]  # of all communications


@dataclass(frozen=True)
class ModelledStep:
    """The seconds of a step with some settings.

    Attributes:
        communication_s: X, the seconds of all communications.
        computation_s: Y, the seconds of computation, slowed by overlapped communication.
        step_s: Z, the step's seconds, to minimize. max(X, Y) in Lagom's model; never below Y.
        each_s: x, the seconds of each communication.
    """

    communication_s: float
    computation_s: float
    step_s: float
    each_s: tuple[float, ...]

    @property
    def exposed(self) -> bool:
        """Return whether the step waits for communication: X > Y in Lagom's model."""
        return self.step_s > self.computation_s


class SearchProblem(Protocol):
    """A problem that the search can solve: axes, a default, and something that measures."""

    @property
    def axes(self) -> Sequence[Sequence[int]]:
        """The number of settings on each axis of each communication.

        Settings go from the least resources to the most; the first axis is walked first.
        """
        ...

    @property
    def default(self) -> Config:
        """The settings of the communications if nobody chooses."""
        ...

    def measure(self, config: Config) -> ModelledStep:
        """Measure a config; the outcome is the same for the same config."""
        ...


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        config, outcome: the config that was measured, and its outcome.
        walk: the walk's name: "from the least", "from the default", or "pass".
        better: whether the walk went on from here.
    """

    config: Config
    outcome: ModelledStep
    walk: str
    better: bool


@dataclass(frozen=True)
class Solution:
    """The result of a search.

    Attributes:
        config, outcome: the best config that was measured, and its outcome.
        trace: all measurements, in order; no config twice.
    """

    config: Config
    outcome: ModelledStep
    trace: tuple[Measurement, ...]

    @property
    def evaluations(self) -> int:
        """The number of configs measured."""
        return len(self.trace)


def search(
    problem: SearchProblem, *, passes: int = 2, stop: Callable[[], bool] = lambda: False
) -> Solution:
    """Find the settings under which a step is shortest, by Lagom's walk.

    Deterministic. Measures no config twice, the default among them, so the outcome is never worse
    than the default's. For N communications, each of A axes with L settings on all of them
    together, and p passes that is at most 2 + N (2 + 2 L + p (L - A)) configs.

    Args:
        passes: the most passes over the better of both walks' ends; the walks alone are the
            published search.
        stop: called before each measurement but that of the default; once it is true, the search
            ends with the best so far. It serves for a budget of seconds.

    Raises:
        ValueError: if an axis has no settings, or the default is not on the axes.
    """
    _check(problem)
    walk = _Walk(problem, stop)
    default = walk.measure(problem.default, "from the default")
    with contextlib.suppress(_Stopped):
        walk.climb(tuple((0,) * len(axes) for axes in problem.axes), "from the least")
        go = walk.climb if default.exposed else walk.descend
        go(problem.default, "from the default")
        for _ in range(passes):
            if not walk.turn():
                break
    return Solution(walk.best, walk.seen[walk.best], tuple(walk.trace))


class _Stopped(Exception):
    """The signal that the caller's `stop` ends the search."""


def _check(problem: SearchProblem) -> None:
    if any(n < 1 for axes in problem.axes for n in axes):
        raise ValueError(f"axes {problem.axes}: give each axis at least one setting")
    sizes = [tuple(axes) for axes in problem.axes]
    fits = len(sizes) == len(problem.default) and all(
        len(place) == len(axes) and all(0 <= p < n for p, n in zip(place, axes, strict=True))
        for place, axes in zip(problem.default, sizes, strict=True)
    )
    if not fits:
        raise ValueError(f"the default {problem.default} does not lie on axes of {sizes} settings")


class _Walk:
    """The state of a search: the configs measured so far, and the walks among them."""

    def __init__(self, problem: SearchProblem, stop: Callable[[], bool]):
        self.problem, self.stop = problem, stop
        self.seen: dict[Config, ModelledStep] = {}
        self.trace: list[Measurement] = []
        self.best: Config = ()

    def measure(self, config: Config, walk: str, than: ModelledStep | None = None) -> ModelledStep:
        """Measure a config unless known; the walk goes on from it only if it beats `than`."""
        if config not in self.seen:
            if self.seen and self.stop():
                raise _Stopped
            outcome = self.seen[config] = self.problem.measure(config)
            better = than is None or outcome.step_s < than.step_s
            self.trace.append(Measurement(config, outcome, walk, better))
            if not self.best or _key(outcome) < _key(self.seen[self.best]):
                self.best = config
        return self.seen[config]

    def climb(self, config: Config, walk: str) -> None:
        """Add resources where they cost the least computation, while communication is exposed."""
        self._go(config, walk, +1, lambda now: now.exposed, _lost_per_second_gained)

    def descend(self, config: Config, walk: str) -> None:
        """Take resources away where that gains the most computation."""
        self._go(config, walk, -1, lambda now: True, _gained_per_second_lost)

    def _go(
        self,
        config: Config,
        walk: str,
        by: int,
        goes_on: Callable[[ModelledStep], bool],
        priority: Callable[[ModelledStep, ModelledStep, int], float],
    ) -> None:
        now = self.measure(config, walk)
        axis = [0] * len(config)
        heap: list[tuple[float, int]] = []
        if goes_on(now):
            for j in range(len(config)):
                if step := self._step(config, j, axis, by):
                    heap.append((priority(now, self.measure(step, walk, now), j), j))
        heapq.heapify(heap)
        while heap and goes_on(now):
            stale, j = heapq.heappop(heap)
            step = self._step(config, j, axis, by)
            if step is None:
                continue  # all its axes are walked
            then = self.measure(step, walk, now)
            if then.step_s < now.step_s:
                heapq.heappush(heap, (priority(now, then, j), j))
                config, now = step, then
            else:
                axis[j] += 1
                heapq.heappush(heap, (stale, j))

    def _step(self, config: Config, j: int, axis: list[int], by: int) -> Config | None:
        """Return the next step of communication j; move on to its next axis at the end of one."""
        axes = self.problem.axes[j]
        while axis[j] < len(axes):
            if step := _moved(config, j, axis[j], by, axes):
                return step
            axis[j] += 1
        return None

    def turn(self) -> bool:
        """Try all settings on each axis of each communication, from the best; say if it helped.

        It tries all, not the next alone: waves come in whole numbers, so that a channel less may
        only make its window longer, and two less save a wave.
        """
        before = self.best
        for j, axes in enumerate(self.problem.axes):
            for axis, count in enumerate(axes):
                for to in range(count):
                    config = _placed(self.best, j, axis, to)
                    self.measure(config, "pass", self.seen[self.best])
        return self.best != before


def _key(outcome: ModelledStep) -> tuple[float, float]:
    """Return the key to minimize: the step's seconds, then those of computation."""
    return outcome.step_s, outcome.computation_s


def _moved(config: Config, j: int, axis: int, by: int, axes: Sequence[int]) -> Config | None:
    """Move communication j by one setting along an axis; None at the axis's end."""
    to = config[j][axis] + by
    return _placed(config, j, axis, to) if 0 <= to < axes[axis] else None


def _placed(config: Config, j: int, axis: int, to: int) -> Config:
    """Return the config with communication j moved to an index on one of its axes."""
    place = (*config[j][:axis], to, *config[j][axis + 1 :])
    return (*config[:j], place, *config[j + 1 :])


def _lost_per_second_gained(now: ModelledStep, then: ModelledStep, j: int) -> float:
    """Return H_j, of which the smallest comes first; infinite where nothing is gained."""
    gained_s = now.each_s[j] - then.each_s[j]
    return (then.computation_s - now.computation_s) / gained_s if gained_s > 0 else math.inf


def _gained_per_second_lost(now: ModelledStep, then: ModelledStep, j: int) -> float:
    """Return H_j of the way down, negated: what gains the most computation is the smallest."""
    lost_s = then.each_s[j] - now.each_s[j]
    gained_s = now.computation_s - then.computation_s
    if lost_s > 0:
        return -gained_s / lost_s
    return -math.inf if gained_s > 0 else math.inf
