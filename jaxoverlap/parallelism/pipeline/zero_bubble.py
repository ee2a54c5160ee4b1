"""Run ZB-H1 in one JAX program: a table of passes F, B and W, one of each stage's per tick.

All stages tick together. In a tick a stage runs the pass that `timetable.zb_h1` gives it (by
`lax.switch`), and after it activations go to the next stage and cotangents to the one before. So a
tick lasts as long as the longest pass in it, and its sends are exposed: with passes of equal length
a step takes the table's 3 m + p - 1 ticks, where 1F1B with the same activations kept takes 3 (m +
p - 1). Activations are kept from F to W, of at most p micro-batches: what the stage's `jax.vjp`
keeps, so that `jax.checkpoint` in the stage has its usual effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoverlap.parallelism.pipeline.leaves import (
    as_cotangent,
    differentiable,
    picked,
    summed_into,
    wide_zeros,
)
from jaxoverlap.parallelism.pipeline.schedule import NONE
from jaxoverlap.parallelism.pipeline.split import split
from jaxoverlap.parallelism.pipeline.timetable import zb_h1

Tree = Any
_KINDS = ("idle", "F", "B", "W")


class TickTables(NamedTuple):
    """Tables of the passes of each stage by tick, int32 [stages, ticks]; NONE where there is none.

    Attributes:
        kind: the pass, an index into idle, F, B, W.
        micro_batch: its micro-batch.
        saved, kept, x, dy: slots of what the pass reads or writes: activations (F to W), what B
            keeps for W, the stage's input (until F) and its result's cotangent (until B).
        next_x, next_dy: slots in which what arrives after the tick is stored.
        slots: how many slots each buffer has, by name.
    """

    kind: np.ndarray
    micro_batch: np.ndarray
    saved: np.ndarray
    kept: np.ndarray
    x: np.ndarray
    dy: np.ndarray
    next_x: np.ndarray
    next_dy: np.ndarray
    slots: dict[str, int]


def tick_tables(stages: int, micro_batches: int) -> TickTables:
    """Lay out ZB-H1's table, passes of one tick each, with a slot for every value in memory."""
    table = zb_h1(stages, micro_batches)
    ticks = round(table.step_s)
    at = {(one.kind, one.stage, one.micro_batch): round(one.start) for one in table.passes}
    names = ("kind", "micro_batch", "saved", "kept", "x", "dy", "next_x", "next_dy")
    rows = {name: np.full((stages, ticks), NONE, np.int32) for name in names}
    rows["kind"][:] = 0
    slots: dict[str, int] = dict.fromkeys(names[2:6], 1)

    def hold(name: str, stage: int, begins: dict[int, int], ends: dict[int, int]) -> dict[int, int]:
        found = _slots({i: (begins[i], ends[i]) for i in begins})
        slots[name] = max(slots[name], 1 + max(found.values(), default=0))
        return found

    for stage in range(stages):
        when = {kind: {i: at[kind, stage, i] for i in range(micro_batches)} for kind in _KINDS[1:]}
        saved = hold("saved", stage, when["F"], when["W"])
        kept = hold("kept", stage, when["B"], when["W"])
        # What arrives after a tick is there from the next one on.
        sent = {i: at["F", stage - 1, i] for i in when["F"]} if stage else {}
        last = stage == stages - 1
        back = {i: at[("F", stage, i) if last else ("B", stage + 1, i)] for i in when["B"]}
        x = hold("x", stage, {i: t + 1 for i, t in sent.items()}, when["F"])
        dy = hold("dy", stage, {i: t + 1 for i, t in back.items()}, when["B"])
        for kind, ticks_of in when.items():
            for i, tick in ticks_of.items():
                rows["kind"][stage, tick] = _KINDS.index(kind)
                rows["micro_batch"][stage, tick] = i
                rows["saved"][stage, tick] = saved[i]
                if kind != "F":
                    rows["kept"][stage, tick] = kept[i]
                if kind == "F" and stage:
                    rows["x"][stage, tick] = x[i]
                if kind == "B":
                    rows["dy"][stage, tick] = dy[i]
        for i, tick in sent.items():
            rows["next_x"][stage, tick] = x[i]
        for i, tick in back.items():
            rows["next_dy"][stage, tick] = dy[i]
    return TickTables(**rows, slots=slots)


def _slots(spans: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Give each micro-batch the lowest slot that is free in all of its ticks, first to last."""
    free, found, until = list[int](), dict[int, int](), dict[int, int]()
    for i, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        for other in [o for o, last in until.items() if last < begin]:
            free.append(found[other])
            del until[other]
        free.sort()
        found[i] = free.pop(0) if free else len(until)
        until[i] = end
    return found


def run_stage(
    stage: Callable,
    first: Callable,
    last: Callable,
    axis: str,
    stages: int,
    micro_batches: int,
    index: jax.Array,
    weights: Tree,
    shared: Tree,
    batch: Tree,
) -> tuple[jax.Array, Tree, Tree]:
    """Run all ticks of one stage, inside a shard_map over `axis`.

    Args:
        stage, first, last: as `value_and_grad` takes them.
        axis: the stages'.
        stages, micro_batches: p and m.
        index: of this stage.
        weights, shared, batch: this stage's weights, the other weights, all micro-batches.

    Returns:
        The sums over micro-batches of the loss and of the gradients of weights and of shared, in
        float32 at least; what this stage has of them.
    """
    tables = tick_tables(stages, micro_batches)
    rows = {name: jnp.asarray(getattr(tables, name))[index] for name in TickTables._fields[:-1]}
    at_first, at_last = index == 0, index == stages - 1
    x_like = jax.eval_shape(first, shared, picked(batch, jnp.int32(0)))
    dx_like = differentiable(x_like, x_like)
    loss_like = jax.eval_shape(last, shared, x_like, picked(batch, jnp.int32(0)))

    def backward(weights: Tree, x: Tree, dy: Tree) -> tuple[Tree, Tree, Tree]:
        y, pull = jax.vjp(stage, weights, x)
        dw, dx = pull(as_cotangent(y, dy))
        return y, differentiable(x, dx), dw

    passes = split(backward, weights, x_like, dx_like)
    saved_like = jax.eval_shape(passes.forward, weights, x_like)[1]
    kept_like = jax.eval_shape(passes.inputs, weights, saved_like, dx_like)[1]

    def buffer(like: Tree, name: str) -> Tree:
        return jax.tree.map(lambda a: jnp.zeros((tables.slots[name], *a.shape), a.dtype), like)

    def idle(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        return carry

    def run_f(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        of = picked(batch, jnp.maximum(rows["micro_batch"][tick], 0))
        x = lax.cond(
            at_first,
            lambda: first(shared, of),
            lambda: picked(carry["x"], jnp.maximum(rows["x"][tick], 0)),
        )
        y, saved = passes.forward(weights, x)

        def score() -> tuple[jax.Array, Tree, Tree]:
            value, pull = jax.vjp(lambda s, y: last(s, y, of), shared, y)
            of_shared, dy = pull(jnp.ones_like(value))
            total = summed_into(carry["shared"], of_shared)
            return carry["loss"] + value.astype(carry["loss"].dtype), total, differentiable(y, dy)

        def pass_on() -> tuple[jax.Array, Tree, Tree]:
            return carry["loss"], carry["shared"], carry["own"]

        loss, total, own = lax.cond(at_last, score, pass_on)
        stored = _stored(carry["saved"], saved, rows["saved"][tick])
        return {**carry, "y": y, "saved": stored, "loss": loss, "shared": total, "own": own}

    def run_b(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        of = picked(batch, jnp.maximum(rows["micro_batch"][tick], 0))
        saved = picked(carry["saved"], jnp.maximum(rows["saved"][tick], 0))
        dy = picked(carry["dy"], jnp.maximum(rows["dy"][tick], 0))
        dx, kept = passes.inputs(weights, saved, dy)

        def embed() -> Tree:
            start, pull = jax.vjp(lambda s: first(s, of), shared)
            return summed_into(carry["shared"], pull(as_cotangent(start, dx))[0])

        total = lax.cond(at_first, embed, lambda: carry["shared"])
        stored = _stored(carry["kept"], kept, rows["kept"][tick])
        return {**carry, "dx": dx, "kept": stored, "shared": total}

    def run_w(carry: dict[str, Tree], tick: jax.Array) -> dict[str, Tree]:
        saved = picked(carry["saved"], jnp.maximum(rows["saved"][tick], 0))
        kept = picked(carry["kept"], jnp.maximum(rows["kept"][tick], 0))
        of_weights = passes.weights(weights, saved, kept)
        return {**carry, "weights": summed_into(carry["weights"], of_weights)}

    def send(tree: Tree, step: int) -> Tree:
        along = [(i, i + step) for i in range(stages) if 0 <= i + step < stages]
        return jax.tree.map(lambda a: lax.ppermute(a, axis, along), tree)

    def run(carry: dict[str, Tree], tick: jax.Array) -> tuple[dict[str, Tree], None]:
        carry = lax.switch(rows["kind"][tick], (idle, run_f, run_b, run_w), carry, tick)
        x, dy = send(carry["y"], 1), send(carry["dx"], -1)
        dy = jax.tree.map(lambda own, sent: jnp.where(at_last, own, sent), carry["own"], dy)
        x = _stored(carry["x"], x, rows["next_x"][tick])
        return {**carry, "x": x, "dy": _stored(carry["dy"], dy, rows["next_dy"][tick])}, None

    zero = {name: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), t) for name, t in (
        ("y", x_like), ("dx", dx_like), ("own", dx_like))}  # fmt: skip
    carry = zero | dict(
        x=buffer(x_like, "x"),
        dy=buffer(dx_like, "dy"),
        saved=buffer(saved_like, "saved"),
        kept=buffer(kept_like, "kept"),
        weights=jax.tree.map(wide_zeros, weights),
        shared=jax.tree.map(wide_zeros, shared),
        loss=wide_zeros(loss_like),
    )
    carry, _ = lax.scan(run, carry, jnp.arange(tables.kind.shape[1]))
    return carry["loss"], carry["weights"], carry["shared"]


def _stored(buffers: Tree, values: Tree, slot: jax.Array) -> Tree:
    """Store values in a slot of their buffers; nowhere where it is NONE."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(buffer, jnp.maximum(slot, 0), 0, keepdims=False)
        new = jnp.where(slot != NONE, value, old)
        return lax.dynamic_update_index_in_dim(buffer, new, jnp.maximum(slot, 0), 0)

    return jax.tree.map(one, buffers, values)
