"""Look through the constraints and reshards around a matmul, which do nothing but move data.

    x: [s@model, d] ;  y = sharding_constraint[None, None] x ;  z = dot_general y w

The constraint implies the gather, not the matmul: the sharding of `y` shows no collective. Where
only matmuls read `y`, they can read `x` instead, and gather it themselves. In the same way a matmul
can give a result that is only resharded in its final sharding, even if it is transposed before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array, lax

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import Body

_MOVES = ("sharding_constraint", "reshard")
_VIEWS = ("transpose", "convert_element_type")


class End(NamedTuple):
    """The value that a matmul's result becomes after reshards and views.

    Attributes:
        var: its variable.
        positions: the indices of the equations on the way.
        views: those of them that transpose or convert, instead of resharding.
        inside: the variables on the way, the result's own first.
    """

    var: Any
    positions: tuple[int, ...] = ()
    views: tuple[Any, ...] = ()
    inside: tuple[Any, ...] = ()

    @property
    def reshards(self) -> int:
        """Count the reshards among the equations."""
        return len(self.positions) - len(self.views)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the result's dim that each dim of `var` is; () if they are in order."""
        dims: tuple[int, ...] = ()
        for eqn in self.views:
            if eqn.primitive.name == "transpose":
                permutation = eqn.params["permutation"]
                dims = tuple(dims[d] for d in permutation) if dims else tuple(permutation)
        return dims

    def seen(self, value: Array) -> Array:
        """Apply the views to the result, without the resharding."""
        for eqn in self.views:
            if eqn.primitive.name == "transpose":
                value = lax.transpose(value, eqn.params["permutation"])
            elif eqn.primitive.name == "convert_element_type":
                value = lax.convert_element_type(value, eqn.params["new_dtype"])
        return value


class Reshards:
    """The reshards of one body."""

    def __init__(self, body: Body):
        self._uses = body.uses

    def origin(self, var: Any) -> tuple[Any, int]:
        """Follow a matmul's operand back through reshards that only matmuls read.

        Returns:
            Its variable, and how many reshards there are.
        """
        reshards = 0
        while (eqn := self._uses.maker(var)) is not None:
            if not (_moves(eqn) and all(map(self._is_matmul, self._uses.readers(var)))):
                break
            var, reshards = eqn.invars[0], reshards + 1
        return var, reshards

    def end(self, var: Any) -> End:
        """Follow a result to its last reshard, as long as nobody else reads it."""
        end, positions, views, inside = End(var), [], [], []
        while (position := self._uses.only_reader(var)) is not None:
            eqn = self._uses.eqns[position]
            positions.append(position)
            if eqn.primitive.name in _VIEWS:
                views.append(eqn)
            elif not _moves(eqn):
                break
            inside.append(var)
            var = eqn.outvars[0]
            if _moves(eqn):
                end = End(var, tuple(positions), tuple(views), tuple(inside))
        return end

    def _is_matmul(self, position: int | None) -> bool:
        if position is None:
            return False
        eqn = self._uses.eqns[position]
        if eqn.primitive.name == "dot_general":
            return True
        return _moves(eqn) and all(map(self._is_matmul, self._uses.readers(eqn.outvars[0])))


def _moves(eqn: Any) -> bool:
    """Return whether an equation only reshards, within the axes of the step's mesh."""
    if eqn.primitive.name not in _MOVES or compat.states_some(eqn.outvars[0]):
        return False
    return not compat.states_others(eqn)  # as at the edge of explicit_axes
