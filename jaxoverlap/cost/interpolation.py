"""Interpolate measured points: tables of factors, and curves of seconds by bytes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec


class FitError(msgspec.Struct, frozen=True):
    """The error of a fit on held-back measurements: |predicted / measured - 1|.

    Attributes:
        rows: how many measurements were held back.
        mean, median, worst: the error over all of these.
    """

    rows: int
    mean: float
    median: float
    worst: float


def factor(
    knots: Sequence[Sequence[int]], log_factor: Sequence[float], at: Sequence[float]
) -> float:
    """Look a factor up in a table of its logarithms over three dims, the first slowest."""
    places = [position(grid, x) for grid, x in zip(knots, at, strict=True)]
    strides = (len(knots[1]) * len(knots[2]), len(knots[2]), 1)
    interpolated = 0.0
    for corner in itertools.product((0, 1), repeat=3):
        weight, index = 1.0, 0
        for (low, share), up, stride in zip(places, corner, strides, strict=True):
            weight *= share if up else 1 - share
            index += (low + up) * stride
        if weight:
            interpolated += weight * log_factor[index]
    return math.exp(interpolated)


def position(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The knot at or below x, and x's share of the way to the next, by logarithms; clamped."""
    low = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    share = math.log(x / knots[low]) / math.log(knots[low + 1] / knots[low])
    return low, min(max(share, 0.0), 1.0)


class Curve(msgspec.Struct, frozen=True):
    """Seconds of one collective among so many devices of one NVLink domain, by bytes.

    Attributes:
        bytes_moved: what each device sends, rising.
        seconds: how long that takes.
    """

    bytes_moved: tuple[float, ...]
    seconds: tuple[float, ...]

    def scaled(self, times: float, added_s: float = 0.0) -> Curve:
        """Return the curve with `added_s` added to each message, and then so many times longer."""
        return Curve(self.bytes_moved, tuple(times * (added_s + s) for s in self.seconds))

    @property
    def floor_s(self) -> float:
        """Return the seconds of the smallest message."""
        return self.seconds[0]

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second that each device sends in the largest message."""
        return self.bytes_moved[-1] / self.seconds[-1]

    @property
    def last_bytes_per_s(self) -> float:
        """Return the rate of the bytes that the largest message has over the next smaller one.

        The largest message's average rate where those bytes took no time, as in noisy measurements.
        """
        moved, seconds = (values[-1] - values[-2] for values in (self.bytes_moved, self.seconds))
        return moved / seconds if seconds > 0 else self.bytes_per_s

    def at(self, bytes_moved: float) -> float:
        """Interpolate between measured sizes by logarithms; above, add bytes at the last rate."""
        if bytes_moved <= self.bytes_moved[0]:
            return self.floor_s
        if bytes_moved >= self.bytes_moved[-1]:
            return self.seconds[-1] + (bytes_moved - self.bytes_moved[-1]) / self.last_bytes_per_s
        low, share = position(self.bytes_moved, bytes_moved)
        return self.seconds[low] ** (1 - share) * self.seconds[low + 1] ** share
