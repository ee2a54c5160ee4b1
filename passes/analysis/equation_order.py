"""The order in which the equations of one body may stand, when some of them are to become one."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from jaxoverlap._jax import compat


class EquationOrder:
    """The dependencies between the equations of a body, some of which are merged into groups.

    Positions are equations' indices in the body; a merged group goes by its first position.

    The groups have numbers that respect every dependency, so what a request could turn into a
    circle lies between two numbers, and only that is looked at and numbered anew (Pearce and Kelly,
    "A dynamic topological sort algorithm for directed acyclic graphs", JEA 11, 2006).
    """

    def __init__(self, eqns: Sequence[Any]):
        made: dict[Any, int] = {}
        self._before: list[set[int]] = []
        last_effect = None
        for position, eqn in enumerate(eqns):
            before = {made[v] for v in eqn.invars if not compat.is_literal(v) and v in made}
            if compat.ordered_effects(eqn):  # these keep their order; collectives may move
                before |= {last_effect} - {None}  # type: ignore[arg-type]
                last_effect = position
            self._before.append(before)  # type: ignore[arg-type]
            made.update(dict.fromkeys(eqn.outvars, position))
        self._after: list[set[int]] = [set() for _ in self._before]
        for position, needs in enumerate(self._before):
            for need in needs:
                self._after[need].add(position)
        self._first = list(range(len(eqns)))
        self._positions = [
            [position] for position in range(len(eqns))
        ]  # of each group, by its first place
        self._number = list(range(len(eqns)))

    def merge(self, *positions: int) -> bool:
        """Merge several equations into one group; return False, changing nothing, at a cycle."""
        groups = {self._first[p] for p in positions}
        if len(groups) == 1:
            return True
        numbers = [self._number[group] for group in groups]
        sides = self._apart(
            self._beside(groups, self._after),
            self._beside(groups, self._before),
            (min(numbers), max(numbers)),
        )
        if sides is None:
            return False
        first = min(groups)
        for group in groups - {first}:
            for position in self._positions[group]:
                self._first[position] = first
            self._positions[first] += self._positions[group]
            self._positions[group] = []
        needed, waiting = sides
        self._renumber(needed, [first], waiting, numbers)
        return True

    def put_after(self, position: int, later: int) -> bool:
        """Make `later` wait for `position`; return False if they are merged or it makes a cycle."""
        needed, waiting = self._first[position], self._first[later]
        if needed == waiting:
            return False
        low, high = self._number[waiting], self._number[needed]
        if low < high:
            sides = self._apart({waiting}, {needed}, (low, high))
            if sides is None:
                return False
            self._renumber(sides[0], [], sides[1], [])
        self._before[later].add(position)
        self._after[position].add(later)
        return True

    def first(self, position: int) -> int:
        """Return the first position of the group that a position is merged into."""
        return self._first[position]

    def positions(self) -> list[int]:
        """Return the first positions of all groups, in an order that respects every dependency.

        Where there is a choice, the one written first comes first.
        """
        groups = [first for first, positions in enumerate(self._positions) if positions]
        after = {group: self._beside([group], self._after) for group in groups}
        waits = dict.fromkeys(groups, 0)
        for group in groups:
            for later in after[group]:
                waits[later] += 1
        ready = [group for group in groups if not waits[group]]  # sorted, so it is a heap
        order = []
        while ready:
            order.append(heapq.heappop(ready))
            for later in after[order[-1]]:
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(ready, later)
        assert len(order) == len(groups), "merge and put_after refuse circles"
        return order

    def _beside(self, groups: Iterable[int], edges: Sequence[set[int]]) -> set[int]:
        """Return the groups one edge away from `groups`, without these."""
        near = {
            self._first[p]
            for g in groups
            for position in self._positions[g]
            for p in edges[position]
        }
        return near.difference(groups)

    def _apart(
        self, waiting: set[int], needed: set[int], window: tuple[int, int]
    ) -> tuple[set[int], set[int]] | None:
        """Return the groups that must come earlier and those that must come later, within a window.

        Two searches take turns: where one group waits for another, it mostly does so by way of a
        few, and then they soon meet.

        Args:
            waiting: groups that have to come later, with all that waits for them.
            needed: groups that have to come earlier, with all that they wait for.
            window: the lowest and the highest number to look at.

        Returns:
            Both sets; None if a group would be in both.
        """

        def inside(groups: set[int]) -> set[int]:
            return {g for g in groups if window[0] <= self._number[g] <= window[1]}

        sides = (inside(waiting), self._after), (inside(needed), self._before)
        (late, _), (early, _) = sides
        queues = [deque(reached) for reached, _ in sides]
        if not late.isdisjoint(early):
            return None
        while any(queues):
            for queue, (reached, edges), (other, _) in zip(queues, sides, sides[::-1], strict=True):
                if not queue:
                    continue
                new = inside(self._beside([queue.popleft()], edges)) - reached
                if not new.isdisjoint(other):
                    return None
                reached |= new
                queue.extend(new)
        return early, late

    def _renumber(
        self, needed: set[int], merged: list[int], waiting: set[int], also: Sequence[int]
    ) -> None:
        """Renumber the needed groups, then the merged ones, then the waiting ones.

        Args:
            also: numbers that are free, beside those that these groups have.
        """
        early, late = (sorted(groups, key=self._number.__getitem__) for groups in (needed, waiting))
        free = sorted({*also, *(self._number[group] for group in (*early, *late))})
        for group, number in zip((*early, *merged), free, strict=False):
            self._number[group] = number
        for group, number in zip(reversed(late), reversed(free), strict=False):
            self._number[group] = number
