"""Unions of intervals of time: the only way to add up what runs side by side."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Spans = np.ndarray  # [n, 2] starts and ends, rising, apart from each other


def union(intervals: Iterable[tuple[float, float]] | np.ndarray) -> Spans:
    """Return the union of intervals as disjoint spans [n, 2]; empty intervals vanish."""
    given = np.array(list(intervals), float).reshape(-1, 2)
    given = given[given[:, 1] > given[:, 0]]
    if not len(given):
        return given
    given = given[np.argsort(given[:, 0], kind="stable")]
    reach = np.maximum.accumulate(given[:, 1])
    first = np.r_[True, given[1:, 0] > reach[:-1]]
    last = np.r_[first[1:], True]
    return np.column_stack((given[first, 0], reach[last]))


def length(spans: Spans) -> float:
    """Return the total length of disjoint spans."""
    return float(np.sum(spans[:, 1] - spans[:, 0]))


def within(spans: Spans, start: float, end: float) -> Spans:
    """Clip disjoint spans to the interval between two times."""
    first, last = np.searchsorted(spans[:, 1], start, "right"), np.searchsorted(spans[:, 0], end)
    return np.clip(spans[first:last], start, end)


def without(spans: Spans, taken: Spans) -> Spans:
    """Subtract the spans `taken` from disjoint spans."""
    pieces: list[tuple[float, float]] = []
    for start, end in spans:
        covered = start
        for begin, stop in within(taken, start, end):
            if begin > covered:
                pieces.append((covered, begin))
            covered = stop
        if covered < end:
            pieces.append((covered, end))
    return np.array(pieces, float).reshape(-1, 2)
