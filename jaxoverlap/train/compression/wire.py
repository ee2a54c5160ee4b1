"""The collectives of compressors, fused over layers, and their bytes in closed form.

A compressor is written for one matrix as a generator that yields requests and is sent their
results. `together` runs the generators of many matrices at once: requests that are yielded in the
same round become one collective for each kind and dtype (on CPU devices: `_joined_sums`). The path
of a gradient:

    DataParallel.__call__   control_loop: settings in use, compiled program
      WorkerStep            worker.py: loss_and_grads of this worker's part of the batch
        Averager.average    averager.py: a generator for each matrix
          _started            gradient + what was not sent before         a leaf
          together            this file                                   all matrices
                                  layer 0     layer 1     other leaves
                    round 1       mean P      mean P      mean            one all-reduce
                    round 2       mean Q      mean Q                      one all-reduce
                              (a compressor's `average` between its rounds)
          _done               mean, error feedback, compressor's state    a leaf
      if_finite             the optimizer's update, or the state before it

With `in_backward` the generators of stacked leaves run inside the backward scan
(`Averager.reduce_slices`, called by backward.py), and `average` gets their results as `reduced`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Kind = Literal["mean", "gather", "exchange"]
_SMALL_BYTES = 2**20  # headers are nothing beside more
SCOPE = "compressed_average"  # the scope of the collectives, by which an audit finds them


@dataclass(frozen=True)
class WireRequest:
    """A collective over the workers.

    Attributes:
        kind: "mean" gives the mean over workers, of the value's shape; "gather" gives all workers'
            values, [workers, *shape]; "exchange" takes [workers, ...], sends part i to worker i,
            and gives what the workers sent here, [workers, ...].
        value: what this worker puts in.
    """

    kind: Kind
    value: jax.Array


Average = Generator[WireRequest, jax.Array, Any]


def sent_bytes(kind: Kind, value_bytes: float, workers: int) -> float:
    """Return the bytes that one worker sends in a collective, as a ring does it.

    Args:
        kind: of the request.
        value_bytes: of the value that a worker puts in.
        workers: how many there are.
    """
    shares = {"mean": 2 * (workers - 1) / workers, "gather": workers - 1}
    return value_bytes * shares.get(kind, (workers - 1) / workers)


def together(averages: Sequence[Average], *, axis: str, workers: int) -> list[Any]:
    """Run generators side by side and return what each returns, in order.

    Args:
        averages: generators of requests.
        axis: the manual mesh axis of the workers.
        workers: its size.
    """
    results: list[Any] = [None] * len(averages)
    waiting = dict[int, WireRequest]()

    def resume(number: int, answer: jax.Array | None) -> None:
        try:
            waiting[number] = averages[number].send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(averages)):
        resume(number, None)
    first = True
    while waiting:
        requests, waiting = waiting if first else _tied(waiting), {}
        first = False
        for number, answer in _answers(requests, axis, workers).items():
            resume(number, answer)
    return results


def _tied(requests: dict[int, WireRequest]) -> dict[int, WireRequest]:
    """Have all requests wait for the last of them, which has waited for the round before.

    XLA would join one layer's second mean with the next layer's first one, and so make a chain of
    collectives as long as there are layers.
    """
    values = lax.optimization_barrier({n: request.value for n, request in requests.items()})
    return {n: WireRequest(request.kind, values[n]) for n, request in requests.items()}


def _answers(requests: dict[int, WireRequest], axis: str, workers: int) -> dict[int, jax.Array]:
    groups = dict[Any, list[int]]()
    for number, request in requests.items():
        groups.setdefault((request.kind, request.value.dtype), []).append(number)
    found = dict[int, jax.Array]()
    with jax.named_scope(SCOPE):
        for (kind, _), numbers in groups.items():
            values = [requests[number].value for number in numbers]
            found |= zip(numbers, _fused(kind, values, axis, workers), strict=True)
    return found


def _fused(kind: Kind, values: list[jax.Array], axis: str, workers: int) -> list[jax.Array]:
    """Run one collective over several values of a dtype.

    Means keep their shapes, as values may be sharded over other axes, which a flattened one would
    not be: XLA itself makes one all-reduce of several, but on CPUs (`_joined_sums`).
    """
    if workers == 1:  # XLA's partitioner fails on an axis of one device beside automatic ones
        return [value[None] if kind == "gather" else value for value in values]
    if kind == "mean":
        return [total / workers for total in _sums(values, axis)]
    keep = 1 if kind == "exchange" else 0  # leading dims that are not flattened
    shapes = [value.shape[keep:] for value in values]
    flat = [value.reshape(*value.shape[:keep], -1) for value in values]
    joined = jnp.concatenate(flat, axis=-1) if len(flat) > 1 else flat[0]
    if kind == "gather":
        out = lax.all_gather(joined, axis)
    else:
        out = lax.all_to_all(joined, axis, 0, 0, tiled=True)
    results, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        results.append(out[..., offset : offset + size].reshape(workers, *shape))
        offset += size
    return results


def _sums(values: list[jax.Array], axis: str) -> list[jax.Array]:
    """Add values of one dtype up over the workers.

    On CPUs those of 16 bits go as float32. XLA:CPU would send them so in any case, but aborts the
    process where other axes of the mesh are automatic (jax 0.12.0.1).
    """
    mesh, dtype = jax.sharding.get_abstract_mesh(), values[0].dtype
    if mesh.abstract_device is None or mesh.abstract_device.platform != "cpu":
        return lax.psum(values, axis)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2:
        return [s.astype(dtype) for s in _sums([v.astype(jnp.float32) for v in values], axis)]
    if any(size > 1 for name, size in mesh.shape.items() if name != axis):
        return lax.psum(values, axis)  # a joined value would lose its sharding over other axes
    return _joined_sums(values, axis)


def _joined_sums(values: list[jax.Array], axis: str) -> list[jax.Array]:
    """Add values up over the workers, the small ones as one.

    XLA:CPU sends each operand of an all-reduce by itself, 5 kB of headers and notices each between
    processes (measured: four hosts, gloo), where XLA:GPU sends all as one.
    """
    small = [n for n, value in enumerate(values) if value.nbytes < _SMALL_BYTES]
    sums = [value if n in small else lax.psum(value, axis) for n, value in enumerate(values)]
    if small:
        total = lax.psum(jnp.concatenate([values[n].reshape(-1) for n in small]), axis)
        ends = list(itertools.accumulate(values[n].size for n in small))
        for n, part in zip(small, jnp.split(total, ends[:-1]), strict=True):
            sums[n] = part.reshape(values[n].shape)
    return sums


def mean_of(value: jax.Array) -> Average:
    """Average a value as it is; an average of no compression."""
    return (yield WireRequest("mean", value))
