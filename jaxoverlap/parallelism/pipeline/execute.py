"""Run a pipeline's schedule in one JAX program, with gradients of its own.

`jax.grad` of a scan over ticks keeps every tick's inputs, which is GPipe's memory. Here each tick
runs one piece forward and another micro-batch's piece backward by `jax.vjp`, from its saved input:
only the inputs of pieces in flight are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap._util.expect import expect_one_of
from jaxoverlap.parallelism.pipeline import zero_bubble
from jaxoverlap.parallelism.pipeline.leaves import (
    as_cotangent,
    differentiable,
    dtype_of,
    is_differentiable,
    no_gradient,
    picked,
    summed_into,
    wide_zeros,
)
from jaxoverlap.parallelism.pipeline.schedule import NONE, PipelineSchedule

Tree = Any
First = Callable[[Tree, Tree], Tree]
Stage = Callable[[Tree, Tree], Tree]
Last = Callable[[Tree, Tree, Tree], jax.Array]


def value_and_grad(
    stage: Stage,
    *,
    first: First,
    last: Last,
    mesh: Mesh,
    micro_batches: int,
    pieces: int = 1,
    axis: str = "pipeline",
    data: Sequence[str] = (),
    order: Literal["1F1B", "ZB-H1"] = "1F1B",
) -> Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Tree, Tree]]]:
    """Make a function that gives a pipelined model's loss and its gradients, by 1F1B.

    The model is last(shared, stage(w_n, ... stage(w_1, first(shared, batch))), batch): pieces of
    equal shape, each on a device along `axis`, between what comes before and after them. Forward,
    activations go round the ring of stages by a permute a tick, overlapped with a backward
    pass; cotangents go the other way, overlapped with a forward pass.

    jaxpr: scan over warm-up ticks {stage, ppermute}; scan {ppermute, stage, ppermute, vjp}; scan
    over the last ticks {ppermute, vjp}; a pmean over `data`; all inside a shard_map whose manual
    axes are `axis` and those of `data`.

    Losses and gradients are added up in float32; gradients are given in the weights' dtype. Those
    of `shared` are made and added by the stages that use it alone: the first and the last.

    Args:
        stage: stage(weights of a piece, x) -> y, of x's shape and dtype. What its backward pass
            keeps lives for one tick only. Integers in x (a mask) travel without gradients.
        first: first(shared, micro-batch) -> x.
        last: last(shared, y, micro-batch) -> the micro-batch's mean loss, a scalar.
        mesh: has `axis`; its other axes stay automatic, and the functions may have constraints on
            them as PartitionSpecs.
        micro_batches: of a step.
        pieces: of each device (interleaving).
        axis: the stages.
        data: axes of the mesh over which the batch's second dim is split and no weight is.
            Gradients are averaged over them once a step; with automatic axes XLA would do so in
            every micro-batch. The functions see one device's shard over these axes, and
            may not constrain anything over them; losses are means, so that theirs is averaged.
        order: "ZB-H1" runs the weights' gradients as passes of their own, where 1F1B waits
            (`zero_bubble`); activations are kept, not computed again from the stage's input.
            Needs pieces=1.

    Returns:
        call(stages, shared, batch) -> (mean loss in float32 at least, (gradients of stages,
        gradients of shared)).
        `stages` has a first dim of `pieces` times the size of `axis`, sharded over `axis`, in the
        order of `stage_order`; `batch` a first dim of micro-batches.

    Raises:
        ValueError: if the mesh has no such axes, or the micro-batches do not go in rounds.
    """
    if axis not in mesh.shape:
        raise ValueError(f"a mesh of {tuple(mesh.shape)} has no axis {axis!r}: add one of stages")
    data = data_axes(mesh, data)
    expect_one_of("order", order, "1F1B", "ZB-H1")
    if order == "ZB-H1" and pieces > 1:
        raise ValueError(f"order='ZB-H1' with pieces={pieces}: its table has one piece a stage")
    schedule = PipelineSchedule(mesh.shape[axis], micro_batches, pieces)
    body = functools.partial(_device, order, schedule, stage, first, last, axis, data)

    def call(stages: Tree, shared: Tree, batch: Tree) -> tuple[jax.Array, tuple[Tree, Tree]]:
        _check(stages, shared, batch, schedule)
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(axis), P(axis), P(), rows_of(batch, data)),
            out_specs=(P(axis), (P(axis), P(axis))),
            axis_names={axis, *data},
            check_vma=False,
        )
        losses, (of_stages, of_shared) = run(jnp.arange(schedule.stages), stages, shared, batch)
        # Summed out here: XLA:CPU aborts on sums in bfloat16 where some axes are automatic.
        of_shared = jax.tree.map(lambda g, w: _summed(g).astype(w.dtype), of_shared, shared)
        return _summed(losses), (of_stages, of_shared)

    return call


def _check(stages: Tree, shared: Tree, batch: Tree, schedule: PipelineSchedule) -> None:
    for leaf in jax.tree.leaves((stages, shared)):
        if not is_differentiable(leaf):
            raise ValueError(
                f"weights of dtype {dtype_of(leaf)}: expected floats, which have "
                "gradients; close over other values, or give them with the batch"
            )
    wanted = schedule.stages * schedule.pieces
    for leaf in jax.tree.leaves(stages):
        if leaf.shape[0] != wanted:
            raise ValueError(
                f"weights of shape {leaf.shape}: expected a first dim of {wanted}, "
                f"{schedule.pieces} pieces for each of {schedule.stages} stages"
            )
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] != schedule.micro_batches:
            raise ValueError(
                f"a batch of shape {leaf.shape}: expected a first dim of micro-batches, "
                f"{schedule.micro_batches}"
            )


def _check_shapes(
    stage: Stage, last: Last, stages: Tree, shared: Tree, x: Tree, batch: Tree
) -> None:
    y = jax.eval_shape(lambda stages, x: stage(picked(stages, jnp.int32(0)), x), stages, x)
    if jax.tree.map(_kind, x) != jax.tree.map(_kind, y):
        raise ValueError(
            f"stage(weights, x) makes {jax.tree.map(_kind, y)} of an x of "
            f"{jax.tree.map(_kind, x)}: expected the same shapes and dtypes, as the next stage "
            "takes them"
        )
    loss = jax.eval_shape(last, shared, y, picked(batch, jnp.int32(0)))
    if getattr(loss, "shape", None) != ():
        raise ValueError(f"last(shared, y, batch) gives {loss}: expected a scalar, the mean loss")


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _device(
    order: str,
    schedule: PipelineSchedule,
    stage: Stage,
    first: First,
    last: Last,
    axis: str,
    data: tuple[str, ...],
    index: jax.Array,
    stages: Tree,
    shared: Tree,
    batch: Tree,
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """Run all ticks of one stage; return a device's loss and gradients."""
    count = schedule.micro_batches
    x_like = jax.eval_shape(first, shared, picked(batch, jnp.int32(0)))
    _check_shapes(stage, last, stages, shared, x_like, batch)
    if order == "1F1B":
        sums = _run_ticks(
            schedule, stage, first, last, axis, index[0], x_like, stages, shared, batch
        )
    else:
        weights = picked(stages, jnp.int32(0))
        loss, of_weights, of_shared = zero_bubble.run_stage(
            stage, first, last, axis, schedule.stages, count, index[0], weights, shared, batch
        )
        sums = loss, jax.tree.map(lambda g: g[None], of_weights), of_shared
    means = mean_over(data, jax.tree.map(lambda a: a / count, sums))
    loss, of_stages, of_shared = means
    of_stages = jax.tree.map(lambda g, w: g.astype(w.dtype), of_stages, stages)
    return loss[None], (of_stages, jax.tree.map(lambda a: a[None], of_shared))


def _run_ticks(
    schedule: PipelineSchedule,
    stage: Stage,
    first: First,
    last: Last,
    axis: str,
    index: jax.Array,
    x_like: Tree,
    stages: Tree,
    shared: Tree,
    batch: Tree,
) -> tuple[jax.Array, Tree, Tree]:
    """Run one stage in 1F1B's order; return the sums of its micro-batches' losses and gradients."""
    tables = schedule.tables()
    rows = [jnp.asarray(array)[index] for array in tables.rows]
    at_first, at_last = index == 0, index == schedule.stages - 1
    v = schedule.pieces

    def micro_batch(number: jax.Array) -> Tree:
        return picked(batch, jnp.maximum(number, 0))

    x_zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x_like)
    dx_zero = jax.tree.map(lambda a: a if is_differentiable(a) else None, x_zero)
    kept = jax.tree.map(lambda a: jnp.zeros((tables.slots, *a.shape), a.dtype), x_like)
    loss_zero = wide_zeros(jax.eval_shape(last, shared, x_like, micro_batch(jnp.int32(0))))

    def run_forward(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        number, piece, slot = (row[tick] for row in rows[:3])
        is_first = at_first & (piece == 0)
        x = lax.cond(is_first, lambda: first(shared, micro_batch(number)), lambda: carry["x"])
        kept = jax.tree.map(
            lambda buffer, a: lax.cond(
                slot != NONE,
                lambda: lax.dynamic_update_index_in_dim(buffer, a, slot, 0),
                lambda: buffer,
            ),
            carry["kept"],
            x,
        )
        y = stage(picked(stages, jnp.maximum(piece, 0)), x)
        return {**carry, "kept": kept, "y": y}

    def run_backward(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        number, piece, slot = (row[tick] for row in rows[3:])
        busy = number != NONE
        weights = picked(stages, jnp.maximum(piece, 0))
        x, of = picked(carry["kept"], jnp.maximum(slot, 0)), micro_batch(number)
        y, pull = jax.vjp(stage, weights, x)

        def score(total: Tree) -> tuple[jax.Array, Tree, Tree]:
            value, pull_last = jax.vjp(lambda s, y: last(s, y, of), shared, y)
            of_shared, of_y = pull_last(jnp.ones_like(value))  # 1 / count in bfloat16 is not exact
            return (
                value.astype(loss_zero.dtype),
                summed_into(total, of_shared),
                differentiable(y, of_y),
            )

        def passed_on(total: Tree) -> tuple[jax.Array, Tree, Tree]:
            return loss_zero, total, carry["dy"]

        is_last = at_last & (piece == v - 1) & busy
        loss, of_shared, of_y = lax.cond(is_last, score, passed_on, carry["shared"])
        cotangent = jax.tree.map(
            lambda a, g: no_gradient(a) if g is None else jnp.where(busy, g, 0), y, of_y
        )
        of_weights, of_x = pull(cotangent)

        def embed(total: Tree) -> Tree:
            start, pull_first = jax.vjp(lambda s: first(s, of), shared)
            return summed_into(total, pull_first(as_cotangent(start, of_x))[0])

        is_first = at_first & (piece == 0) & busy
        # What is idle runs on any input, where a derivative may be infinite, and 0 times it nan.
        of_weights = jax.tree.map(lambda g: jnp.where(busy, g, 0), of_weights)
        return {
            **carry,
            "stages": _added(carry["stages"], of_weights, jnp.maximum(piece, 0)),
            "shared": lax.cond(is_first, embed, lambda total: total, of_shared),
            "dx": differentiable(x, of_x),
            "loss": carry["loss"] + loss,
        }

    def send(tree: Tree, step: int) -> Tree:
        n = schedule.stages
        around = [(i, (i + step) % n) for i in range(n) if v > 1 or 0 <= i + step < n]
        return jax.tree.map(lambda a: lax.ppermute(a, axis, around), tree)

    def warm_up(carry: dict[str, Tree], tick: jax.Array) -> tuple[dict[str, Tree], None]:
        carry = run_forward(carry, tick)
        return {**carry, "x": send(carry["y"], 1)}, None

    def steady(carry: dict[str, Tree], tick: jax.Array) -> tuple[dict[str, Tree], None]:
        dy = send(carry["dx"], -1)  # runs under the forward pass
        carry = run_forward(carry, tick)
        # Barriers hold the order: else XLA runs one pass behind the other's sends.
        dy, y = lax.optimization_barrier((dy, carry["y"]))
        x = send(y, 1)  # runs under the backward pass
        carry = run_backward({**carry, "y": y, "dy": dy}, tick)
        x, dx = lax.optimization_barrier((x, carry["dx"]))
        return {**carry, "x": x, "dx": dx}, None

    def drain(carry: dict[str, Tree], tick: jax.Array) -> tuple[dict[str, Tree], None]:
        carry = {**carry, "dy": send(carry["dx"], -1)}
        return run_backward(carry, tick), None

    carry = dict(
        x=x_zero,
        y=x_zero,
        dx=dx_zero,
        dy=dx_zero,
        kept=kept,
        stages=jax.tree.map(wide_zeros, stages),
        shared=jax.tree.map(wide_zeros, shared),
        loss=loss_zero,
    )
    ends = (0, schedule.warm_up_ticks, schedule.forward_ticks, schedule.ticks)
    for phase, begin, end in zip((warm_up, steady, drain), ends[:-1], ends[1:], strict=True):
        carry, _ = lax.scan(phase, carry, jnp.arange(begin, end))
    return carry["loss"], carry["stages"], carry["shared"]


def data_axes(mesh: Mesh, data: Sequence[str]) -> tuple[str, ...]:
    """Return those of `data` that split anything.

    Raises:
        ValueError: for an axis that the mesh has not.
    """
    if unknown := [axis for axis in data if axis not in mesh.shape]:
        raise ValueError(f"data={unknown}: a mesh of {tuple(mesh.shape)} has no such axes")
    return tuple(axis for axis in data if mesh.shape[axis] > 1)


def rows_of(batch: Tree, data: tuple[str, ...]) -> Tree:
    """Return the specs of a batch [micro-batch, example, ...], its examples sharded over `data`."""
    return jax.tree.map(lambda leaf: P(None, data) if data and leaf.ndim > 1 else P(), batch)


def mean_over(data: tuple[str, ...], tree: Tree) -> Tree:
    """Return the mean over manual axes; in float32, as XLA:CPU cannot sum bfloat16 there."""
    if not data:
        return tree

    def mean(a: jax.Array) -> jax.Array:
        wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
        return lax.pmean(wide, data).astype(a.dtype)

    return jax.tree.map(mean, tree)


def _summed(parts: jax.Array) -> jax.Array:
    """Add up what the stages have, in their dtype."""
    return lax.reduce(parts, jnp.zeros((), parts.dtype), lax.add, (0,))


def _added(total: Tree, part: Tree, at: jax.Array) -> Tree:
    """Add a part to row `at` of every leaf."""
    return jax.tree.map(lambda a, b: a.at[at].add(b.astype(a.dtype)), total, part)
