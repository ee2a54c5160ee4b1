"""Propagate a batch split through one equation: the batch dims of its operands and results.

    y: [b, s, f] = dot_general x: [b, s, d] w: [d, f]     # batch dim 0 of x is batch dim 0 of y
    g: [d, f] = dot_general x: [b, s, d] dy: [b, s, f]    # a sum over the batch: parts are added

An equation can be split if it computes each batch element of its results from the same element of
its operands. Then it can run on one part of the batch. If it adds over the batch, it runs on each
part, and the sums are added. The equation's rule (`passes/analysis/dim_rules.py`) says which it is;
an equation without a rule mixes batch elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxoverlap._jax import explicit, inlining
from jaxoverlap.passes.analysis.dim_rules import dim_rule
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.sequence_call import SEQUENCE_CALL


class BatchSplit(NamedTuple):
    """A batch split: each shard of the batch is split into the same number of parts.

    A batch dim of `size` is `[shards, parts, size / shards / parts]`, and a part has the elements
    at one index of the middle dim: if the batch is sharded over so many devices, or fewer, each
    device keeps its own, and nothing moves.
    """

    shards: int
    parts: int

    def divides(self, size: int) -> bool:
        """Return whether a dim of this size can be split."""
        return size % (self.shards * self.parts) == 0

    def part(self, size: int) -> int:
        """Return the batch size of one part."""
        return size // self.parts


@dataclass(frozen=True)
class Followed:
    """An equation that can run on the parts of a split batch.

    Attributes:
        operands: the batch dim of each operand; None for one that all parts share.
        results: the batch dim of each result; or the primitive that combines those of the parts.
        params: the parameters that differ for a part.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


Dims = Sequence[int | None]
"""The batch dim of each operand; None for one without, which all parts share."""


def follow(eqn: Any, dims: Dims, split: BatchSplit) -> Followed | None:
    """Propagate the batch dim through an equation; None if it mixes batch elements.

    A matmul may have different split dims on both sides, as the queries and keys of attention over
    a split sequence: the one that the result keeps stays split, the first operand's first.

    Args:
        eqn: the equation; one without bodies.
        dims: the batch dim of each operand; one at least has one.
        split: the batch split.
    """
    if eqn.primitive.name == "device_put":
        return _device_put(eqn, dims, split)
    if (rule := dim_rule(eqn)) is None:
        return None
    pairs = zip(rule.operands, dims, strict=True)
    batch = list(dict.fromkeys(factors[d] for factors, d in pairs if d is not None))
    if len(batch) > 1 and eqn.primitive.name == "dot_general":
        batch = [*(factor for factor in batch if factor in rule.results[0]), *batch][:1]
    if len(batch) > 1 or not rule.mixed.isdisjoint(batch):
        return None
    (factor,) = batch
    operands = tuple(f.index(factor) if factor in f else None for f in rule.operands)
    missing = any(factor not in factors for factors in rule.results)
    if missing and rule.combine is None:
        return None
    combine = rule.combine or ""
    results = tuple(f.index(factor) if factor in f else combine for f in rule.results)
    params = _params(eqn, operands[0], results[0], split)
    return None if params is None else Followed(operands, results, params)


def _part_shape(shape: Sequence[int], dim: int, split: BatchSplit) -> tuple[int, ...]:
    return (*shape[:dim], split.part(shape[dim]), *shape[dim + 1 :])


def _params(eqn: Any, dim: int | None, out: int | str | None, split: BatchSplit) -> Any:
    """Return the parameters that differ for a part; None if a part would be invalid."""
    name, params = eqn.primitive.name, eqn.params
    if name == "sharding_constraint":
        assert dim is not None
        return {} if _divides(params["sharding"], eqn.invars[0], dim, split) else None
    if name == "reshape":
        if not isinstance(out, int) or not split.divides(params["new_sizes"][out]):
            return None
        return {"new_sizes": _part_shape(params["new_sizes"], out, split)}
    if name == SEQUENCE_CALL:
        part = _of_part(eqn, split)
        alike = len(dots(part)) == len(dots(params["jaxpr"]))  # no other branch for its size
        return {"jaxpr": part} if alike else None
    if name == "gather" and dim in params["dimension_numbers"].operand_batching_dims:
        return {}
    if (param := _SIZES.get(name)) and isinstance(out, int) and dim is not None:
        return {
            param: _part_shape(params[param], out if name == "broadcast_in_dim" else dim, split)
        }
    return {}


def _of_part(eqn: Any, split: BatchSplit) -> Any:
    """Trace the function of a `per_sequence` for a part of the batch."""
    call, types = eqn.params["call"], eqn.params["types"]
    parts = [
        aval if d is None else aval.update(shape=_part_shape(aval.shape, d, split))
        for aval, d in zip(types, call.operands, strict=True)
    ]
    with inlining.mesh_of_types(parts):
        jaxpr = call.jaxpr([inlining.struct(aval) for aval in parts])
    meshes = [aval.sharding.mesh for aval in types if not aval.sharding.mesh.empty]
    stays = all(v.aval.sharding == aval.sharding for v, aval in zip(eqn.invars, types, strict=True))
    return jaxpr if stays else explicit.automatic(jaxpr, meshes[0], inferred=True)


# Parameters that have the size of each dim.
_SIZES = {
    "broadcast_in_dim": "shape",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
}


def _device_put(eqn: Any, dims: Dims, split: BatchSplit) -> Followed | None:
    """A move to other memory or another sharding moves the parts of each operand."""
    moves = zip(dims, eqn.invars, eqn.params["devices"], strict=True)
    known = tuple(
        dim for dim, var, target in moves if dim is not None and _divides(target, var, dim, split)
    )
    return Followed(known, known) if len(known) == len(dims) else None


def _divides(target: Any, var: Any, dim: int, split: BatchSplit) -> bool:
    """Return whether a part of a value can have the sharding, or be where, the value is put."""
    if target is None or isinstance(target, jax.memory.Space):
        return True
    if not isinstance(target, jax.sharding.Sharding):
        return False
    try:
        target.shard_shape(_part_shape(var.aval.shape, dim, split))
    except ValueError:
        return False
    return True
