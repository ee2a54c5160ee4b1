"""The order in which the equations of one body may stand, when some of them are to become one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from jaxoverlap import _compat


class Order:
    """Which equations of a body depend on which, and which are merged.

    Places are equations' numbers in the body; a merged group goes by its first place.
    """

    def __init__(self, eqns: Sequence[Any]):
        made: dict[Any, int] = {}
        self._before: list[set[int]] = []
        last_effect = None
        for place, eqn in enumerate(eqns):
            before = {made[v] for v in eqn.invars if not _compat.is_literal(v) and v in made}
            if eqn.effects:  # what has effects stays in the order it was written in
                before |= {last_effect} - {None}  # type: ignore[arg-type]
                last_effect = place
            self._before.append(before)  # type: ignore[arg-type]
            made.update(dict.fromkeys(eqn.outvars, place))
        self._first = list(range(len(eqns)))

    def merge(self, *places: int) -> bool:
        """Make one of several places, unless one would then have to come before itself."""
        first = list(self._first)
        merged = {first[p] for p in places}
        self._first = [min(merged) if f in merged else f for f in first]
        if self._sorted() is None:
            self._first = first
            return False
        return True

    def put_after(self, place: int, later: int) -> bool:
        """Let `later` wait for `place`, unless `place` waits for it."""
        if self._first[place] == self._first[later]:
            return False
        self._before[later].add(place)
        if self._sorted() is None:
            self._before[later].remove(place)
            return False
        return True

    def first(self, place: int) -> int:
        """The first place of the group that a place is merged into."""
        return self._first[place]

    def places(self) -> list[int]:
        """The first places of all groups, in an order that respects every dependency.

        Where there is a choice, the one written first comes first.
        """
        found = self._sorted()
        assert found is not None, "merge and put_after refuse circles"
        return found

    def _sorted(self) -> list[int] | None:
        """A topological order of the groups, or None if they depend on each other in a circle."""
        before: dict[int, set[int]] = {f: set() for f in self._first}
        for place, needs in enumerate(self._before):
            mine = self._first[place]
            before[mine] |= {self._first[n] for n in needs} - {mine}
        after: dict[int, list[int]] = {f: [] for f in before}
        for place, needs in before.items():
            for need in needs:
                after[need].append(place)
        waiting = {place: len(needs) for place, needs in before.items()}
        ready = [place for place, count in waiting.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            place = heapq.heappop(ready)
            found.append(place)
            for later in after[place]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, later)
        return found if len(found) == len(before) else None
