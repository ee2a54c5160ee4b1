"""Times matmuls, memory-bound kernels and collectives on the devices that JAX sees here.

Every measurement runs on all devices at once, as in a step: what they share (a CPU's cores and
memory, most of all) is shared while it is timed. An op runs in a loop inside one program, long
enough for what starting the program costs to vanish. Let nothing else run on the machine meanwhile.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap import fit
from jaxoverlap.measured import Here, Memory, Permutes, Tables

M_SIZES = (8, 32, 128, 512)  # a matmul of 256 rows in eight is one of 32
NK_SIZES = (32, 128, 512)
DTYPES = ("f32", "bf16")
_ELEMENTS = tuple(1 << p for p in range(8, 21, 3))  # of float32, on each device
_ROUNDS = 9
_TARGET_S = 0.02  # how long a loop should run: by far longer than its program takes to start
# What stands between two collectives while they are timed: a matmul of so many rows. Its end is
# not the same on all devices, and collectives wait for the last.
_KERNEL_ROWS, _KERNEL_SIZE = 256, 128
_NAMES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_SOURCE = "python -m jaxoverlap.calibrate --here"

Body = Callable[..., tuple[jax.Array, ...]]
Shapes = tuple[tuple[int, ...], ...]
Clock = Callable[[], float]  # seconds of one run of what is measured


def measurements() -> int:
    """How many steps `tables_here` takes: programs to compile, then rounds."""
    collectives = (len(_COLLECTIVES) * len(_group_sizes(len(jax.devices()))) + 1) * len(_ELEMENTS)
    matmuls = len(DTYPES) * len(M_SIZES) * len(NK_SIZES) ** 2
    return matmuls + len(_KERNELS) * len(_ELEMENTS) + collectives + _ROUNDS


def tables_here(
    date: str, advance: Callable[[str], None], *, each_round: Callable[[], None] = lambda: None
) -> Tables:
    """Measure, and fit the tables of the cost model.

    All is timed once a round, and medians over the rounds are taken: what else the machine does
    comes and goes over seconds, and meets all alike.

    Args:
        advance: called with a few words before each program is made, and before each round.
        each_round: called in each round, to time something else under the same conditions.

    Raises:
        ValueError: if there is but one device.
    """
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(
            "one device has no collectives to time: for eight CPU devices set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    clocks: dict[tuple[Any, ...], Clock] = {}
    for key, make in _programs():
        advance(" ".join(map(str, key)))
        clocks[key] = make()
    taken: dict[tuple[Any, ...], list[float]] = {key: [] for key in clocks}
    for turn in range(_ROUNDS):
        advance(f"round {turn + 1} of {_ROUNDS}")
        for key, clock in clocks.items():
            taken[key].append(clock())
        each_round()
    return _fit(date, {key: np.array(rounds) for key, rounds in taken.items()})


Taken = dict[tuple[Any, ...], np.ndarray]  # seconds by what was measured, one a round


def _fit(date: str, taken: Taken) -> Tables:
    devices = jax.devices()
    matmuls = {}
    for dtype in DTYPES:
        found = [(*key[1:], np.median(s)) for key, s in taken.items() if key[0] == dtype]
        rows, width = fit.MatmulRows(*np.array(found, float).T), np.dtype(_NAMES[dtype]).itemsize
        rates = fit.fit_rates(rows, float(width), float(width))
        matmuls[dtype] = fit.fit_matmuls(rows, rates, _SOURCE, M_SIZES, NK_SIZES)
    return Tables(
        chip=devices[0].device_kind,
        date=date,
        matmuls=matmuls,
        memory=_memory(taken),
        collectives=fit.fit_collectives(list(_collective_rows(taken)), _SOURCE),
        permutes=_permutes(taken),
        channels=0,
        here=Here(
            devices=len(devices),
            platform=devices[0].platform,
            versions=f"jax {jax.__version__}, Python {platform.python_version()}",
        ),
    )


# -- what is timed --------------------------------------------------------------------------------


def _programs() -> Iterator[tuple[tuple[Any, ...], Callable[[], Clock]]]:
    """What is timed, by name, and how its program is made."""
    devices = len(jax.devices())
    for dtype, m, n, k in itertools.product(DTYPES, M_SIZES, NK_SIZES, NK_SIZES):
        shapes = ((m, k), (k, n), (m, n))
        yield (dtype, m, n, k), partial(_clock, _matmul, shapes, _NAMES[dtype], devices)
    for (name, body), count in itertools.product(_KERNELS.items(), _ELEMENTS):
        yield (name, count), partial(_clock, body, ((count,),), jnp.float32, devices)
    for (kind, (body, lengths, _)), count in itertools.product(_COLLECTIVES.items(), _ELEMENTS):
        for size in _group_sizes(devices):
            shapes = tuple((length,) for length in lengths(count, size))
            yield (kind, count, size), partial(_collective_clock, body, shapes, size)
    for count in _ELEMENTS:
        make = partial(_collective_clock, _permute, ((count,),), devices)
        yield ("collective-permute", count, devices), make


def _matmul(a: jax.Array, b: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Another matmul, which cannot start before the last one has given its result."""
    return a.at[0, 0].set(before[0, 0]), b, jnp.dot(a, b)


_KERNELS: dict[str, Body] = {
    "bytes": lambda x: (x * 0.5 + 1.0,),
    "transcendental": lambda x: (jnp.tanh(x),),
}
def _permute(x: jax.Array) -> tuple[jax.Array, ...]:
    size = lax.axis_size("x")
    return (lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]),)


def _gather(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    whole = lax.all_gather(x, "x", tiled=True)
    return x.at[0].set(before[0]), whole


def _scatter(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    return x.at[0].set(before[0]), lax.psum_scatter(x, "x", tiled=True)


def _reduce(x: jax.Array) -> tuple[jax.Array, ...]:
    return (lax.psum(x, "x") / lax.axis_size("x"),)


def _exchange(x: jax.Array) -> tuple[jax.Array, ...]:
    return (lax.all_to_all(x, "x", 0, 0, tiled=True),)


# Body, and the lengths of what it carries as parts of the whole.
_COLLECTIVES: dict[str, tuple[Body, Callable[[int, int], tuple[int, ...]], int]] = {
    "all-gather": (_gather, lambda count, n: (count // n, count), 1),
    "reduce-scatter": (_scatter, lambda count, n: (count, count // n), 1),
    "all-reduce": (_reduce, lambda count, n: (count,), 2),
    "all-to-all": (_exchange, lambda count, n: (count,), 1),
}


def _group_sizes(devices: int) -> list[int]:
    return [n for n in range(2, devices + 1) if devices % n == 0]


# -- what is found --------------------------------------------------------------------------------


def _memory(taken: Taken) -> Memory:
    """Launch by the smallest, the rates by medians over the others."""
    moved = np.array([8.0 * count for count in _ELEMENTS])  # a float32 read, one written
    simple, hard = (
        np.array([np.median(taken[name, count]) for count in _ELEMENTS]) for name in _KERNELS
    )
    rate = np.median(moved[1:] / np.maximum(simple[1:] - simple[0], 1e-9))
    more_s = np.median((hard - simple)[1:] / _ELEMENTS[1:])
    return Memory(float(simple[0]), float(rate), _SOURCE, max(float(more_s), 0.0))


def _collective_rows(taken: Taken) -> Iterator[fit.CollectiveRow]:
    for kind, (_, _, passes) in _COLLECTIVES.items():
        for (_, count, size), seconds in ((k, s) for k, s in taken.items() if k[0] == kind):
            moved = passes * 4 * count * (size - 1) // size
            yield fit.CollectiveRow(kind, size, moved, _positive(seconds))


def _permutes(taken: Taken) -> Permutes:
    """Latency by the smallest, the rate by the largest."""
    found = {key[1]: _positive(s) for key, s in taken.items() if key[0] == "collective-permute"}
    moved, seconds = 4.0 * np.array(list(found)), np.array(list(found.values()))
    rate = moved[-1] / max(seconds[-1] - seconds[0], 1e-9)
    error = fit.error(seconds[0] + moved / rate, seconds)
    return Permutes(float(seconds[0]), 0.0, float(rate), _SOURCE, error)


def _positive(differences: np.ndarray) -> float:
    """The median of differences of two times: no less than a microsecond."""
    return max(float(np.median(differences)), 1e-6)


# -- the clock ------------------------------------------------------------------------------------


def _collective_clock(body: Body, shapes: Shapes, group: int) -> Clock:
    """How much longer a kernel with a collective after it takes than the kernel alone.

    In a loop of collectives alone all devices arrive together, and in a step they do not: what
    a step waits for, the last one's kernel, is a part of what a collective costs there.
    """
    square = (_KERNEL_SIZE, _KERNEL_SIZE)
    kernel = ((_KERNEL_ROWS, _KERNEL_SIZE), square, (_KERNEL_ROWS, _KERNEL_SIZE))
    both = _clock(partial(_after_a_kernel, body), (*kernel, *shapes), jnp.float32, group)
    alone = _clock(
        partial(_after_a_kernel, lambda *carry: carry), (*kernel, (1,)), jnp.float32, group
    )
    return lambda: both() - alone()


def _after_a_kernel(body: Body, a: Any, b: Any, _: Any, x: Any, *rest: Any) -> tuple[Any, ...]:
    """A matmul that waits for the last run of `body`, then the next one, which waits for it."""
    a = a.at[0, 0].set(x[0])
    product = jnp.dot(a, b)
    return a, b, product, *body(x.at[0].set(product[0, 0]), *rest)


def _clock(body: Body, shapes: Shapes, dtype: Any, group: int) -> Clock:
    """A clock for one run of `body` on every device at once, in groups along the axis "x".

    Args:
        shapes: what the body takes and gives on each device.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, group), ("groups", "x"))
    everywhere = PartitionSpec(("groups", "x"))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    def run(trips: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return lax.fori_loop(0, trips, lambda _, c: body(*c), carry)

    sharding = jax.sharding.NamedSharding(mesh, everywhere)
    carry = tuple(
        jax.device_put(np.ones((len(devices) * s[0], *s[1:]), dtype), sharding) for s in shapes
    )

    def seconds(trips: jax.Array) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(trips, carry))
        return time.perf_counter() - start

    seconds(_replicated(mesh, 1))  # compiles
    trips = max(1, int(_TARGET_S / seconds(_replicated(mesh, 1))))
    count = _replicated(mesh, trips)
    return lambda: seconds(count) / trips


def _replicated(mesh: Mesh, number: int) -> jax.Array:
    return jax.device_put(np.int32(number), jax.sharding.NamedSharding(mesh, PartitionSpec()))
