"""Unions of intervals, against a grid of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.profiling.intervals import length, union, within, without

SIZE = 40
INTERVALS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12)


def cells(intervals) -> np.ndarray:
    """Mark the unit cells that some interval covers."""
    marked = np.zeros(SIZE, bool)
    for start, end in np.asarray(intervals, int).reshape(-1, 2):
        marked[start:end] = True
    return marked


@given(INTERVALS)
def test_a_union_covers_what_its_intervals_do(intervals):
    spans = union(intervals)
    assert (cells(spans) == cells(intervals)).all()
    assert length(spans) == cells(intervals).sum()
    assert (spans[1:, 0] > spans[:-1, 1]).all()  # apart from each other: none is counted twice


@given(INTERVALS, INTERVALS)
def test_without_leaves_what_is_in_the_first_alone(one, other):
    left = without(union(one), union(other))
    assert (cells(left) == (cells(one) & ~cells(other))).all()
    assert length(left) == (cells(one) & ~cells(other)).sum()


@given(INTERVALS, st.integers(0, SIZE), st.integers(0, SIZE))
def test_within_cuts_at_both_ends(intervals, a, b):
    start, end = sorted((a, b))
    window = cells([(start, end)])
    assert length(within(union(intervals), start, end)) == (cells(intervals) & window).sum()
