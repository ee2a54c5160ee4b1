"""Choose the program of each trial step, and see when the order of the programs is clear.

Programs take turns, so that other load meets all alike; the first step of each is not counted (a
communicator, kernels loaded lazily). A program leaves the race once it is not 1% faster than the
fastest, by twice the standard error of the difference of medians (1.25 times that of means, if
noise is normal). Noise is estimated from all programs together, as a share of each one's median.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

WORTH = 0.01  # of a step: what is closer than this is equal
_UNCOUNTED, _LEAST = 1, 3  # steps of each program
_LEAST_NOISE = 0.002  # of a step's time: three steps may agree by chance
_MEDIANS_ERROR, _NORMAL = 1.25, 1.4826  # of means' error; of a median deviation


class Race:
    """The trial steps of some programs.

    Each number that `next` returns is given back with its seconds, by `put`, some steps later where
    there are many processes; or `skip` is called, if the step failed.
    """

    def __init__(self, programs: Sequence[int], most: int):
        self._left = list(programs)[: max(1, most // (_UNCOUNTED + 2))]
        self._most, self._begun, self._ended = most, 0, 0
        self._times: dict[int, list[float]] = {program: [] for program in self._left}
        self._turn = list[int]()
        self._rounds = itertools.count()

    @property
    def winner(self) -> int | None:
        """The fastest program; None while that is not clear."""
        if len(self._left) == 1:
            return self._left[0]
        if self._begun < self._most or self._ended < self._begun:
            return None
        return min(self._left, key=self._median)

    @property
    def seconds(self) -> Mapping[int, Sequence[float]]:
        """The seconds that count, by program."""
        return {program: times[_UNCOUNTED:] for program, times in self._times.items()}

    def next(self) -> int | None:
        """Return the program of the next trial step; None if there are no more."""
        if self._begun >= self._most or self.winner is not None:
            return None
        self._turn = [program for program in self._turn if program in self._left]
        if not self._turn:
            self._turn = self._left[:: -1 if next(self._rounds) % 2 else 1]
        self._begun += 1
        return self._turn.pop(0)

    def put(self, program: int, seconds: float) -> None:
        """Take the seconds of a trial step."""
        self._ended += 1
        self._times[program].append(seconds)
        self._leave_behind()

    def skip(self) -> None:
        """Take note of a trial step that failed, which has no seconds."""
        self._ended += 1

    def drop(self, program: int) -> None:
        """Take a program out that failed."""
        self._left = [one for one in self._left if one != program]

    def _median(self, program: int) -> float:
        return statistics.median(self.seconds[program] or (math.inf,))

    def _leave_behind(self) -> None:
        """Take out the programs that are no faster than the fastest one."""
        counted = {program: self.seconds[program] for program in self._left}
        if min(map(len, counted.values())) < _LEAST:
            return
        fastest = min(self._left, key=self._median)
        off = list[float]()
        for program, times in counted.items():
            median = self._median(program)
            off += sorted(abs(s / median - 1) for s in times)[1:]  # one of an odd number is 0
        noise = max(_LEAST_NOISE, _NORMAL * statistics.median(off))

        def is_behind(program: int) -> bool:
            counts = (1 / len(counted[one]) for one in (program, fastest))
            error = _MEDIANS_ERROR * noise * math.sqrt(sum(counts))
            return self._median(program) / self._median(fastest) - 1 + WORTH > 2 * error

        self._left = [one for one in self._left if one == fastest or not is_behind(one)]
