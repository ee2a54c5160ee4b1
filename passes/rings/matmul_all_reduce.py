"""Matmul, then all-reduce: its reduce-scatter half becomes a ring, its all-gather half stays XLA's.

Before, on each device (row parallel without sequence parallelism; replicated weights' gradients):

    p: f32[s, d] = dot_general x w                     # this device's partial sums
    y: f32[s, d] = psum[axes=(model,)] p

->  after:

    y: f32[s/N, d] = <matmul_reduce_scatter along s>   # each hop under a chunk of the matmul
    y: f32[s, d] = all_gather[axis_name=model, axis=0] y

An all-reduce is a reduce-scatter and an all-gather, so as many bytes move; half of them hide. It
takes the time of `matmul_reduce_scatter` and the exposed gather's. It does not apply when no
dim of the result divides by the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from jaxoverlap.passes.rings import chunks
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.passes.rings.matmul_reduce_scatter import Term, matmul_reduce_scatter
from jaxoverlap.plan.plan import Variant


def matmul_all_reduce(
    terms: Sequence[Term],
    *,
    dim: int,
    axis: str,
    axis_size: int,
    dtype: Any,
    variant: Variant = Variant(),  # noqa: B008, it is frozen
    outer: int = 1,
    invarying: bool = False,
) -> Array:
    """Add the partial sums of matmuls up on all devices, half of it in a ring.

    Args:
        terms: the matmuls, at least one, with results of one shape.
        dim: the dim of the result to split into chunks; batch or free in each term.
        axis, axis_size: the mesh axis of the ring, and its devices.
        dtype: the dtype of the result, and of the sums that travel.
        variant: how the sums travel.
        outer: `Chunking.outer` of that dim in the result.
        invarying: as in `chunks.gather`.

    Returns:
        The full result, the same on every device of the axis.

    Raises:
        ValueError: if a chunk does not divide into the variant's slices.
    """
    scattered = matmul_reduce_scatter(
        terms, dim=dim, axis=axis, axis_size=axis_size, dtype=dtype, variant=variant, outer=outer
    )
    return chunks.gather(
        scattered, dim, axis, Chunking(axis_size, outer=outer), invarying=invarying
    )
