"""Put mesh axes on named dims: one layout for all values of a step.

    {"fsdp": (batch, hidden), "tp": (heads, inner, vocab, sequence)}

    scores:     [batch, heads, sequence, sequence]   ->   (fsdp, tp, None, None)
    residual:   [batch, sequence, hidden]            ->   (fsdp, tp, None)
    a gradient: [hidden, inner]                      ->   (fsdp, tp)

Each axis has the names that it may shard, in order of preference; in a value it shards the first of
them that the value has and that it divides evenly. So a layout gives every value's sharding, and
there are few layouts: Megatron's sequence parallelism is `sequence` at the end of a list.

The first layouts come from the shardings that the step's arguments have. Then one axis at a time
prefers another name, or gives one up. Alpa (arXiv:2201.12023, section 4) and TOAST
(arXiv:2508.15010) search more: a strategy for each operation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.einsum import Spec

Layout = Mapping[str, tuple[Name, ...]]
"""For each mesh axis the names of dims that it may shard, in order of preference."""


def spec_of(
    names: Sequence[Name], shape: Sequence[int], layout: Layout, sizes: Mapping[str, int]
) -> Spec:
    """Return the mesh axes on each dim of a value, major to minor.

    Args:
        names: the names of its dims.
        shape: its shape.
        layout: the layout.
        sizes: devices along each mesh axis.
    """
    parts: list[tuple[str, ...]] = [()] * len(names)
    local = list(shape)
    for axis, preferred in layout.items():
        dims = (names.index(name) for name in preferred if name in names)
        for d in dims:
            if local[d] % sizes[axis] == 0:
                parts[d], local[d] = (*parts[d], axis), local[d] // sizes[axis]
                break
    return tuple(parts)


def starts(
    jaxpr: Any, arguments: Sequence[Spec | None], dims: DimNames, sizes: Mapping[str, int]
) -> Iterator[Layout]:
    """Yield the layouts that the shardings of a step's arguments suggest.

    The batch has its names, the weights have theirs, and a value may have one of each: axis by axis
    either may come first.

    Args:
        jaxpr: the step.
        arguments: the sharding of each of its arguments; None where that is not known.
        dims: its named dims.
        sizes: devices along each mesh axis.
    """
    yield from combined(*sharded_names(jaxpr, arguments, dims), sizes)


def combined(
    weights: Mapping[str, tuple[Name, ...]],
    batch: Mapping[str, tuple[Name, ...]],
    sizes: Mapping[str, int],
) -> Iterator[Layout]:
    """Yield the layouts with each axis on names of the batch first, or on names of the weights."""
    orders = []
    for axis, size in sizes.items():
        one, other = weights.get(axis, ()), batch.get(axis, ())
        both = (unique((*other, *one)), unique((*one, *other))) if size > 1 else ()
        orders.append([(axis, names) for names in dict.fromkeys(both) if names])
    for chosen in itertools.product(*filter(None, orders)):
        yield dict(chosen)


def sharded_names(
    jaxpr: Any, arguments: Sequence[Spec | None], dims: DimNames
) -> tuple[dict[str, tuple[Name, ...]], dict[str, tuple[Name, ...]]]:
    """Return for each axis the names that it shards in the weights, and in the other arguments.

    An argument is a weight (or a part of an optimizer's state) if the step gives back an array of
    its type. The names with most elements come first.
    """
    weight_vars = weights_of(jaxpr)
    weights: dict[str, Counter[Name]] = {}
    batch: dict[str, Counter[Name]] = {}
    for var, spec in zip(jaxpr.invars, arguments, strict=True):
        side = weights if var in weight_vars else batch
        for name, axes in zip(dims.of(var), spec or (), strict=False):
            for axis in axes:
                counted = side.setdefault(axis, Counter())
                counted[name] += math.prod(var.aval.shape)
    return _ranked(weights), _ranked(batch)


def weights_of(jaxpr: Any) -> set[Any]:
    """Return the arguments of whose type a step also has a result: weights and optimizer state."""
    returned = {(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars}
    return {v for v in jaxpr.invars if (v.aval.shape, v.aval.dtype) in returned}


def _ranked(counts: Mapping[str, Counter[Name]]) -> dict[str, tuple[Name, ...]]:
    return {axis: tuple(n for n, _ in names.most_common()) for axis, names in counts.items()}


def unique(names: Sequence[Name]) -> tuple[Name, ...]:
    """Return names, each once, where it is first."""
    return tuple(dict.fromkeys(names))


def neighbours(layout: Layout, names: Sequence[Name]) -> Iterator[Layout]:
    """Yield the layouts in which one axis has one name first, last or not at all.

    Args:
        layout: the layout.
        names: the names to try, the most important first.
    """
    for name, axis in itertools.product(names, layout):
        others = tuple(n for n in layout[axis] if n != name)
        for changed in ((*others, name), (name, *others), others):
            if changed != layout[axis]:
                yield {**layout, axis: changed}


def by_size(values: Sequence[Any], dims: DimNames) -> list[Name]:
    """Return the names of the dims of values, those of most elements first."""
    counted = Counter[Name]()
    for var in values:
        for name in set(dims.of(var)):
            counted[name] += math.prod(var.aval.shape)
    return [name for name, _ in counted.most_common()]
