"""Find the parts that a fused matmul's result is taken apart into, or an operand is made of.

    y = dot_general x w: [d, 3 h e] ;  z: [b, s, 3, h, e] = reshape y ;  q, k, v = unstack z

Parts are taken by `split`, `unstack` and slices, also behind reshapes and transposes; gradients are
joined again by `concatenate`, `stack` and sums of padded parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import Array, lax

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import Body, Dot

LHS, RHS, OUT = range(3)
"""The operands and the result of a matmul."""


@dataclass(frozen=True)
class Part:
    """A value that has some columns of a fused one.

    Attributes:
        first, size: its columns.
        var: the value.
        sharded: the size of its dim that devices share.
        view: makes the value from its columns, or the columns from the value.
        position: the equation that takes it from the fused value; None if that is made of it.
    """

    first: int
    size: int
    var: Any
    sharded: int
    view: Callable[[Array], Array]
    position: int | None = None


@dataclass(frozen=True)
class _Divided:
    """A view of a fused value.

    Attributes:
        var: the view.
        dim: its dim that is divided into parts.
        unit: the columns that one index of the dim has.
        inner: the dim that has these; None if an index is a column.
        views: the steps between columns and a part, given the part's indices along the dim.
    """

    var: Any
    dim: int
    unit: int = 1
    inner: int | None = None
    views: tuple[Callable[[Array, int], Array], ...] = ()

    def part(self, first: int, count: int, var: Any, position: int | None = None) -> Part:
        """Return a part with some indices along the dim."""

        def view(x: Array) -> Array:
            for one in self.views:
                x = one(x, count)
            return x

        alone = count == 1 and self.inner is not None
        sharded = self.var.aval.shape[self.inner] if alone else count
        return Part(first * self.unit, count * self.unit, var, sharded, view, position)


def parts_of(body: Body, dot: Dot, side: int, dim: int) -> list[Part]:
    """Return the parts of an operand or result along one dim, in order; none if it has none."""
    if side == OUT:
        var = dot.eqn.outvars[0]
        found = _taken(body, _Divided(var, dim))
    else:
        var = dot.eqn.invars[side]
        found = None if compat.is_literal(var) else _joined(body, _Divided(var, dim))
    parts = sorted(found or (), key=lambda part: part.first)
    ends = [0, *(part.first + part.size for part in parts)]
    tiles = ends[-1] == var.aval.shape[dim] if parts else False
    tiles = tiles and all(p.first == end for p, end in zip(parts, ends, strict=False))
    return parts if tiles and len(parts) > 1 else []


def sections_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the columns of each part."""
    return tuple(part.size for part in parts)


def _taken(body: Body, fused: _Divided) -> list[Part] | None:
    """Return the parts that all readers of a value take of it; None if one takes another."""
    parts: list[Part] = []
    for position in body.uses.readers(fused.var):
        eqn = None if position is None else body.eqns[position]
        found = None if eqn is None else _taken_by(body, eqn, position, fused)
        if found is None:
            return None
        parts += found
    return parts


def _taken_by(body: Body, eqn: Any, position: int | None, fused: _Divided) -> list[Part] | None:
    name, dim, shape = eqn.primitive.name, fused.dim, fused.var.aval.shape
    if name == "sharding_constraint":
        return _taken(body, replace(fused, var=eqn.outvars[0]))
    if name == "transpose":
        order = eqn.params["permutation"]
        view = lambda x, _: lax.transpose(x, order)  # noqa: E731
        inner = None if fused.inner is None else order.index(fused.inner)
        made = _Divided(eqn.outvars[0], order.index(dim), fused.unit, inner, (*fused.views, view))
        return _taken(body, made)
    if name == "reshape":
        split = _split(shape, eqn.outvars[0].aval.shape, dim) if fused.unit == 1 else None
        if split is None:
            return None
        sizes = eqn.outvars[0].aval.shape
        view = lambda x, count: lax.reshape(x, (*sizes[:dim], count, *sizes[dim + 1 :]))  # noqa: E731
        return _taken(body, _Divided(eqn.outvars[0], dim, split, dim + 1, (*fused.views, view)))
    if name == "split" and eqn.params["axis"] == dim:
        firsts = itertools.accumulate((0, *eqn.params["sizes"]))
        sizes = zip(firsts, eqn.params["sizes"], eqn.outvars, strict=False)
        return [fused.part(int(first), int(n), var, position) for first, n, var in sizes]
    if name == "unstack" and eqn.params["axis"] == dim:
        alone = lambda x, _: lax.squeeze(x, (dim,))  # noqa: E731
        fused = replace(fused, views=(*fused.views, alone))
        return [fused.part(n, 1, var, position) for n, var in enumerate(eqn.outvars)]
    if name == "slice" and eqn.params["strides"] in (None, (1,) * len(shape)):
        out, first = eqn.outvars[0].aval.shape, eqn.params["start_indices"][dim]
        if all(n == size for d, (n, size) in enumerate(zip(out, shape, strict=True)) if d != dim):
            return [fused.part(first, out[dim], eqn.outvars[0], position)]
    return None


def _joined(body: Body, fused: _Divided) -> list[Part] | None:
    """Return the parts that a value is made of; None if it is not made of parts."""
    eqn, dim = body.uses.maker(fused.var), fused.dim
    if eqn is None:
        return None
    name, operand = eqn.primitive.name, eqn.invars[0]
    if name == "sharding_constraint":
        return _joined(body, replace(fused, var=operand))
    if name in ("add_any", "add"):
        both = [_joined(body, replace(fused, var=v)) for v in compat.variables(eqn.invars)]
        known = [parts for parts in both if parts is not None]
        return [p for parts in known for p in parts] if len(known) == 2 else None
    if name == "transpose":
        order = eqn.params["permutation"]
        view = lambda x, _: lax.transpose(x, order)  # noqa: E731
        inner = None if fused.inner is None else order[fused.inner]
        made = _Divided(operand, order[dim], fused.unit, inner, (view, *fused.views))
        return _joined(body, made)
    if name == "reshape" and fused.unit == 1 and not compat.is_literal(operand):
        whole = fused.var.aval.shape
        unit = _split(whole, operand.aval.shape, dim)
        if unit is None:
            return None
        sizes = lambda count: (*whole[:dim], count * unit, *whole[dim + 1 :])  # noqa: E731
        view = lambda x, count: lax.reshape(x, sizes(count))  # noqa: E731
        return _joined(body, _Divided(operand, dim, unit, dim + 1, (view, *fused.views)))
    if name == "concatenate" and eqn.params["dimension"] == dim:
        counts = [v.aval.shape[dim] for v in eqn.invars]
        firsts = itertools.accumulate((0, *counts))
        every = zip(firsts, counts, eqn.invars, strict=False)
        return [fused.part(first, count, var) for first, count, var in every]
    if name == "stack" and eqn.params["axis"] == dim:
        alone = lambda x, _: lax.expand_dims(x, (dim,))  # noqa: E731
        fused = replace(fused, views=(alone, *fused.views))
        return [fused.part(n, 1, var) for n, var in enumerate(eqn.invars)]
    if name == "pad" and compat.is_literal(eqn.invars[1]) and eqn.invars[1].val == 0:
        config = eqn.params["padding_config"]
        if all(not any(pads) for d, pads in enumerate(config) if d != dim) and not config[dim][2]:
            return [fused.part(int(config[dim][0]), operand.aval.shape[dim], operand)]
    return None


def _split(whole: Sequence[int], parts: Sequence[int], dim: int) -> int | None:
    """Return the columns that an index has where a reshape splits one dim; None for another."""
    behind = len(whole) - dim - 1
    inner = parts[dim + 1 : len(parts) - behind]
    same = (*parts[:dim], *parts[len(parts) - behind :]) == (*whole[:dim], *whole[dim + 1 :])
    if not same or not inner or parts[dim] * math.prod(inner) != whole[dim]:
        return None
    return math.prod(inner)
