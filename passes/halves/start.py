"""Choose the batch dim along which a step is split: one that most of its matmuls have.

The dims of a step have names (`passes/analysis/dims.py`). A dim of the batch is one that no weight
has; most steps have two that every matmul has: the batch dim, and the sequence. A step
without a backward pass may give back a batch of the type that it took, which then looks like a
weight: there a dim that every matmul has and none contracts is the batch's. (Weight gradients
contract the batch.) Weights split along their inner dim would send each sum twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxoverlap.passes.analysis.dims import DimNames, Name
from jaxoverlap.passes.analysis.jaxprs import Dot, dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.layouts.layout import weights_of

_COVERED = 0.5  # of the work of all matmuls: with less there is little to hide behind


class BatchDim(NamedTuple):
    """A batch dim that may be split.

    Attributes:
        name: the named dim.
        shards: the devices that it is sharded over, at most.
        held: the greatest common divisor of the dim's sizes in the shards of all values.
    """

    name: Name
    shards: int
    held: int

    def divides(self, parts: int) -> bool:
        """Return whether each device's shard divides into so many parts."""
        return self.held >= parts and self.held % parts == 0

    def found_at(self, jaxpr: Any, dims: DimNames) -> tuple[int, int, int]:
        """Return the first matmul that has the dim, the number of its operand, and the dim."""
        return next(
            (dot.index, number, dim)
            for dot in dots(jaxpr)
            for number, var in enumerate(dot.eqn.invars)
            if (dim := self.dim(dims, var)) is not None
        )

    def dim(self, dims: DimNames, var: Any) -> int | None:
        """Return the dim of a value that has the name; None if none has."""
        names = dims.of(var) if hasattr(var.aval, "shape") else ()
        return names.index(self.name) if self.name in names else None


def batch_dims(
    jaxpr: Any,
    dims: DimNames,
    shardings: Mapping[Any, Shardings],
    sizes: Mapping[str, int],
    moved: Collection[Name] = (),
) -> Iterator[BatchDim]:
    """Yield the batch dims that may be split, those that most matmuls have first.

    Of two names that all matmuls have, as those of the batch and the sequence, the one that comes
    before the other comes first.

    Args:
        jaxpr: the step.
        dims: its named dims.
        shardings: the shardings of its matmuls' operands and results.
        sizes: devices along each mesh axis.
        moved: names that an edit has put first in matmuls: they come after the others here.
    """
    every_dot = [dot for dot in dots(jaxpr) if dot.inside is None]
    weights = {name for v in weights_of(jaxpr) for name in dims.of(v)}
    work, depth = Counter[Name](), Counter[Name]()
    for dot in every_dot:
        own = _work(dot)
        for name, d in {n: d for v in dot.eqn.invars for d, n in enumerate(dims.of(v))}.items():
            if name not in weights:
                work[name] += own
                depth[name] += own * d
    total = sum(map(_work, every_dot))
    others = [name for name in work if work[name] >= _COVERED * total]
    others.sort(key=lambda name: (-work[name], name in moved, depth[name]))

    def rows_of(name: Name) -> BatchDim:
        shards = _shards(name, every_dot, dims, shardings, sizes)
        return BatchDim(name, shards, _held(name, every_dot, dims, shards))

    free = [rows_of(name) for name in _free(every_dot, dims)]
    yield from free
    if not any(rows.held > 1 for rows in free):  # of replicas that are mapped a device has but one
        yield from (rows_of(name) for name in others if name not in {r.name for r in free})


def _free(every_dot: Sequence[Dot], dims: DimNames) -> list[Name]:
    """Return the names that operand and result of every matmul have, in the order of the first's.

    No matmul contracts such a dim, whatever kind of matmul it is.
    """
    names = [
        dict.fromkeys(n for v in dot.eqn.invars[:2] for n in dims.of(v) if n in dims.of(out))
        for dot in every_dot
        for out in dot.eqn.outvars
    ]
    return [n for n in (names[0] if names else ()) if all(n in kept for kept in names)]


def _work(dot: Dot) -> int:
    """Return the multiplications of a matmul, in all its runs."""
    lhs, rhs = (v.aval.shape for v in dot.eqn.invars[:2])
    out = math.prod(dot.eqn.outvars[0].aval.shape)
    return dot.runs * math.isqrt(math.prod(lhs) * math.prod(rhs) * out)


def _shards(
    name: Name,
    every_dot: Sequence[Dot],
    dims: DimNames,
    shardings: Mapping[Any, Shardings],
    sizes: Mapping[str, int],
) -> int:
    """Return the number of devices that the named dim is sharded over.

    Where fewer devices shard the dim of another value, its parts keep that value's sharding.
    """
    shards = 1
    for dot in every_dot:
        if (lies := shardings.get(dot.index)) is None:
            continue
        for var, spec in zip((*dot.eqn.invars[:2], *dot.eqn.outvars), lies[:3], strict=True):
            for its, axes in zip(dims.of(var), spec or (), strict=False):
                if its == name:
                    shards = math.lcm(shards, math.prod(sizes[axis] for axis in axes))
    return shards


def _held(name: Name, every_dot: Sequence[Dot], dims: DimNames, shards: int) -> int:
    """Return the greatest common divisor of the named dim's sizes, per shard; 0 if uneven."""
    values = (v for dot in every_dot for v in dot.eqn.invars[:2])
    sizes = (v.aval.shape[d] for v in values for d, its in enumerate(dims.of(v)) if its == name)
    held = math.gcd(*sizes)
    return held // shards if held % shards == 0 else 0
