"""Find where a step loses its batch's sharding, and the layouts that keep one there.

    parts: [m@data, b, s] = reshape batch: [m*b@data, s]     # a loop indexes m: shard b
    dynamic_slice batch: [B@data, s]  ->  [b, s]             # a loop slices B: shard b, or s
    scan over w: [l@data, i, j]                              # a loop indexes l: shard i, or j
    dot_general momentum: [l, i@data, j] ...                 # l matrices at once: shard l
    scatter tokens: [t@data, d]  ->  slots: [e, c, d@data]   # of experts: shard c
    batch: [B, s]                                            # it has no sharding: shard B, or s

XLA's propagation keeps the batch's sharding on the major part of a dim that is split, and on a dim
that a loop indexes; each iteration then gathers what it reads, and all devices compute all of it.
Stacked weights that are sharded by layer are gathered likewise, all layers at once. Matmuls of
stacked layers outside of a loop, as an optimizer's, need no collective where the layers are
sharded. Slots that tokens are scattered to are sharded by feature, and parts of what is computed of
them summed over all devices. A batch without a sharding, as a numpy array is, is computed by all
devices; so is one along a mesh axis that shards nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import REMATS, Body, Dot, bodies, equations
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts.layout import Layout, combined, sharded_names, unique, weights_of
from jaxoverlap.passes.planning.entries import line_of

_SLICE, _UPDATE = "dynamic_slice", "dynamic_update_slice"
_LOOPS = ("scan", "while")
_BATCH_DIMS = 2  # dims of an unsharded batch that may be sharded: its sequences, and their tokens

_Instead = Mapping[Name, tuple[Name, ...]]
_Names = Mapping[str, tuple[Name, ...]]


@dataclass(frozen=True)
class Lost:
    """The layouts that keep a batch sharded, and the values that they pin besides matmuls' results.

    Attributes:
        layouts: the layouts.
        arguments: the numbers of the batch's arguments that have no sharding over some axis, or
            that a loop slices along a sharded dim; and of weights that are sharded by layer.
        values: the other values: the bodies that make them, and the positions of the equations.
        reasons: what the user wrote, and what it costs, in words.
    """

    layouts: tuple[Layout, ...] = ()
    arguments: tuple[int, ...] = ()
    values: tuple[tuple[Body, int], ...] = ()
    reasons: tuple[str, ...] = ()


NOTHING = Lost()


def lost_in(
    step: EditedStep, matmuls: Sequence[Dot], dims: DimNames, known: Sequence[Layout]
) -> Lost | None:
    """Return where a step loses its batch's sharding; None if it does not.

    Args:
        step: the step before any edit.
        matmuls: the matmuls whose results may be pinned.
        dims: its named dims.
        known: the layouts that the arguments suggest.
    """
    jaxpr, sizes = step.jaxpr, dict(step.mesh.shape)
    every = [body for body in bodies(jaxpr) if not body.opaque]
    weights, batch = sharded_names(jaxpr, step.arguments, dims)
    instead = _indexed(every, dims)
    layers = _layers(matmuls, instead, dims)
    whole = [] if batch else _unsharded(jaxpr)
    idle = _idle(step, {*weights, *batch}) if batch else []
    others = {axis: _replaced(names, instead) for axis, names in batch.items()}
    if whole:
        names = dims.of(jaxpr.invars[whole[0]])[:_BATCH_DIMS]
        others = {axis: _replaced(names, instead) for axis in sizes}
    elif idle:
        names = unique([name for on_axis in others.values() for name in on_axis])
        others |= dict.fromkeys(idle, names)
    slots = _slots(every, dims, step)
    others = {axis: unique((*names, *slots)) for axis, names in others.items()}
    by_layer = _by_layer(step)
    within = {axis: _within(names, axis, step, by_layer, dims) for axis, names in weights.items()}
    stacked = {axis: unique((*layers, *names)) for axis, names in within.items()}
    if others == batch and stacked == weights:
        return None
    moved = {name for _, _, name, _ in _sliced(every, dims)}
    sharded = {name for on_axis in batch.values() for name in on_axis}
    reasons = (
        *_reasons(jaxpr, whole, idle, every, dims, instead, batch),
        *_reasons_of_layers(jaxpr, by_layer),
        *_reasons_of_slots(slots, every, dims),
    )
    again = [n for n in _unsharded(jaxpr) if idle or moved & sharded & {*dims.of(jaxpr.invars[n])}]
    return Lost(
        layouts=tuple(new for new in combined(stacked, others, sizes) if new not in known),
        arguments=(*(whole or again), *by_layer),
        values=tuple(_values(every, dims, instead, layers)),
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _idle(step: EditedStep, used: set[str]) -> list[str]:
    """Return the mesh axes that shard nothing: their devices compute the same.

    Args:
        step: the step.
        used: the axes that shard arguments.
    """
    for eqn, _ in equations(step.jaxpr):
        if eqn.primitive.name == "shard_map":
            return []
        if eqn.primitive.name == "sharding_constraint":
            spec = compat.stated_constraint(eqn)
            if spec is None:
                return []
            used = {*used, *(axis for axes in spec for axis in axes)}
    return [axis for axis, size in step.mesh.shape.items() if size > 1 and axis not in used]


def _replaced(names: Sequence[Name], instead: _Instead) -> tuple[Name, ...]:
    """Return names of dims, with others instead of those that loops index."""
    return unique([new for name in names for new in instead.get(name) or (name,)])


# -- stacked weights ------------------------------------------------------------------------------


def _by_layer(step: EditedStep) -> list[int]:
    """Return the numbers of the weights that are sharded along the dim that a scan runs along."""
    weights = weights_of(step.jaxpr)
    return [
        number
        for number in sorted(_stacks(step.jaxpr))
        if step.jaxpr.invars[number] in weights
        and any(step.mesh.shape[axis] > 1 for axis in (step.arguments[number] or ((),))[0])
    ]


def _stacks(jaxpr: Any) -> set[int]:
    """Return the numbers of the operands that scans run along, perhaps converted before."""
    root = {var: number for number, var in enumerate(jaxpr.invars)}
    found = set[int]()
    for eqn in jaxpr.eqns:
        operands = [None if compat.is_literal(v) else root.get(v) for v in eqn.invars]
        if eqn.primitive.name == "convert_element_type" and operands[0] is not None:
            root[eqn.outvars[0]] = operands[0]
        for inner, given in _inner(eqn, operands):
            found |= {n for position in _stacks(inner) if (n := given[position]) is not None}
        if eqn.primitive.name == "scan":
            found |= {n for n in operands[sum(compat.scan_counts(eqn)) :] if n is not None}
    return found


def _inner(eqn: Any, operands: Sequence[int | None]) -> Iterator[tuple[Any, Sequence[int | None]]]:
    """Yield the bodies that read an equation's operands as they are, with what each reads."""
    if eqn.primitive.name == "scan":
        num_consts, _ = compat.scan_counts(eqn)
        rest = [None] * (len(operands) - num_consts)
        yield eqn.params["jaxpr"], [*operands[:num_consts], *rest]
    elif eqn.primitive.name in REMATS:
        yield eqn.params["jaxpr"], operands


def _within(
    names: Sequence[Name], axis: str, step: EditedStep, by_layer: Sequence[int], dims: DimNames
) -> tuple[Name, ...]:
    """Return names of weights' dims, with those within a layer for one that scans run along."""
    given = list(names)
    for number in by_layer:
        var, spec = step.jaxpr.invars[number], step.arguments[number]
        assert spec is not None
        if axis not in spec[0]:
            continue
        layer, *others = dims.of(var)
        sizes = zip(others, var.aval.shape[1:], spec[1:], strict=True)
        free = sorted(((size, name) for name, size, axes in sizes if not axes), key=lambda f: -f[0])
        at = given.index(layer) if layer in given else len(given)
        given[at : at + 1] = [name for _, name in free]
    return unique(given)


# -- what loops index -----------------------------------------------------------------------------


def _indexed(every: Sequence[Body], dims: DimNames) -> _Instead:
    """Return the names of the dims that loops index, each with those to shard instead."""
    found: dict[Name, list[Name]] = {name: [] for name in _scanned(every, dims)}
    for _, _, one, others in _sliced(every, dims):
        found.setdefault(one, []).extend(others)
    for body in every:
        for eqn in body.eqns:
            for name, minor in _split(eqn, dims):
                if name in found:
                    found[name] = [*minor, *found[name]]
    return {name: unique(others) for name, others in found.items()}


def _scanned(every: Sequence[Body], dims: DimNames) -> Iterator[Name]:
    """Yield the names of the dims that scans run along."""
    for eqn in (eqn for body in every for eqn in body.eqns if eqn.primitive.name == "scan"):
        num_consts, num_carry = compat.scan_counts(eqn)
        yield from (dims.of(v)[0] for v in compat.variables(eqn.invars[num_consts + num_carry :]))


def _sliced(every: Sequence[Body], dims: DimNames) -> Iterator[tuple[Body, Any, Name, list[Name]]]:
    """Yield the slices of loops: equation, name of the dim, names of the slice and other dims."""
    for body in every:
        if not any(eqn.primitive.name in _LOOPS for eqn in body.around):
            continue
        for eqn in body.eqns:
            name = eqn.primitive.name
            if name not in (_SLICE, _UPDATE):
                continue
            whole, part = eqn.invars[0], eqn.outvars[0] if name == _SLICE else eqn.invars[1]
            if compat.is_literal(whole) or compat.is_literal(part):
                continue
            pairs = list(zip(dims.of(whole), dims.of(part), strict=True))
            same = [one for one, other in pairs if one == other]
            yield from ((body, eqn, one, [other, *same]) for one, other in pairs if one != other)


def _split(eqn: Any, dims: DimNames) -> Iterator[tuple[Name, list[Name]]]:
    """Yield the names of the dims that a reshape splits, with those of their minor parts."""
    if eqn.primitive.name != "reshape" or compat.is_literal(eqn.invars[0]):
        return
    before, after = eqn.invars[0], eqn.outvars[0]
    sizes = dict(zip(dims.of(before), before.aval.shape, strict=True))
    parts = list(zip(dims.of(after), after.aval.shape, strict=True))
    for d, (name, size) in enumerate(parts):
        minor = list[Name]()
        for other, count in parts[d + 1 :]:
            if size >= sizes.get(name, 0):
                break
            minor.append(other)
            size *= count
        if minor:
            yield name, minor


# -- what rows are scattered to -------------------------------------------------------------------


def _slots(every: Sequence[Body], dims: DimNames, step: EditedStep) -> tuple[Name, ...]:
    """Return the names of dims that the batch is scattered along, the largest first.

    Those of tables that are arguments are weights', as a vocabulary is.
    """
    of_arguments = {name for var in step.jaxpr.invars for name in dims.of(var)}
    weights = weights_of(step.jaxpr)
    rows = {name for v in step.jaxpr.invars if v not in weights for name in dims.of(v)}
    found = dict[Name, int]()
    for eqn in (eqn for body in every for eqn in body.eqns):
        if eqn.primitive.name != "scatter" or compat.is_literal(eqn.invars[2]):
            continue
        numbers, updates = eqn.params["dimension_numbers"], dims.of(eqn.invars[2])
        of_rows = {n for d, n in enumerate(updates) if d not in numbers.update_window_dims}
        (into,) = eqn.outvars
        if not of_rows.isdisjoint(rows):
            for d in numbers.scatter_dims_to_operand_dims:
                found[dims.of(into)[d]] = into.aval.shape[d]
    new = (name for name in found if name not in of_arguments)
    return tuple(sorted(new, key=lambda name: -found[name]))


# -- what is lost ---------------------------------------------------------------------------------


def _layers(matmuls: Sequence[Dot], instead: _Instead, dims: DimNames) -> tuple[Name, ...]:
    """Return the names of stacked layers that matmuls outside of loops compute all at once."""
    once = (dot for dot in matmuls if dot.runs == 1)
    return unique([name for dot in once for name in _batched(dot, dims) if name in instead])


def _batched(dot: Dot, dims: DimNames) -> tuple[Name, ...]:
    """Return the names of the batch dims of a matmul."""
    if dot.eqn.primitive.name != "dot_general":
        return ()
    _, (of_lhs, _) = dot.eqn.params["dimension_numbers"]
    names = dims.of(dot.eqn.invars[0])
    return tuple(names[d] for d in of_lhs)


def _unsharded(jaxpr: Any) -> list[int]:
    """Return the numbers of the arguments that are no weights, the largest first."""
    weights = weights_of(jaxpr)
    given = [n for n, v in enumerate(jaxpr.invars) if v not in weights and v.aval.ndim]
    read = {v for eqn in jaxpr.eqns for v in compat.variables(eqn.invars)}
    given = [n for n in given if jaxpr.invars[n] in read]
    return sorted(given, key=lambda n: -math.prod(jaxpr.invars[n].aval.shape))


def _values(
    every: Sequence[Body], dims: DimNames, instead: _Instead, layers: Sequence[Name]
) -> Iterator[tuple[Body, int]]:
    """Yield the equations whose results are pinned: what loops read and write, and what layers do.

    These are reshapes that split a dim which loops index, values that a loop writes slices into,
    and operands of matmuls of all layers at once.
    """
    for body in every:
        at_once = (dot for dot in body.dots if not {*layers}.isdisjoint(_batched(dot, dims)))
        operands = {v for dot in at_once for v in compat.variables(dot.eqn.invars)}
        matmuls = {dot.position for dot in body.dots}
        for position, eqn in enumerate(body.eqns):
            if position in matmuls or not eqn.outvars:
                continue
            splits = any(name in instead for name, _ in _split(eqn, dims))
            written = eqn.primitive.name == _UPDATE and any(
                name in instead for name in dims.of(eqn.outvars[0])
            )
            if splits or written or eqn.outvars[0] in operands:
                yield body, position


def _reasons(
    jaxpr: Any,
    whole: Sequence[int],
    idle: Sequence[str],
    every: Sequence[Body],
    dims: DimNames,
    instead: _Instead,
    batch: _Names,
) -> Iterator[str]:
    """Say what was written so that the batch's sharding is lost."""
    names = compat.argument_names(jaxpr)
    for number in whole[:1]:
        yield f"the batch argument {names[number]} is replicated: every GPU computes everything"
    if idle:
        yield f"nothing is sharded over {', '.join(idle)}: its devices all compute the same"
    sharded = {name for on_axis in batch.values() for name in on_axis}
    for body in every:
        for eqn in body.eqns:
            for name, _ in _split(eqn, dims):
                if name in instead and name in sharded:
                    yield (
                        f"the reshape at {line_of(eqn, body.around)} leaves the batch's sharding "
                        "on a dim that a loop indexes: each iteration gathers what it reads"
                    )
    for body, eqn, name, _ in _sliced(every, dims):
        if eqn.primitive.name == _SLICE and name in sharded:
            yield (
                f"the loop at {line_of(eqn, body.around)} slices the batch along a dim that "
                "is sharded: each iteration gathers what it reads"
            )


def _reasons_of_slots(
    slots: Sequence[Name], every: Sequence[Body], dims: DimNames
) -> Iterator[str]:
    """Say where tokens are scattered to slots."""
    for eqn, body in ((eqn, one) for one in every for eqn in one.eqns):
        if eqn.primitive.name == "scatter" and not {*slots}.isdisjoint(dims.of(eqn.outvars[0])):
            yield (
                f"the scatter at {line_of(eqn, body.around)} leaves the slots of tokens sharded by "
                "feature: parts of what is computed of them are summed over all devices"
            )


def _reasons_of_layers(jaxpr: Any, by_layer: Sequence[int]) -> Iterator[str]:
    """Say which weights are sharded by layer."""
    names = compat.argument_names(jaxpr)
    if by_layer:
        which = ", ".join(names[number] for number in by_layer[:3])
        more = ", ..." if len(by_layer) > 3 else ""
        yield (
            f"the weights {which}{more} are sharded along the dim that a scan runs along: "
            "all layers are gathered before it"
        )
