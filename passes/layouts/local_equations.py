"""Run equations of a step on a device's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.known import KnownValues

_COMBINED = ("add", "max", "min")


class NotLocalError(Exception):
    """Raised with the reason for which devices cannot sort their own tokens alone."""


@dataclass(frozen=True)
class Tokens:
    """A value with a dim of tokens.

    Attributes:
        dim: the dim.
        is_sorted: whether the tokens are in the order of the sort.
        of_sorted: of a value that is a function of positions, whether these are positions in the
            order of the sort; None for any other value.
        table: [tokens], the value at each position.
        is_alike: whether the positions of each device give the same values.
    """

    dim: int
    is_sorted: bool
    of_sorted: bool | None = None
    table: np.ndarray | None = None
    is_alike: bool = False

    @property
    def refers(self) -> bool:
        """Whether its values say where tokens are."""
        return self.table is not None and not self.is_alike

    @property
    def is_plain(self) -> bool:
        """Whether it is in the order of the tokens, and does not say where some are."""
        return not self.is_sorted and not self.refers


@dataclass(frozen=True)
class LocalEquation:
    """An equation that a device runs on its own tokens.

    Attributes:
        eqn: the equation, with the parameters that it then has.
        operands: the dim of tokens of each operand; None for one that has none.
        results: the same of each result; or the primitive that combines those of all devices.
        sizes: the equations that count the device's own tokens of each expert, for a ragged matmul.
    """

    eqn: Any
    operands: tuple[int | None, ...]
    results: tuple[Tokens | str, ...]
    sizes: tuple[LocalEquation, ...] = ()


def local(
    eqn: Any,
    operands: Sequence[int | None],
    results: Sequence[Tokens | str],
    params: Any = (),
) -> LocalEquation:
    """Return an equation as a device runs it.

    Raises:
        NotLocalError: if nothing combines the devices' results.
    """
    if any(isinstance(how, str) and how not in _COMBINED for how in results):
        raise NotLocalError(f"nothing combines the parts of {eqn.primitive.name}")
    own = eqn.replace(params={**eqn.params, **dict(params)})
    return LocalEquation(own, tuple(operands), tuple(results))


def run(
    equations: Sequence[LocalEquation], values: dict[Any, Any], known: KnownValues, shards: int
) -> None:
    """Run equations on a device's own tokens.

    Args:
        equations: the equations.
        values: what the device has of each value that they read; gets what they make.
        known: the values that are made where they are read.
        shards: among how many devices the tokens are divided.
    """
    for one in equations:
        eqn, own = one.eqn, values
        if one.sizes:  # a device's own: the step may read those of all devices by the same name
            own = dict(values)
            run(one.sizes, own, known, shards)
        operands = [
            made_here(v, dim, known, shards) if compat.is_literal(v) or v not in own else own[v]
            for v, dim in zip(eqn.invars, one.operands, strict=True)
        ]
        if eqn.primitive.name == "sharding_constraint":  # of sorted tokens: XLA chooses
            made = operands
        else:
            made = compat.evaluate_eqn(eqn, operands)
        values.update(zip(eqn.outvars, made, strict=True))


def made_here(atom: Any, dim: int | None, known: KnownValues, shards: int) -> Any:
    """Return a device's part of a known operand."""
    table, shape = known.of(atom), list(atom.aval.shape)
    assert table is not None
    if dim is not None:
        shape[dim] //= shards
    if table.size == 1:
        return jnp.full(shape, table.reshape(())[()], atom.aval.dtype)
    form = position_form(table.reshape(-1))
    assert form is not None
    slots, first = form
    along = next(d for d, size in enumerate(table.shape) if size > 1)
    return jax.lax.broadcasted_iota(atom.aval.dtype, shape, along) // slots + first


def is_made_here(table: np.ndarray | None) -> TypeGuard[np.ndarray]:
    """Return whether a known value is made where it is read: a constant, or positions."""
    if table is None or sum(size > 1 for size in table.shape) > 1:
        return False
    return table.size == 1 or position_form(table.reshape(-1)) is not None


def is_alike(known: KnownValues, atom: Any, dim: int) -> bool:
    """Return whether all elements along a dim of a value are known to be equal."""
    table = known.of(atom)
    return is_made_here(table) and (table.ndim == 0 or table.shape[dim] == 1)


def position_form(table: np.ndarray) -> tuple[int, int] | None:
    """Return a and b of positions `p // a + b`; None for another function of positions p."""
    if not np.issubdtype(table.dtype, np.integer):
        return None
    first = int(table[0])
    slots = int(np.argmax(table != first)) or len(table)
    fits = (table == np.arange(len(table)) // slots + first).all()
    return (slots, first) if fits else None
