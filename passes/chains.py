"""What stands around a matmul that does nothing but move data: constraints and reshards.

    x: [s@model, d] ;  y = sharding_constraint[None, None] x ;  z = dot_general y w

The gather is asked for by the constraint and not by the matmul; whoever looks at `y` alone sees no
collective. Where only matmuls read `y`, they may as well read `x`, and gather it themselves. In the
same way a result that is only resharded may be given as it is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxoverlap import _compat
from jaxoverlap.passes.jaxprs import Body

_MOVES = ("sharding_constraint", "reshard")


class Chains:
    """The reshards of one body."""

    def __init__(self, body: Body):
        self._eqns: Sequence[Any] = body.eqns
        self._made: dict[Any, int] = {}
        self._readers: defaultdict[Any, list[int | None]] = defaultdict(list)
        for place, eqn in enumerate(body.eqns):
            self._made.update((v, place) for v in eqn.outvars)
            for atom in eqn.invars:
                if not _compat.is_literal(atom):
                    self._readers[atom].append(place)
        for atom in body.outvars:
            if not _compat.is_literal(atom):
                self._readers[atom].append(None)

    def origin(self, var: Any) -> Any:
        """What a matmul's operand is made from by nothing but reshards that only matmuls read."""
        if _compat.is_literal(var):
            return var
        while (place := self._made.get(var)) is not None and self._moves(place):
            if not all(self._is_matmul(reader) for reader in self._readers[var]):
                return var
            var = self._eqns[place].invars[0]
        return var

    def end(self, var: Any) -> tuple[Any, tuple[int, ...]]:
        """What a result becomes by nothing but reshards, and their places, if nobody else reads."""
        places: list[int] = []
        while len(readers := self._readers[var]) == 1:
            place = readers[0]
            if place is None or not self._moves(place):
                break
            places.append(place)
            var = self._eqns[place].outvars[0]
        return var, tuple(places)

    def _moves(self, place: int) -> bool:
        return self._eqns[place].primitive.name in _MOVES

    def _is_matmul(self, place: int | None) -> bool:
        if place is None:
            return False
        eqn = self._eqns[place]
        if eqn.primitive.name == "dot_general":
            return True
        return self._moves(place) and all(map(self._is_matmul, self._readers[eqn.outvars[0]]))
