"""Find dims that should not be sharded as the arguments are, and what to shard in their place.

    parts: [m@data, b, s] = reshape batch: [m*b@data, s]     # a loop indexes m: shard b
    dynamic_slice batch: [B@data, s]  ->  [b, s]             # a loop cuts b from B: shard b, or s
    dot_general momentum: [l, i@data, j] ...                 # l matrices at once: shard l

XLA's propagation keeps the batch's sharding on the major part of a dim that is split, and on a dim
that a loop indexes; each iteration then gathers, and computes in all devices, what it reads.
Matmuls of stacked layers outside of a loop, as an optimizer's, need no collective if the layers
are shared out. A batch without a sharding gets one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.layouts.layout import weights_of

Instead = dict[Name, tuple[Name, ...]]
"""For the name of a dim that loops index, the names to shard in its place, the best first."""
_SLICES = ("dynamic_slice", "dynamic_update_slice")


def indexed(every: Sequence[Body], dims: DimNames) -> Instead:
    """Return the dims that the loops of a step index, each with those to shard in its place."""
    scanned = set(_scanned(every, dims))
    found: dict[Name, list[Name]] = {}
    for body in every:
        for eqn in () if body.opaque else body.eqns:
            for name, minor in _split_by_reshape(eqn, dims):
                if name in scanned or _is_sliced(every, name, dims):
                    found.setdefault(name, []).extend(minor)
    for name, pieces in _sliced(every, dims):
        found.setdefault(name, []).extend(pieces)
    for name in scanned:
        found.setdefault(name, [])
    return {name: tuple(dict.fromkeys(instead)) for name, instead in found.items()}


def _scanned(every: Sequence[Body], dims: DimNames) -> Iterator[Name]:
    """Yield the names of the dims that scans run along."""
    for body in every:
        for eqn in () if body.opaque else body.eqns:
            if eqn.primitive.name == "scan":
                num_consts, num_carry = compat.scan_counts(eqn)
                stacked = eqn.invars[num_consts + num_carry :]
                yield from (dims.of(v)[0] for v in compat.variables(stacked))


def _sliced(every: Sequence[Body], dims: DimNames) -> Iterator[tuple[Name, tuple[Name, ...]]]:
    """Yield the names of dims that loops cut slices from, with those to shard instead."""
    for body in every:
        if body.opaque or not any(e.primitive.name in ("scan", "while") for e in body.around):
            continue
        for eqn in body.eqns:
            if eqn.primitive.name in _SLICES:
                whole = eqn.invars[0]
                piece = eqn.outvars[0] if eqn.primitive.name == _SLICES[0] else eqn.invars[1]
                if compat.is_literal(whole) or compat.is_literal(piece):
                    continue
                pairs = list(zip(dims.of(whole), dims.of(piece), strict=True))
                others = [one for one, other in pairs if one == other]
                for one, other in pairs:
                    if one != other:
                        yield one, (other, *others)


def _is_sliced(every: Sequence[Body], name: Name, dims: DimNames) -> bool:
    return any(name == sliced for sliced, _ in _sliced(every, dims))


def _split_by_reshape(eqn: Any, dims: DimNames) -> Iterator[tuple[Name, tuple[Name, ...]]]:
    """Yield the names of dims that a reshape splits, with the names of their minor parts."""
    if eqn.primitive.name != "reshape" or compat.is_literal(eqn.invars[0]):
        return
    before, after = eqn.invars[0], eqn.outvars[0]
    sizes = dict(zip(dims.of(before), before.aval.shape, strict=True))
    names = dims.of(after)
    for d, (name, size) in enumerate(zip(names, after.aval.shape, strict=True)):
        if sizes.get(name, size) > size:
            minor, parts = [], size
            for other, count in zip(names[d + 1 :], after.aval.shape[d + 1 :], strict=True):
                if parts >= sizes[name]:
                    break
                minor.append(other)
                parts *= count
            yield name, tuple(minor)


def batched(dot: Dot, dims: DimNames) -> tuple[Name, ...]:
    """Return the names of the dims that a matmul computes for one by one."""
    if dot.eqn.primitive.name != "dot_general":
        return ()
    (_, (of_lhs, _)) = dot.eqn.params["dimension_numbers"]
    names = dims.of(dot.eqn.invars[0])
    return tuple(names[d] for d in of_lhs)


def values_read(
    every: Sequence[Body], dims: DimNames, instead: Instead, layers: Sequence[Name]
) -> Iterator[tuple[Body, int]]:
    """Yield the equations whose results a layout past loops has to pin, besides matmuls.

    These are reshapes that split a dim which loops index, what loops write slices into, and what
    matmuls of all layers at once read.

    Args:
        every: the bodies of the step.
        dims: its named dims.
        instead: from `indexed`.
        layers: the names of stacked layers.
    """
    for body in every:
        if body.opaque:
            continue
        read = {
            v
            for dot in body.dots
            if not {*layers}.isdisjoint(batched(dot, dims))
            for v in compat.variables(dot.eqn.invars)
        }
        dots = {dot.position for dot in body.dots}
        for position, eqn in enumerate(body.eqns):
            splits = any(name in instead for name, _ in _split_by_reshape(eqn, dims))
            writes = eqn.primitive.name == _SLICES[1] and not {*dims.of(eqn.outvars[0])}.isdisjoint(
                instead
            )
            feeds = position not in dots and not read.isdisjoint(eqn.outvars)
            if splits or writes or feeds:
                yield body, position


def forgotten(jaxpr: Any) -> list[Any]:
    """Return the arguments that are not weights, the largest first, of a step that shards none."""
    weights = weights_of(jaxpr)
    given = [v for v in jaxpr.invars if v not in weights and v.aval.ndim]
    return sorted(given, key=lambda v: -math.prod(v.aval.shape))
