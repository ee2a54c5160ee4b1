"""Copy each shared value once per part, so that XLA does not fuse kernels of different parts.

    z0 = add y0 w ;  z1 = add y1 w

->  v = optimization_barrier w ;  z0 = add y0 w ;  z1 = add y1 v

Where element-wise kernels of two parts read one value, XLA makes them one kernel (sibling fusion),
whose output waits for both parts: they would go in lockstep, and hide nothing. A value with another
name is another one to XLA. Small values and masks are written out for that. A mask that was
broadcast to the batch is broadcast again for each part. Matmuls of all parts read
one value: their weights would be gathered twice. The steps of an unrolled scan get names of their
own for the slices that they recompute from, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.batch import BatchSplit
from jaxoverlap.passes.analysis.jaxprs import REMATS

_SMALL = 1 << 18  # elements of a value that may be written out
_MASK = 1 << 26  # elements of a mask, a byte each: what it masks has more bytes, and rows or heads
_ELEMENTWISE = {"add", "and", "convert_element_type", "not", "or", "select_n", "sub"}
_ELEMENTWISE |= {"eq", "ge", "gt", "le", "lt", "ne"}


class OwnNames:
    """The copies of the undivided values of one body, by part."""

    def __init__(self, eqns: list[Any]):
        """Begin a body.

        Args:
            eqns: its equations, as they are made; those that make other names go to its end.
        """
        self._eqns = eqns
        self._makers: dict[Any, Any] = {}
        self._names: dict[tuple[Any, int], Any] = {}
        self._parts: dict[tuple[Any, int, int], Any] = {}

    def made(self, eqn: Any) -> None:
        """Record an equation on undivided values."""
        if eqn.primitive.name in _ELEMENTWISE or eqn.primitive.name == "broadcast_in_dim":
            self._makers[eqn.outvars[0]] = eqn

    def of(self, whole: Any, part: int, eqn: Any) -> Any:
        """Return the copy of an undivided value that an equation of one part reads."""
        if part == 0 or _contracts(eqn):
            return whole
        return self._named(whole, part, eqn)

    def parts(self, whole: Any, dim: int, split: BatchSplit, like: Any) -> list[Any] | None:
        """Make the parts of a value that repeats along the batch dim, from values without that dim.

        Args:
            whole: the undivided value.
            dim: its batch dim.
            split: the batch split.
            like: an equation that reads a part.

        Returns:
            The parts; None where batch elements differ, or that is not known.
        """
        if compat.is_literal(whole) or not self._repeats(whole, dim):
            return None
        size = split.part(whole.aval.shape[dim])
        return [self._part(whole, dim, size, part, like) for part in range(split.parts)]

    def _repeats(self, atom: Any, dim: int) -> bool:
        """Return whether a value is the same all along a dim, as one that was broadcast is."""
        if compat.is_literal(atom) or not atom.aval.shape:
            return True
        maker = self._makers.get(atom)
        if maker is None or maker.primitive.name not in _ELEMENTWISE:
            return maker is not None and _broadcasts(maker, dim)
        return all(self._repeats(v, dim) for v in maker.invars)

    def _part(self, atom: Any, dim: int, size: int, part: int, like: Any) -> Any:
        """Make one part of a value that is the same all along a dim."""
        if compat.is_literal(atom) or not atom.aval.shape:
            return atom
        if (atom, dim, part) not in self._parts:
            maker = self._makers[atom]
            made, params = compat.sized_var(atom, dim, size), maker.params
            if maker.primitive.name in _ELEMENTWISE:
                invars = [self._part(v, dim, size, part, like) for v in maker.invars]
            else:
                invars = [self._named(v, part, like) if part else v for v in maker.invars]
                params = {**params, "shape": made.aval.shape}
            self._eqns.append(maker.replace(invars=invars, outvars=[made], params=params))
            self._parts[atom, dim, part] = made
        return self._parts[atom, dim, part]

    def _named(self, whole: Any, part: int, like: Any) -> Any:
        size = 0 if compat.is_literal(whole) else getattr(whole.aval, "size", 0)
        if not 1 < size <= (_MASK if whole.aval.dtype == np.bool_ else _SMALL):
            return whole
        if (whole, part) not in self._names:
            another = compat.like_var(whole)
            self._eqns += _another_name(whole, another, like)
            self._names[whole, part] = another
        return self._names[whole, part]


def _broadcasts(eqn: Any, dim: int) -> bool:
    """Return whether an equation repeats a value along a dim of its result."""
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    (operand, *sizes), dims = eqn.invars, eqn.params["broadcast_dimensions"]
    return not sizes and (dim not in dims or operand.aval.shape[dims.index(dim)] == 1)


def _contracts(eqn: Any) -> bool:
    """Return whether an equation is a matmul, and no product of elements that is written as one."""
    return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][0][0])


def own_slices(jaxpr: Any, has_rows: Sequence[bool], like: Any) -> Any:
    """Put a barrier behind the slices from which each step of an unrolled scan recomputes.

    The steps of one body read slices of one stacked value. What the backward pass recomputes from
    them waits for nothing, so XLA fuses the first such kernels of all steps into one that waits for
    what comes before it in each. All these steps would be recomputed before the pass goes back
    through the last, and their results would stay live. What waits for the carry cannot be fused,
    and a name costs a copy.

    Args:
        jaxpr: the scan's body.
        has_rows: whether each of its scanned operands, the last ones, has a batch dim.
        like: the scan.
    """
    first = len(jaxpr.invars) - len(has_rows)
    num_consts, _ = compat.scan_counts(like)
    waits = [num_consts <= position < first for position in range(len(jaxpr.invars))]
    early, _ = _read_early(jaxpr, waits)
    invars, named = list(jaxpr.invars), list[Any]()
    for position, var in enumerate(jaxpr.invars[first:], first):
        if has_rows[position - first] and early[position]:
            invars[position] = compat.like_var(var)
            named += _another_name(invars[position], var, like)
    made = compat.with_binders(jaxpr, invars, jaxpr.outvars)
    return made.replace(eqns=[*named, *jaxpr.eqns])


def _read_early(jaxpr: Any, waits: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Find the operands of a body that an equation reads before the carry is there.

    Args:
        jaxpr: the body.
        waits: of each operand, whether it waits for the carry.

    Returns:
        Of each operand, whether such an equation reads it; of each result, whether it waits.
    """
    late = {v for v, waiting in zip(jaxpr.invars, waits, strict=True) if waiting}
    early = set[Any]()
    for eqn in jaxpr.eqns:
        operands = [None if compat.is_literal(v) else v for v in eqn.invars]
        waiting = [v in late for v in operands]
        if eqn.primitive.name in REMATS:
            read, come_late = _read_early(eqn.params["jaxpr"], waiting)
        else:
            read, come_late = [not any(waiting)] * len(waiting), [any(waiting)] * len(eqn.outvars)
        early |= {v for v, is_read in zip(operands, read, strict=True) if is_read}
        late |= {v for v, is_late in zip(eqn.outvars, come_late, strict=True) if is_late}
    results = [not compat.is_literal(v) and v in late for v in jaxpr.outvars]
    return [v in early for v in jaxpr.invars], results


def _another_name(atom: Any, name: Any, like: Any) -> list[Any]:
    """Return the equations that give a value another name, which is another value to XLA."""
    return inlining.inline(
        lambda x: [lax.optimization_barrier(x)], [atom], [name], like, alike=("name",)
    )
