"""Times matmuls, memory-bound kernels and collectives on the devices that JAX sees here.

Every measurement runs on all devices at once, as in a step: what they share (a CPU's cores and
memory, most of all) is shared while it is timed. An op runs in a loop inside one program, long
enough for what starting the program costs to vanish. Let nothing else run on the machine meanwhile.
"""

from __future__ import annotations

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
NK_SIZES = (64, 256, 1024)
DTYPES = ("f32", "bf16")
_ELEMENTS = tuple(1 << p for p in range(8, 23, 2))  # of float32, on each device
_REPEATS = 5
_TARGET_S = 0.05  # how long a loop should run: by far longer than its program takes to start
_NAMES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_SOURCE = "python -m jaxoverlap.calibrate --here"

Body = Callable[..., tuple[jax.Array, ...]]


def measurements() -> int:
    """How many measurements `tables_here` makes."""
    collectives = len(_COLLECTIVES) * len(_ELEMENTS) * len(_group_sizes(len(jax.devices())))
    return len(DTYPES) * len(M_SIZES) * len(NK_SIZES) ** 2 + 2 * len(_ELEMENTS) + collectives


def tables_here(date: str, advance: Callable[[str], None]) -> Tables:
    """Measure, and fit the tables of the cost model.

    Args:
        advance: called with a few words before each measurement.

    Raises:
        ValueError: if there is but one device.
    """
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(
            "one device has no collectives to time: for eight CPU devices set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    kind = devices[0].device_kind
    matmuls = {}
    for dtype in DTYPES:
        rows, width = _matmul_rows(dtype, advance), float(np.dtype(_NAMES[dtype]).itemsize)
        rates = fit.fit_rates(rows, width, width)
        matmuls[dtype] = fit.fit_matmuls(rows, rates, _SOURCE, M_SIZES, NK_SIZES)
    rows = list(_collective_rows(advance))
    return Tables(
        chip=kind,
        date=date,
        matmuls=matmuls,
        memory=_memory(advance),
        collectives=fit.fit_collectives(rows, _SOURCE),
        permutes=_permutes(advance),
        channels=0,
        here=Here(
            devices=len(devices),
            platform=devices[0].platform,
            versions=f"jax {jax.__version__}, Python {platform.python_version()}",
        ),
    )


# -- what is timed --------------------------------------------------------------------------------


def _matmul_rows(dtype: str, advance: Callable[[str], None]) -> fit.MatmulRows:
    rows = []
    for m in M_SIZES:
        for n in NK_SIZES:
            for k in NK_SIZES:
                advance(f"{dtype} matmul {m} x {n} x {k}")
                shapes = ((m, k), (k, n), (m, n))
                seconds = _seconds(_matmul, shapes, _NAMES[dtype], len(jax.devices()))
                rows.append((m, n, k, seconds))
    return fit.MatmulRows(*np.array(rows, float).T)


def _matmul(a: jax.Array, b: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Another matmul, which cannot start before the last one has given its result."""
    return a.at[0, 0].set(before[0, 0]), b, jnp.dot(a, b)


def _memory(advance: Callable[[str], None]) -> Memory:
    moved, seconds = [], []
    for count in _ELEMENTS:
        advance(f"a sum over {count} elements")
        seconds.append(_seconds(lambda x: (x * 0.5 + 1.0,), ((count,),), jnp.float32, 1))
        moved.append(2 * 4.0 * count)  # reads and writes
    return Memory(seconds[0], _rate(moved, seconds), _SOURCE)


def _permutes(advance: Callable[[str], None]) -> Permutes:
    size = len(jax.devices())
    ring = [(i, (i + 1) % size) for i in range(size)]
    moved, seconds = [], []
    for count in _ELEMENTS:
        advance(f"a permute of {count} elements")
        body = lambda x: (lax.ppermute(x, "x", ring),)  # noqa: E731
        seconds.append(_seconds(body, ((count,),), jnp.float32, size))
        moved.append(4.0 * count)
    latency_s, rate = seconds[0], _rate(moved, seconds)
    predicted = latency_s + np.array(moved) / rate
    return Permutes(latency_s, 0.0, rate, _SOURCE, fit.error(predicted, np.array(seconds)))


def _rate(moved: list[float], seconds: list[float]) -> float:
    """Bytes per second over what the smallest takes, by the two largest."""
    return float(np.mean([moved[i] / max(seconds[i] - seconds[0], 1e-9) for i in (-2, -1)]))


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


def _collective_rows(advance: Callable[[str], None]) -> Iterator[fit.CollectiveRow]:
    for kind, (body, lengths, passes) in _COLLECTIVES.items():
        for size in _group_sizes(len(jax.devices())):
            for count in _ELEMENTS:
                advance(f"{kind} of {count} elements among {size}")
                shapes = tuple((length,) for length in lengths(count, size))
                seconds = _seconds(body, shapes, jnp.float32, size)
                moved = passes * 4 * count * (size - 1) // size
                yield fit.CollectiveRow(kind, size, moved, seconds)


def _group_sizes(devices: int) -> list[int]:
    return [n for n in range(2, devices + 1) if devices % n == 0]


# -- the clock ------------------------------------------------------------------------------------


def _seconds(body: Body, shapes: tuple[tuple[int, ...], ...], dtype: Any, group: int) -> float:
    """Seconds of one run of `body` on every device at once, in groups along the axis "x".

    Args:
        shapes: what the body takes and gives on each device.
    """
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, group), ("groups", "x"))
    everywhere = PartitionSpec(("groups", "x"))
    sharded = partial(
        jax.shard_map, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )

    @partial(jax.jit, static_argnums=0)
    def run(trips: int, *carry: jax.Array) -> tuple[jax.Array, ...]:
        loop = lambda *c: lax.fori_loop(0, trips, lambda _, c: body(*c), c)  # noqa: E731
        return sharded(loop)(*carry)

    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, everywhere)
        carry = tuple(
            jax.device_put(np.ones((len(devices) * s[0], *s[1:]), dtype), sharding) for s in shapes
        )
        trips = max(1, int(_TARGET_S / _best(partial(run, 1), carry)))
        return _best(partial(run, trips), carry) / trips


def _best(run: Callable[..., tuple[jax.Array, ...]], carry: tuple[jax.Array, ...]) -> float:
    """The fastest of a few runs, after one that compiles: what else runs here only adds."""
    jax.block_until_ready(run(*carry))
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*carry))
        found.append(time.perf_counter() - start)
    return min(found)
