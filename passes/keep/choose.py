"""Choose the values to keep that save most within some bytes: exactly, as an integer program.

A computation's instructions either run again or do not. One runs if something that runs reads it
and it is not kept, so with a 0 or 1 for each value (kept), and for each instruction (it runs):

    least  sum(seconds * runs) + sum(keeping_s * kept)
    with   runs[i] >= runs[j] - kept[i]   where j reads i,   runs[end] = 1,
           sum(bytes * kept) <= room

It is Checkmate's program (Jain et al., arXiv 1910.02653) for one forward and one backward pass, in
which what is kept is kept for all of the time between; HiGHS solves it. Values of equal layers are
one variable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jaxoverlap.passes.keep.price import Place, Priced

Groups = Mapping[Place, int]
"""The number of the decision that each place belongs to."""


def chosen(
    computations: Sequence[Priced],
    groups: Groups,
    room: float,
    always: Collection[int] = (),
    never: Collection[int] = (),
) -> frozenset[int]:
    """Choose which values to keep.

    Args:
        computations: those that compute values again.
        groups: the decision that each value belongs to, counted from 0.
        room: bytes that may be kept.
        always, never: decisions that the user has made.

    Returns:
        The decisions to keep.
    """
    count = 1 + max(groups.values(), default=-1)
    costs, sizes = [0.0] * count, [0.0] * count
    rows: list[tuple[int, int, int]] = []  # the reader, what it reads, and its decision or -1
    ends: list[int] = []
    for one in computations:
        first = len(costs)
        by_index = {at: groups[place] for place, at in one.values.items()}
        for place in one.values:
            costs[groups[place]] += one.keeping_s[place]
            sizes[groups[place]] += one.bytes[place]
        for reader, needs in enumerate(one.needs):
            rows += [(first + reader, first + at, by_index.get(at, -1)) for at in needs]
        ends += [first + end for end in one.ends]
        costs += one.seconds
    entries = [(n, *entry) for n, row in enumerate(rows) for entry in _entries(row)]
    least, most = np.zeros(len(costs)), np.ones(len(costs))
    least[[*ends, *always]] = 1
    most[[*never]] = 0
    limits = [LinearConstraint(_matrix(entries, (len(rows), len(costs))), ub=0)] if rows else []
    own = np.zeros(len(costs))
    own[:count] = sizes
    limits.append(LinearConstraint(own, ub=max(room, sum(sizes[n] for n in always))))
    whole = np.zeros(len(costs))
    whole[:count] = 1  # what runs follows from what is kept
    bounds: Any = Bounds(least, most)  # type: ignore[arg-type]  # its stubs have numbers alone
    found = milp(costs, integrality=whole, bounds=bounds, constraints=limits)
    assert found.x is not None, found.message  # keeping nothing but that is allowed
    return frozenset(n for n in range(count) if found.x[n] > 0.5)


def _entries(row: tuple[int, int, int]) -> list[tuple[int, float]]:
    """Return the coefficients of a row of the inequalities, by variable."""
    reader, read, kept = row
    return [(reader, 1.0), (read, -1.0), *([(kept, -1.0)] if kept >= 0 else [])]


def _matrix(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int]) -> coo_array:
    rows, columns, values = zip(*entries, strict=True)
    return coo_array((values, (rows, columns)), shape=shape)
