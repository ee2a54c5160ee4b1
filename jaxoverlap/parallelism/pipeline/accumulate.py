"""Add up the gradients of micro-batches in one JAX program without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.pipeline.execute import data_axes, mean_over, rows_of
from jaxoverlap.parallelism.pipeline.leaves import wide_zeros

Tree = Any


def accumulated(
    loss: Callable[[Tree, Tree], jax.Array], *, mesh: Mesh, data: Sequence[str] = ()
) -> Callable[[Tree, Tree], tuple[jax.Array, Tree]]:
    """Make a function that gives a loss and its gradients, one micro-batch after the other.

    jaxpr: scan over micro-batches {loss, its vjp, add in float32}; with axes in `data` inside a
    shard_map over them, followed by a psum.

    Args:
        loss: loss(params, micro-batch) -> the micro-batch's mean loss, a scalar.
        mesh: has the axes of `data`; its other axes stay automatic.
        data: axes over which the batch's second dim is split and no weight is; gradients
            are summed over them once a step. As in `pipeline.value_and_grad`.

    Returns:
        call(params, batch) -> (mean loss in float32 at least, gradients in the dtypes of params).
        `batch` has a first dim of micro-batches.

    Raises:
        ValueError: if the mesh has no such axes.
    """
    data = data_axes(mesh, data)

    def body(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        count = jax.tree.leaves(batch)[0].shape[0]

        def add(total: tuple[jax.Array, Tree], micro_batch: Tree) -> tuple[Any, None]:
            value, gradients = jax.value_and_grad(loss)(params, micro_batch)
            sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), total[1], gradients)
            return (total[0] + value.astype(total[0].dtype), sums), None

        like = jax.eval_shape(loss, params, jax.tree.map(lambda a: a[0], batch))
        start = jax.tree.map(wide_zeros, (like, params))
        value, sums = mean_over(data, lax.scan(add, start, batch)[0])
        return value / count, jax.tree.map(lambda g, w: (g / count).astype(w.dtype), sums, params)

    def call(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        if not data:
            return body(params, batch)
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), rows_of(batch, data)),
            out_specs=(P(), P()),
            axis_names=set(data),
            check_vma=False,
        )
        return run(params, batch)

    return call
