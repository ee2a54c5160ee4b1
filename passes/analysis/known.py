"""Say which values of a body are known: constants, positions, and what is computed of these alone.

i: i32[n] = iota ;  j = add i 1 ;  k: i32[n, 8] = broadcast_in_dim j     # k[p, _] is p + 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import REMATS, Body

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
    """The known values of a body."""

    def __init__(self, eqns: Sequence[Any], given: Mapping[Any, np.ndarray] = MappingProxyType({})):
        """Find them.

        Args:
            eqns: the body's equations.
            given: those of its operands that are known.
        """
        self._tables = {**given}
        for eqn in eqns:
            self._see(eqn)

    def of(self, atom: Any) -> np.ndarray | None:
        """Return a value, with size 1 of each dim along which all elements are equal."""
        if not compat.is_literal(atom):
            return self._tables.get(atom)
        value = np.asarray(atom.val)
        return value if value.ndim == 0 else None

    def _see(self, eqn: Any) -> None:
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


def known_values(every: Sequence[Body]) -> dict[int, KnownValues]:
    """Return the known values of each body of a step, by its index.

    JAX moves what does not change out of a loop's body, which then has it as an operand.

    Args:
        every: the bodies, outer ones first.
    """
    found: dict[int, KnownValues] = {}
    around = {id(eqn): body.index for body in every for eqn in body.eqns}
    for body in every:
        given: dict[Any, np.ndarray] = {}
        if body.around and (outer := around.get(id(body.around[-1]))) is not None:
            pairs = _operands(body.around[-1], body)
            given = {v: table for v, w in pairs if (table := found[outer].of(w)) is not None}
        found[body.index] = KnownValues(body.eqns, given)
    return found


def _operands(eqn: Any, body: Body) -> list[tuple[Any, Any]]:
    """Return the operands of a body that do not change, and those of the equation around it."""
    if eqn.primitive.name not in ("scan", *REMATS) or not body.eqns:
        return []
    (inner,) = compat.jaxprs_in(eqn)
    count = compat.scan_counts(eqn)[0] if eqn.primitive.name == "scan" else len(eqn.invars)
    return list(zip(inner.invars[:count], eqn.invars[:count], strict=True))
