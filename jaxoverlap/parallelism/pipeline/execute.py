"""Run a pipeline's schedule in one JAX program, with gradients of its own.

`jax.grad` of a scan over ticks keeps every tick's inputs, which is GPipe's memory. Here each tick
runs one piece forward and another micro-batch's piece backward by `jax.vjp`, from its kept input:
what is kept are inputs of pieces in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.parallelism.pipeline.schedule import NONE, Schedule

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
) -> Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Tree, Tree]]]:
    """Make a function that gives a pipelined model's loss and its gradients, by 1F1B.

    The model is last(shared, stage(w_n, ... stage(w_1, first(shared, batch))), batch): pieces of
    equal shape, each on a device along `axis`, between what comes before and after them. Forward,
    activations go round the ring of stages by a permute a tick, which stands beside a backward
    pass; cotangents go the other way, beside a forward pass.

    jaxpr: scan over warm-up ticks {stage, ppermute}; scan {ppermute, stage, ppermute, vjp}; scan
    over the last ticks {ppermute, vjp}; all inside a shard_map whose one manual axis is `axis`.

    Args:
        stage: stage(weights of a piece, x) -> y, of x's shape and dtype. What its backward pass
            keeps lives for one tick only.
        first: first(shared, micro-batch) -> x.
        last: last(shared, y, micro-batch) -> the micro-batch's mean loss, a scalar.
        mesh: has `axis`; its other axes stay automatic, and constraints on them may stand in the
            functions as PartitionSpecs.
        micro_batches: of a step.
        pieces: of each device (interleaving).
        axis: the stages.

    Returns:
        call(stages, shared, batch) -> (mean loss, (gradients of stages, gradients of shared)).
        `stages` has a first dim of `pieces` times the size of `axis`, sharded over `axis`, in the
        order of `stage_order`; `batch` a first dim of micro-batches.

    Raises:
        ValueError: if the mesh has no such axis, or the micro-batches do not go in rounds.
    """
    if axis not in mesh.shape:
        raise ValueError(f"a mesh of {tuple(mesh.shape)} has no axis {axis!r}: add one of stages")
    schedule = Schedule(mesh.shape[axis], micro_batches, pieces)
    body = functools.partial(_device, schedule, stage, first, last, axis)

    def call(stages: Tree, shared: Tree, batch: Tree) -> tuple[jax.Array, tuple[Tree, Tree]]:
        _check(stages, batch, schedule)
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(axis), P(axis), P(), P()),
            out_specs=(P(), (P(axis), P())),
            axis_names={axis},
            check_vma=False,
        )
        return run(jnp.arange(schedule.stages), stages, shared, batch)

    return call


def _check(stages: Tree, batch: Tree, schedule: Schedule) -> None:
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


def _device(
    schedule: Schedule,
    stage: Stage,
    first: First,
    last: Last,
    axis: str,
    index: jax.Array,
    stages: Tree,
    shared: Tree,
    batch: Tree,
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """Run all ticks of one stage."""
    tables = schedule.tables()
    rows = [jnp.asarray(array)[index[0]] for array in tables.arrays]
    at_first, at_last = index[0] == 0, index[0] == schedule.stages - 1
    count, v = schedule.micro_batches, schedule.pieces

    def micro_batch(number: jax.Array) -> Tree:
        return _picked(batch, jnp.maximum(number, 0))

    def forward(x: Tree, tick: jax.Array) -> Tree:
        piece = rows[1][tick]
        x = _where(at_first & (piece == 0), lambda: first(shared, micro_batch(rows[0][tick])), x)
        return stage(_picked(stages, jnp.maximum(piece, 0)), x)

    def piece_loss(
        weights: Tree, shared: Tree, x: Tree, number: jax.Array, is_first: Any, is_last: Any
    ) -> tuple[Tree, jax.Array]:
        of = micro_batch(number)
        y = stage(weights, _where(is_first, lambda: first(shared, of), x))
        zero = jnp.zeros((), jax.eval_shape(last, shared, y, of).dtype)
        return y, lax.cond(is_last, lambda: last(shared, y, of), lambda: zero)

    x_like = jax.eval_shape(first, shared, micro_batch(jnp.int32(0)))
    x_zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x_like)
    kept = jax.tree.map(lambda a: jnp.zeros((tables.slots, *a.shape), a.dtype), x_like)

    def run_forward(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        slot = rows[2][tick]
        kept = jax.tree.map(
            lambda buffer, a: lax.cond(
                slot != NONE,
                lambda: lax.dynamic_update_index_in_dim(buffer, a, slot, 0),
                lambda: buffer,
            ),
            carry["kept"],
            carry["x"],
        )
        return {**carry, "kept": kept, "y": forward(carry["x"], tick)}

    def run_backward(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        number, piece, slot = (row[tick] for row in rows[3:])
        busy = number != NONE
        is_first = at_first & (piece == 0) & busy
        is_last = at_last & (piece == v - 1) & busy
        weights = _picked(stages, jnp.maximum(piece, 0))
        x = _picked(carry["kept"], jnp.maximum(slot, 0))
        of = functools.partial(piece_loss, number=number, is_first=is_first, is_last=is_last)
        (_, value), pull = jax.vjp(lambda w, s, x: of(w, s, x), weights, shared, x)
        keep = busy & ~is_last
        cotangent = jax.tree.map(lambda g: jnp.where(keep, g, 0), carry["dy"])
        scale = jnp.where(is_last, 1.0 / count, 0.0).astype(value.dtype)
        of_weights, of_shared, of_x = pull((cotangent, scale))
        return {
            **carry,
            "stages": _added(carry["stages"], of_weights, jnp.maximum(piece, 0)),
            "shared": jax.tree.map(jnp.add, carry["shared"], of_shared),
            "dx": of_x,
            "loss": carry["loss"] + value * scale,
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

    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    carry = dict(
        x=x_zero,
        y=x_zero,
        dx=x_zero,
        dy=x_zero,
        kept=kept,
        stages=zeros(stages),
        shared=zeros(shared),
        loss=jnp.zeros((), jax.eval_shape(last, shared, x_like, micro_batch(jnp.int32(0))).dtype),
    )
    ends = (0, schedule.warm_up_ticks, schedule.forward_ticks, schedule.ticks)
    for phase, begin, end in zip((warm_up, steady, drain), ends[:-1], ends[1:], strict=True):
        carry, _ = lax.scan(phase, carry, jnp.arange(begin, end))
    summed = lax.psum((carry["loss"], carry["shared"]), axis)
    return summed[0], (carry["stages"], summed[1])


def _picked(tree: Tree, at: jax.Array) -> Tree:
    """Return row `at` of every leaf."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, 0, keepdims=False), tree)


def _added(total: Tree, part: Tree, at: jax.Array) -> Tree:
    """Add a part to row `at` of every leaf."""
    return jax.tree.map(lambda a, b: a.at[at].add(b), total, part)


def _where(holds: Any, make: Callable[[], Tree], other: Tree) -> Tree:
    """Return what `make` gives where a condition holds; it runs only there."""
    return lax.cond(holds, make, lambda: other)
