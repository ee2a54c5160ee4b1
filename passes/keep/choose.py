"""Choose the values to keep that save most within some bytes: exactly, as an integer program.

A computation's instructions either run again or do not. One runs if something that runs reads it
and it is not kept, so with a 0 or 1 for each value (kept on the device, or offloaded to the host's
memory), and for each instruction (it runs):

    least  sum(seconds * runs) + sum(keeping_s * kept + offloading_s * offloaded) + exposed
    with   runs[i] >= runs[j] - kept[i] - offloaded[i]   where j reads i,   runs[end] = 1,
           kept[i] + offloaded[i] <= 1,
           sum(bytes * kept) + sum(ahead_bytes * offloaded) <= room,
           exposed >= sum(copy_s * offloaded) - hiding_s   in each computation

It is Checkmate's program (Jain et al., arXiv 1910.02653) for one forward and one backward pass, in
which what is kept is kept for all of the time between; HiGHS solves it. The host's link as a third
choice is POET's (Patil et al., arXiv 2207.07697), by its capacity only. Values of equal layers are
one variable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jaxoverlap.passes.keep.price import Place, Priced

Groups = Mapping[Place, int]
"""The number of the decision that each place belongs to."""


class SavedValues(NamedTuple):
    """The numbers of the decisions to save values.

    Attributes:
        kept: those of values that stay on the device.
        offloaded: those of values that wait in the host's memory.
    """

    kept: frozenset[int]
    offloaded: frozenset[int]


def chosen(
    computations: Sequence[Priced],
    groups: Groups,
    room: float,
    always: Collection[int] = (),
    never: Collection[int] = (),
    offloadable: Collection[int] = (),
) -> SavedValues:
    """Choose which values to keep, and which to offload.

    Args:
        computations: those that compute values again.
        groups: the decision that each value belongs to, counted from 0.
        room: bytes of the device that may be used.
        always, never: decisions that the user has made; what is always kept is not offloaded.
        offloadable: decisions of values that may be offloaded.
    """
    count = 1 + max(groups.values(), default=-1)
    program = _Program()
    kept, offloaded = program.variables(count), program.variables(count)
    for one in computations:
        _add(program, one, groups, kept, offloaded)
    program.fixed |= dict.fromkeys((kept[n] for n in always), 1)
    no = {offloaded[n] for n in range(count) if n not in offloadable or n in always}
    program.fixed |= dict.fromkeys(no | {way[n] for n in never for way in (kept, offloaded)}, 0)
    memory = dict[int, float]()
    for one in computations:
        for place in one.values:
            for way, sizes in ((kept, one.bytes), (offloaded, one.ahead_bytes)):
                at = way[groups[place]]
                memory[at] = memory.get(at, 0.0) + sizes[place]
    needed = sum(memory.get(kept[n], 0.0) for n in always)
    program.at_most(memory, max(room, needed))
    for n in range(count):
        program.at_most({kept[n]: 1.0, offloaded[n]: 1.0}, 1.0)
    found = program.solved(integers=2 * count)  # what runs follows from these
    return SavedValues(
        *(frozenset(n for n in range(count) if found[way[n]]) for way in (kept, offloaded))
    )


def _add(
    program: _Program, one: Priced, groups: Groups, kept: Sequence[int], offloaded: Sequence[int]
) -> None:
    """Add what a computation runs again, and what its copies expose."""
    runs = program.variables(len(one.seconds), one.seconds)
    by_index = {at: groups[place] for place, at in one.values.items()}
    for place in one.values:
        program.costs[kept[groups[place]]] += one.keeping_s[place]
        program.costs[offloaded[groups[place]]] += one.offloading_s[place]
    for reader, needs in enumerate(one.needs):
        for at in needs:
            saved = [way[by_index[at]] for way in (kept, offloaded)] if at in by_index else []
            program.at_most({runs[reader]: 1.0, runs[at]: -1.0, **dict.fromkeys(saved, -1.0)}, 0.0)
    program.fixed |= dict.fromkeys((runs[end] for end in one.ends), 1)
    (exposed,) = program.variables(1, [1.0], most=np.inf)
    copies = dict[int, float]()
    for place, seconds in one.copy_s.items():
        at = offloaded[groups[place]]
        copies[at] = copies.get(at, 0.0) + seconds
    program.at_most({**copies, exposed: -1.0}, one.hiding_s)


class _Program:
    """A linear program in which some variables are integers."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.most: list[float] = []
        self.fixed: dict[int, float] = {}
        self._rows: list[tuple[Mapping[int, float], float]] = []

    def variables(
        self, count: int, costs: Sequence[float] = (), *, most: float = 1.0
    ) -> Sequence[int]:
        """Add variables from 0 to `most`; return their indices."""
        first = len(self.costs)
        self.costs += costs or [0.0] * count
        self.most += [most] * count
        return range(first, first + count)

    def at_most(self, row: Mapping[int, float], limit: float) -> None:
        """Limit a sum of variables times numbers."""
        self._rows.append((row, limit))

    def solved(self, integers: int) -> list[bool]:
        """Return which of the first variables are 1; these are integers."""
        entries = [(n, at, x) for n, (row, _) in enumerate(self._rows) for at, x in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self._rows), len(self.costs)))
        least, most = np.zeros(len(self.costs)), np.array(self.most)
        for at, value in self.fixed.items():
            least[at] = most[at] = value
        bounds: Any = Bounds(least, most)  # type: ignore[arg-type]  # its stubs have numbers alone
        most_of_rows: Any = np.array([limit for _, limit in self._rows])
        limits = LinearConstraint(matrix, ub=most_of_rows)
        are_integers = np.arange(len(self.costs)) < integers
        found = milp(self.costs, integrality=are_integers, bounds=bounds, constraints=limits)
        assert found.x is not None, found.message  # keeping nothing but that is allowed
        return [bool(x > 0.5) for x in found.x[:integers]]
