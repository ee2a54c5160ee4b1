"""Time matmuls, other kernels and collectives on the devices that JAX sees here.

Every measurement runs on all devices at once, as in a step: what they share (a CPU's cores and
memory, most of all) is shared while it is timed. An op runs in a loop inside one program, long
enough for what starting the program costs to vanish. All ops are timed in turn, round by round, and
medians are taken, since steps are compared by medians. Let nothing else run on the machine.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap.calibrate import fit, step_factors
from jaxoverlap.cost.collective_tables import Permutes, Skew
from jaxoverlap.cost.interpolation import Curve
from jaxoverlap.cost.tables import ChipTables, Here, InAStep, MemoryTable
from jaxoverlap.plan.collectives import PERMUTE

_RUNS = {"kernel": 5, "skew": 5, "step": 3}  # in a round, of what gives differences of noisy times
_TARGET_S = 0.02  # how long a loop should run: by far longer than its program takes to start
# So many matmuls run before a collective, to show how long it waits for the last device.
_RUNS_BEFORE, _KERNEL_SIZE = (1, 2, 4, 8), 128
# In a step a core runs other kernels, of other devices too, before it sees an array again. So an op
# that is timed takes turns among so many bytes on each device, which no core's own cache holds.
_FOOTPRINT_BYTES = 1 << 20
_MOST_SETS = 16  # of arrays, each of which is a kernel to compile and to load
# Matmuls and permutes that run beside each other, to show what these take from those.
_BESIDE, _BESIDE_SIZE, _BESIDE_ELEMENTS = 4, 1024, 1 << 19
# Steps transpose batches of matrices, as in attention, and activations, for a weight's gradient.
_SETS_TRANSPOSED = 2  # a step transposes what it has just written
_TRANSPOSED_ROWS = (64, 128, 512)
_NAMES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_SOURCE = "python -m jaxoverlap.calibrate --here"

Shapes = tuple[tuple[int, ...], ...]
Body = Callable[..., tuple[jax.Array, ...]]
Clock = Callable[[], float]  # seconds of one run of what is measured


@dataclass(frozen=True)
class Grid:
    """The sizes that are measured.

    Attributes:
        dtypes: of matmuls, as HLO writes them.
        m, nk: dims of matmuls; m = 256 split over eight devices is m = 32.
        elements: of float32 on each device, of other kernels and collectives.
        whole_groups: whether collectives are measured among all devices alone, and not in groups.
        rounds: how often each is timed.
    """

    dtypes: tuple[str, ...] = ("f32", "bf16")
    m: tuple[int, ...] = (8, 32, 128, 512)
    nk: tuple[int, ...] = (32, 128, 512)
    elements: tuple[int, ...] = tuple(1 << p for p in range(8, 21, 3))
    whole_groups: bool = False
    rounds: int = 21

    @property
    def transposed(self) -> tuple[int, ...]:
        """Sizes of transposes: between the smallest and the largest."""
        return self.elements[2:4]

    def groups(self, devices: int) -> list[int]:
        """Return the sizes of groups whose collectives are measured."""
        least = devices if self.whole_groups else 2
        return [n for n in range(least, devices + 1) if devices % n == 0]


USUAL = Grid()


def measurements(grid: Grid = USUAL) -> int:
    """Count the steps that `tables_here` takes: programs to compile, then rounds."""
    return sum(1 for _ in _programs(grid)) + grid.rounds


def tables_here(
    date: str,
    advance: Callable[[str], None],
    *,
    grid: Grid = USUAL,
    each_round: Callable[[], object] = lambda: None,
) -> ChipTables:
    """Measure, and fit the tables of the cost model.

    All is timed once a round, and medians over the rounds are taken: what else the machine does
    comes and goes over seconds, and meets all alike. Where there are many processes, all call this,
    and process 0's tables count.

    Args:
        advance: called with a few words before each program is made, and before each round.
        grid: the sizes to measure.
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
    return _fit(date, _timed(_programs(grid), grid.rounds, advance, each_round), grid)


def with_links_here(
    tables: ChipTables, advance: Callable[[str], None], grid: Grid = USUAL
) -> ChipTables:
    """Measure collectives alone, where links have changed since `tables` were measured here."""
    programs = ((key, make) for key, make in _programs(grid) if key[0] in COLLECTIVES)
    return msgspec.structs.replace(
        tables, **_links(_timed(programs, grid.rounds, advance, lambda: None))
    )


Taken = dict[tuple[Any, ...], np.ndarray]  # seconds by what was measured, one a round


def _timed(
    programs: Iterator[tuple[tuple[Any, ...], Callable[[], Clock]]],
    rounds: int,
    advance: Callable[[str], None],
    each_round: Callable[[], object],
) -> Taken:
    clocks: dict[tuple[Any, ...], Clock] = {}
    for key, make in programs:
        advance(" ".join(map(str, key)))
        clocks[key] = make()
    taken: dict[tuple[Any, ...], list[float]] = {key: [] for key in clocks}
    for turn in range(rounds):
        advance(f"round {turn + 1} of {rounds}")
        for key, clock in clocks.items():
            runs = _RUNS.get(key[0], 1)
            taken[key].append(statistics.median(clock() for _ in range(runs)))
        each_round()
    return {key: np.array(rounds) for key, rounds in taken.items()}


def _fit(date: str, taken: Taken, grid: Grid) -> ChipTables:
    devices = jax.devices()
    matmuls = {}
    for dtype in grid.dtypes:
        timings = [(*key[1:], np.median(s)) for key, s in taken.items() if key[0] == dtype]
        rows, width = fit.MatmulRows(*np.array(timings, float).T), np.dtype(_NAMES[dtype]).itemsize
        rates = fit.fit_rates(rows, float(width), float(width))
        # Of few rows the fastest may be no slower than a launch, and then say nothing.
        reached = float(np.max(2.0 * rows.m * rows.n * rows.k / rows.seconds))
        rates = replace(rates, flops_per_s=min(rates.flops_per_s, 1.5 * reached))
        matmuls[dtype] = fit.fit_matmuls(rows, rates, _SOURCE, grid.m, grid.nk)
    tables = ChipTables(
        chip=devices[0].device_kind,
        date=date,
        matmuls=matmuls,
        memory=_memory(taken, grid),
        **_links(taken),
        channels=0,
        skew=_skew(taken, grid),
        taken=_taken(taken),
        here=measured_on(devices),
    )
    steps = {key: float(np.median(taken["step", *key])) for key in _steps()}
    return step_factors.in_a_step(steps, tables) if steps else tables


def measured_on(devices: Sequence[Any], hosts: int = 1) -> Here:
    """Describe the devices that were measured, on so many hosts, and the versions on them."""
    return Here(
        devices=len(devices),
        platform=devices[0].platform,
        versions=f"jax {jax.__version__}, Python {platform.python_version()}",
        in_a_step=InAStep(),
        processes=jax.process_count(),
        hosts=hosts,
    )


def _steps() -> tuple[step_factors.Key, ...]:
    """Return the steps to time, for devices that share cores and caches, in one process."""
    shared = jax.devices()[0].platform == "cpu" and jax.process_count() == 1
    return step_factors.STEPS if shared else ()


# -- what is timed --------------------------------------------------------------------------------


def _programs(grid: Grid) -> Iterator[tuple[tuple[Any, ...], Callable[[], Clock]]]:
    """Yield each op to time: its key, and a function that makes its program."""
    devices = len(jax.devices())
    for dtype, m, n, k in itertools.product(grid.dtypes, grid.m, grid.nk, grid.nk):
        sets = _sets((m * k + k * n + m * n) * np.dtype(_NAMES[dtype]).itemsize)
        shapes = ((m, k), (k, n), (m, n)) * sets
        make = partial(_clock, _matmuls, shapes, _NAMES[dtype], devices, each=sets)
        yield (dtype, m, n, k), make
    for (name, apply), count in itertools.product(_KERNELS.items(), grid.elements):
        body, sets = partial(_kernels, apply), _sets(4 * count)
        make = partial(_clock, body, ((count,),) * sets, jnp.float32, devices, each=sets)
        yield (name, count), make
    for rows, count in itertools.product(_TRANSPOSED_ROWS, grid.transposed):
        columns, sets = min(rows, _TRANSPOSED_ROWS[1], count // rows), _SETS_TRANSPOSED
        body, shape = partial(_kernels, _transpose), (count // (rows * columns), rows, columns)
        make = partial(_clock, body, (shape,) * sets, jnp.float32, devices, each=sets)
        yield ("transposed", rows, count), make
    for (kind, (body, lengths, _)), count in itertools.product(COLLECTIVES.items(), grid.elements):
        # XLA:CPU lets a permute wait for all devices, however few it joins.
        for size in [devices] if kind == PERMUTE else grid.groups(devices):
            shapes = tuple((length,) for length in lengths(count, size))
            yield (kind, count, size), partial(_clock, body, shapes, jnp.float32, size)
    if jax.process_count() > 1:
        shapes = ((_BESIDE_SIZE,) * 2, (_BESIDE_SIZE,) * 2, (_BESIDE_ELEMENTS,))
        for what in ((True, False), (False, True), (True, True)):
            body = partial(_beside, *what)
            yield ("beside", *what), partial(_clock, body, shapes, jnp.float32, devices)
    for key in _steps():
        yield ("step", *key), partial(step_factors.clock, *key)
    shapes = (*((_KERNEL_SIZE,) * 2,) * 3, (grid.elements[0],))
    for runs in _RUNS_BEFORE:
        nothing = partial(_after_kernels, runs, lambda x: (x,))
        yield ("kernel", runs), partial(_clock, nothing, shapes, jnp.float32, devices)
        for size in grid.groups(devices):
            both = partial(_after_kernels, runs, reduce)
            yield ("skew", runs, size), partial(_clock, both, shapes, jnp.float32, size)


def _beside(computes: bool, sends: bool, a: jax.Array, b: jax.Array, x: jax.Array) -> Any:
    """Run a few matmuls, and concurrently a few permutes that no matmul depends on."""
    for _ in range(_BESIDE):
        if computes:
            a = jnp.dot(a, b)
        if sends:
            (x,) = permute(x)
    return a, b, x


def _matmuls(*carry: jax.Array) -> tuple[jax.Array, ...]:
    """Run matmuls of arrays of their own, each of which waits for the last one's result."""
    carried = list(carry)
    for place in range(0, len(carry), 3):
        a, b, _ = carried[place : place + 3]
        a = a.at[0, 0].set(carried[place - 1][0, 0])
        carried[place : place + 3] = a, b, jnp.dot(a, b)
    return tuple(carried)


def _kernels(apply: Callable[..., jax.Array], *carry: jax.Array) -> tuple[jax.Array, ...]:
    """Run kernels of arrays of their own, each of which waits for the last one's result."""
    carried = list(carry)
    for place in range(len(carry)):
        x, before = lax.optimization_barrier((carried[place], carried[place - 1]))
        carried[place] = apply(x, before.reshape(-1)[0])
    return tuple(carried)


def _transpose(x: jax.Array, before: jax.Array) -> jax.Array:
    return jnp.swapaxes(x * 0.5 + before, 1, 2).reshape(x.shape)


_KERNELS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "bytes": lambda x, before: x * 0.5 + before,
    "transcendental": lambda x, before: jnp.tanh(x) + before,
}


def _sets(num_bytes: int) -> int:
    """Return the number of sets of arrays that take turns, each of so many bytes."""
    return min(math.ceil(_FOOTPRINT_BYTES / num_bytes), _MOST_SETS)


# -- collectives: each body takes and gives what it carries ---------------------------------------


def permute(x: jax.Array) -> tuple[jax.Array, ...]:
    """Send all to the next device."""
    size = lax.axis_size("x")
    return (lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]),)


def gather(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Gather an array that waits for the last gather's."""
    whole = lax.all_gather(x, "x", tiled=True)
    return x.at[0].set(before[0]), whole


def scatter(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Scatter the sum of an array that waits for the last one's."""
    return x.at[0].set(before[0]), lax.psum_scatter(x, "x", tiled=True)


def reduce(x: jax.Array) -> tuple[jax.Array, ...]:
    """Take the mean over devices."""
    return (lax.psum(x, "x") / lax.axis_size("x"),)


def exchange(x: jax.Array) -> tuple[jax.Array, ...]:
    """Exchange equal parts."""
    return (lax.all_to_all(x, "x", 0, 0, tiled=True),)


# Each has its body, the lengths of the arrays that it carries, and its passes over the bytes.
COLLECTIVES: dict[str, tuple[Body, Callable[[int, int], tuple[int, ...]], int]] = {
    "all-gather": (gather, lambda count, n: (count // n, count), 1),
    "reduce-scatter": (scatter, lambda count, n: (count, count // n), 1),
    "all-reduce": (reduce, lambda count, n: (count,), 2),
    "all-to-all": (exchange, lambda count, n: (count,), 1),
    PERMUTE: (permute, lambda count, n: (count,), 1),
}


# -- what is found --------------------------------------------------------------------------------


def _memory(taken: Taken, grid: Grid) -> MemoryTable:
    """Fit a curve by bytes, and what a transcendental (of the larger sizes) or a transpose adds."""
    moved = tuple(8.0 * count for count in grid.elements)  # a float32 read, one written
    simple, hard = (
        np.array([np.median(taken[name, count]) for count in grid.elements]) for name in _KERNELS
    )
    more_s = ((hard - simple) / grid.elements)[len(grid.elements) // 2 :]
    curve = Curve(moved, tuple(simple.tolist()))
    turned_s = (
        (np.median(taken["transposed", rows, count]) - curve.at(8.0 * count)) / (8.0 * count)
        for rows, count in itertools.product(_TRANSPOSED_ROWS, grid.transposed)
    )
    return MemoryTable(
        launch_s=curve.floor_s,
        bytes_per_s=curve.bytes_per_s,
        source=_SOURCE,
        curve=curve,
        transcendental_s=max(float(np.median(more_s)), 0.0),
        transposed_s=max(float(np.median(list(turned_s))), 0.0),
    )


def _collective_rows(taken: Taken) -> Iterator[fit.CollectiveRow]:
    """Yield collectives; bytes are what each device sends by a ring, for a permute all it has."""
    for kind, count, size in (key for key in taken if key[0] in COLLECTIVES):
        share = 1.0 if kind == PERMUTE else (size - 1) / size
        moved = COLLECTIVES[kind][2] * 4 * count * share
        yield fit.CollectiveRow(kind, size, moved, float(np.median(taken[kind, count, size])))


def _links(taken: Taken) -> dict[str, Any]:
    """Fit the tables of collectives and of permutes."""
    rows = list(_collective_rows(taken))
    others = [r for r in rows if r.kind != PERMUTE]
    permutes = _permutes([r for r in rows if r.kind == PERMUTE])
    return dict(collectives=fit.fit_collectives(others, _SOURCE), permutes=permutes)


def _permutes(rows: list[fit.CollectiveRow]) -> Permutes:
    """Fit permutes by a curve, whose two ends give latency and rate."""
    curve = Curve(tuple(r.bytes_moved for r in rows), tuple(r.seconds for r in rows))
    rate = curve.bytes_moved[-1] / max(curve.seconds[-1] - curve.floor_s, 1e-9)
    return Permutes(curve.floor_s, 0.0, rate, _SOURCE, None, curve)


def _taken(taken: Taken) -> float:
    """Fit the share of compute that a collective takes while it runs, where both share cores."""
    if ("beside", True, True) not in taken:
        return 0.0
    compute_s, send_s, both_s = (
        float(np.median(taken["beside", *what]))
        for what in ((True, False), (False, True), (True, True))
    )
    more = (both_s - max(compute_s, send_s)) / min(compute_s, send_s)
    return round(min(max(more, 0.0), 1.0), 3)


def _skew(taken: Taken, grid: Grid) -> Skew:
    """Fit the skew by the time that matmuls and a small all-reduce take together beyond alone."""
    sizes = grid.groups(len(jax.devices()))
    computed_s = np.array([np.median(taken["kernel", runs]) for runs in _RUNS_BEFORE])
    waited_s = np.array(
        [
            [np.median(taken["skew", runs, size] - taken["kernel", runs]) for runs in _RUNS_BEFORE]
            - np.median(taken["all-reduce", grid.elements[0], size])
            for size in sizes
        ]
    )
    return fit.fit_skew(computed_s, waited_s, sizes, _SOURCE)


# -- the clock ------------------------------------------------------------------------------------


def _after_kernels(
    runs: int, body: Body, a: jax.Array, b: jax.Array, last: jax.Array, x: jax.Array
) -> tuple[jax.Array, ...]:
    """Run matmuls that wait for the last run of `body`, then the next one, which waits for them.

    The arrays are always the same: what caches do to others would hide the wait.
    """
    last = last.at[0, 0].set(x[0])
    for _ in range(runs):
        a = a.at[0, 0].set(last[0, 0])
        last = jnp.dot(a, b)
    return a, b, last, *body(x.at[0].set(last[0, 0]))


def _clock(body: Body, shapes: Shapes, dtype: Any, group: int, *, each: int = 1) -> Clock:
    """Return a clock for one run of `body` on every device at once, in groups along the axis "x".

    Args:
        shapes: the arrays that the body takes and gives on each device.
        each: how often the body runs the op that is timed.
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
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("calibrate")
        start = time.perf_counter()
        jax.block_until_ready(run(trips, carry))
        return time.perf_counter() - start

    trips = 1
    seconds(replicated(mesh, trips))  # compiles
    while first_says(seconds(replicated(mesh, trips)) < _TARGET_S / 2):
        trips *= 4
    count = replicated(mesh, trips)
    return lambda: seconds(count) / trips / each


def first_says(answer: bool) -> bool:
    """Return process 0's answer in all processes, which have to run the same programs."""
    if jax.process_count() == 1:
        return answer
    return bool(multihost_utils.broadcast_one_to_all(np.int32(answer)))


def replicated(mesh: Mesh, numbers: int | np.ndarray) -> jax.Array:
    """Return int32s that every device of a mesh has."""
    return jax.device_put(np.int32(numbers), jax.sharding.NamedSharding(mesh, PartitionSpec()))
