"""Say which equation makes each value of a body, and which ones read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxoverlap._jax import compat


class DefUse:
    """The defining equation and the users of each value of a body, by equation index.

    Attributes:
        eqns: the body's equations.
        made: the index of the equation that makes each value; the body's operands are not in it.
    """

    def __init__(self, eqns: Sequence[Any], outvars: Sequence[Any]):
        self.eqns = eqns
        self.made = {v: position for position, eqn in enumerate(eqns) for v in eqn.outvars}
        self._readers: dict[Any, list[int | None]] = {}
        reads: list[tuple[int | None, Sequence[Any]]] = [
            *((position, eqn.invars) for position, eqn in enumerate(eqns)),
            (None, outvars),
        ]
        for position, atoms in reads:
            for var in compat.variables(atoms):
                self._readers.setdefault(var, []).append(position)

    def maker(self, atom: Any) -> Any:
        """Return the equation that makes a value; None for a literal or an operand of the body."""
        position = None if compat.is_literal(atom) else self.made.get(atom)
        return None if position is None else self.eqns[position]

    def readers(self, var: Any) -> Sequence[int | None]:
        """Return the indices of the equations that read a value; None where the body returns it."""
        return self._readers.get(var, ())

    def only_reader(self, var: Any) -> int | None:
        """Return the index of the only equation that reads a value.

        None if nothing or several equations read it, or the body returns it.
        """
        readers = self.readers(var)
        return readers[0] if len(readers) == 1 else None
