"""Say which values of a body are known: constants, positions, and what is computed of these alone.

i: i32[n] = iota ;  j = add i 1 ;  k: i32[n, 8] = broadcast_in_dim j     # k[p, _] is p + 1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxoverlap._jax import compat

_MOST = 2**24  # elements of a table


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide as XLA does: integers are rounded towards 0."""
    if not np.issubdtype(a.dtype, np.integer):
        return a / b
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "copy": lambda a: a,
    "div": _divided,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "sign": np.sign,
    "sub": np.subtract,
}


def computed(eqn: Any, operands: list[np.ndarray]) -> np.ndarray | None:
    """Return an element-wise equation's result; None for one that is not known.

    Args:
        eqn: the equation.
        operands: its operands; a dim of size 1 stands for one along which all elements are equal.
    """
    dtype = eqn.outvars[0].aval.dtype
    if eqn.primitive.name == "convert_element_type":
        return operands[0].astype(dtype)
    if (fn := _COMPUTED.get(eqn.primitive.name)) is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(fn(*operands)).astype(dtype)


class KnownValues:
    """The known values of a body whose equations are seen in order."""

    def __init__(self) -> None:
        self._tables: dict[Any, np.ndarray] = {}

    def of(self, atom: Any) -> np.ndarray | None:
        """Return a value, with size 1 of each dim along which all elements are equal."""
        if not compat.is_literal(atom):
            return self._tables.get(atom)
        value = np.asarray(atom.val)
        return value if value.ndim == 0 else None

    def see(self, eqn: Any) -> None:
        """Note the result of the next equation."""
        if len(eqn.outvars) != 1 or not isinstance(_dtype(eqn.outvars[0]), np.dtype):
            return
        table = self._made(eqn)
        if table is not None and sum(size > 1 for size in table.shape) <= 1:  # one dim tells
            self._tables[eqn.outvars[0]] = table

    def _made(self, eqn: Any) -> np.ndarray | None:
        (out,), name = eqn.outvars, eqn.primitive.name
        if name == "iota":
            dim, shape = eqn.params["dimension"], [1] * out.aval.ndim
            shape[dim] = out.aval.shape[dim]
            table = np.arange(shape[dim]) if shape[dim] <= _MOST else None
            return None if table is None else table.astype(out.aval.dtype).reshape(shape)
        tables = [table for v in eqn.invars if (table := self.of(v)) is not None]
        if not tables or len(tables) < len(eqn.invars):
            return None
        if name == "broadcast_in_dim":
            shape = [1] * out.aval.ndim
            for dim, to in enumerate(eqn.params["broadcast_dimensions"]):
                shape[to] = tables[0].shape[dim]
            return tables[0].reshape(shape)
        if name in ("reshape", "squeeze"):
            return _reshaped(tables[0], eqn.invars[0].aval.shape, out.aval.shape)
        table = computed(eqn, tables)
        return (
            None
            if table is None
            else table.reshape((1,) * (out.aval.ndim - table.ndim) + table.shape)
        )


def _dtype(var: Any) -> Any:
    return getattr(var.aval, "dtype", None)


def _reshaped(
    table: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]
) -> np.ndarray | None:
    if table.size == 1:
        return table.reshape((1,) * len(after))
    if math.prod(before) > _MOST:
        return None
    made = np.broadcast_to(table, before).reshape(after)
    for dim in range(made.ndim):
        first = made.take([0], dim)
        made = first if (made == first).all() else made
    return made
