"""Measure how many times longer things take in a train step than in a loop of nothing else.

A loop soon comes back to its arrays; a step reads in its backward pass what it wrote in its forward
pass, and goes once through weights and moments, so that caches hold less of it. A loop of
collectives keeps all devices in step with each other; in a step some compute while others wait, on
the cores that they share. These effects are measured on steps of our own: layers of kernels bound
by memory and nothing else, an MLP on each device by itself, and the same MLP with weights split
over two devices and tokens over the others, with its collectives and with rings.

This is for devices that share a host's cores and caches. On a GPU such small steps are bound by
launches.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap import ring
from jaxoverlap.cost import adjusted_tables
from jaxoverlap.cost.model import CostModel
from jaxoverlap.cost.tables import ChipTables, InAStep
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.timeline import COMPUTE, Timeline

MEMORY, ALONE, WHOLE, RINGS = "memory", "alone", "whole", "rings"
# Each row names a factor, the kind of event that it scales, and the steps that it is found from.
_FOUND = (
    ("memory", "memory", (MEMORY,)),
    ("matmuls", "matmul", (ALONE,)),
    ("collectives", "wait", (WHOLE, RINGS)),
)
_HIDDEN = 128  # features, on a device
_SPEC = PartitionSpec(("data", "model"))
_RATE, _DECAY, _DECAY_SQUARES, _TINY = 1e-3, 0.9, 0.99, 1e-6

Size = tuple[int, int, int]
Key = tuple[str, Size]  # the layers, their size
Layers = list[tuple[jax.Array, ...]]  # the weights of each
State = tuple[Layers, Layers, Layers]  # weights, and their moments
_SIZES: tuple[Size, ...] = ((512, 128, 6), (128, 128, 16))  # tokens, features, layers


def clock(how: str, size: Size) -> Callable[[], float]:
    """Return a clock for one step on every device at once."""
    compiled, (state, x) = _compiled(how, size), _arguments(how, size)

    def seconds() -> float:
        nonlocal state
        start = time.perf_counter()
        state = jax.block_until_ready(compiled(state, x))
        return time.perf_counter() - start

    seconds()
    return seconds


def in_a_step(taken: Mapping[Key, float], loops: ChipTables) -> ChipTables:
    """Scale the tables so that all times are as in a step.

    Kinds are fitted one after the other: time beyond all else in the steps is that kind's.

    Args:
        taken: seconds of all `STEPS`.
        loops: tables of what was timed in loops.

    Raises:
        ValueError: if a step took less than its known parts.
    """
    times, tables = InAStep(), loops
    for kind, events, hows in _FOUND:
        cost, keys = cost_of(tables), [key for key in taken if key[0] in hows]
        steps = [replay(module(*key), cost) for key in keys]
        simulated = sum(_seconds(step, events) for step in steps)
        left = simulated + sum(taken[k] - s.step_s for k, s in zip(keys, steps, strict=True))
        if left <= 0:
            raise ValueError(
                f"the steps of {' and '.join(hows)} took less than the kernels in them that are "
                "known: something else ran on this machine; measure again, with nothing else on it"
            )
        times = msgspec.structs.replace(times, **{kind: left / simulated})
        tables = adjusted_tables.in_a_step(loops, times)
    return tables


def cost_of(tables: ChipTables) -> CostModel:
    """Make the cost model of this machine."""
    assert tables.here
    return CostModel(adjusted_tables.cluster_here(tables, tables.here), tables)


def module(how: str, size: Size) -> hlo.Module:
    """Return the scheduled module of a step."""
    text = _compiled(how, size).as_text()
    assert text  # of all backends that JAX has
    return hlo.parse(text)


def _seconds(step: Timeline, kind: str) -> float:
    """Sum the seconds of all events of a kind on the compute lane."""
    return sum(e.seconds for e in step.events if e.lane == COMPUTE and e.kind == kind)


# -- the steps ------------------------------------------------------------------------------------


def _memory(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(_normalised(x) * weight)


def _alone(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return x + jnp.dot(jax.nn.gelu(jnp.dot(_normalised(x), up)), down)


def _whole(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    up, down = (lax.all_gather(w, "data", tiled=True) for w in (up, down))
    every = lax.all_gather(_normalised(x), "model", tiled=True)
    hidden = jax.nn.gelu(jnp.dot(every, up))
    return x + lax.psum_scatter(jnp.dot(hidden, down), "model", tiled=True)


def _rings(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    up, down = (lax.all_gather(w, "data", tiled=True) for w in (up, down))
    hidden = jax.nn.gelu(ring.all_gather_matmul(_normalised(x), up, "model"))
    return x + ring.matmul_reduce_scatter(hidden, down, "model")


_LAYERS: dict[str, Callable[..., jax.Array]] = {
    MEMORY: _memory,
    ALONE: _alone,
    WHOLE: _whole,
    RINGS: _rings,
}
STEPS: tuple[Key, ...] = tuple(itertools.product(_LAYERS, _SIZES))  # those that are timed


def _normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + _TINY)


def _loss(how: str, layers: Layers, x: jax.Array) -> jax.Array:
    for weights in layers:
        x = _LAYERS[how](x, *weights)
    return jnp.mean(x * x)


def _step(how: str, state: State, x: jax.Array) -> State:
    """Take a step of Adam, without its correction of the first steps."""
    layers, moments, squares = state
    grads = jax.grad(partial(_loss, how))(layers, x)

    def decayed(decay: float, old: jax.Array, new: jax.Array) -> jax.Array:
        return decay * old + (1 - decay) * new

    moments = jax.tree.map(partial(decayed, _DECAY), moments, grads)
    grads = jax.tree.map(jnp.square, grads)
    squares = jax.tree.map(partial(decayed, _DECAY_SQUARES), squares, grads)
    layers = jax.tree.map(
        lambda w, m, s: w - _RATE * m * lax.rsqrt(s + _TINY), layers, moments, squares
    )
    return layers, moments, squares


@functools.cache
def _compiled(how: str, size: Size) -> jax.stages.Compiled:
    step = jax.shard_map(
        partial(_step, how), mesh=_mesh(), in_specs=_SPEC, out_specs=_SPEC, check_vma=False
    )
    return jax.jit(step, donate_argnums=0).lower(*_arguments(how, size)).compile()


def _arguments(how: str, size: Size) -> tuple[State, jax.Array]:
    """Make state and batch, with arrays of its own on each device."""
    tokens, features, layers = size
    mesh, split = _mesh(), how in (WHOLE, RINGS)

    def array(fill: float, rows: int, columns: int) -> jax.Array:
        whole = np.full((mesh.size * rows, columns), fill, np.float32)
        return jax.device_put(whole, NamedSharding(mesh, _SPEC))

    shapes = [(tokens, features)]
    if how != MEMORY:
        shapes = [(features, _HIDDEN), (_HIDDEN, features)]
    if split:
        shapes = [(rows // mesh.shape["data"], columns) for rows, columns in shapes]
    weights, moments, squares = (
        [tuple(array(fill, *shape) for shape in shapes) for _ in range(layers)]
        for fill in (0.01, 0.0, 0.0)
    )
    x = array(0.5, tokens // (mesh.shape["model"] if split else 1), features)
    return (weights, moments, squares), x


def _mesh() -> Mesh:
    devices = jax.devices()
    data = 1 if len(devices) % 2 else 2
    return Mesh(np.array(devices).reshape(data, -1), ("data", "model"))
