"""Measure a cluster's links in under a minute, where tables of the chip's kernels are known.

What is measured: collectives by kind, group and size; permutes; the share of compute that each kind
takes while it runs, unless XLA's schedule runs that kind alone; and one factor each for matmuls and
for memory-bound kernels, since a GPU may be slower here than the one in the tables, or shared.

Compiling takes most of the time, so a program holds a loop for each size of one collective, with a
number of trips that is an argument, and programs are compiled in threads.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.calibrate import fit
from jaxoverlap.calibrate.this_machine import COLLECTIVES, Body, first_says, measured_on, replicated
from jaxoverlap.cost.collective_tables import Between, Permutes
from jaxoverlap.cost.interpolation import Curve
from jaxoverlap.cost.tables import (
    AttentionTable,
    ChipTables,
    MatmulTable,
    MemoryTable,
)
from jaxoverlap.hardware.cluster import chips
from jaxoverlap.hardware.hosts import hosts_of
from jaxoverlap.plan.collectives import PERMUTE
from jaxoverlap.simulation.audit import audit

SOURCE = "python -m jaxoverlap.calibrate --here FILE --links"
WITHIN, BETWEEN, MATMUL, MEMORY = "within a host", "between hosts", "matmul", "memory"
_MOST_MATMULS = 128  # concurrently with one collective: each is an instruction to compile
_FIRST_TRIPS, _MORE_TRIPS = 1, 4
_FLOAT32 = 4  # bytes of what collectives send here


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured.

    Attributes:
        elements: of float32 that a device has, of collectives; rising.
        matmul: rows of x, and the side of w, in the x @ w whose time is compared with the tables.
        memory_elements: of float32, of the memory-bound kernel.
        dtypes: of matmuls, as HLO writes them.
        rounds: how often each is timed; medians count.
        target_s: how long a timed loop runs, at least half of it.
    """

    elements: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 21, 1 << 24)
    matmul: tuple[int, int] = (4096, 4096)
    memory_elements: int = 1 << 25
    dtypes: tuple[str, ...] = ("bf16", "f32")
    rounds: int = 5
    target_s: float = 0.02

    @property
    def dims(self) -> tuple[int, int, int]:
        """Return m, n and k of the matmul."""
        rows, side = self.matmul
        return rows, side, side


USUAL = Sizes()
_NAMES = {"bf16": jnp.bfloat16, "f32": jnp.float32}

Key = tuple[Any, ...]  # names what one loop times
Seconds = dict[Key, float]  # the median over rounds
Arrays = tuple[tuple[tuple[int, ...], Any], ...]  # shapes and dtypes


def hosts_here() -> int:
    """Count the hosts of all processes.

    Raises:
        ValueError: if hosts have different numbers of processes.
    """
    names = list(hosts_of(range(jax.process_count())).values())
    counts = {names.count(name) for name in names}
    if len(counts) > 1:
        raise ValueError(
            f"hosts with {sorted(counts)} processes: --links needs as many on each; start the "
            "same number on all"
        )
    return len(set(names))


def measurements(sizes: Sizes = USUAL, hosts: int = 1) -> int:
    """Count the calls of `advance` that `tables_with_links` makes: programs, loops and rounds."""
    programs = [*_alone(sizes, hosts), *_together_programs(sizes, hosts, {})]
    return 2 * len(programs) + 2 * sizes.rounds


def tables_with_links(
    base: ChipTables,
    date: str,
    advance: Callable[[str], None],
    *,
    hosts: int = 1,
    loops: ChipTables | None = None,
    sizes: Sizes = USUAL,
) -> ChipTables:
    """Return tables of the chip with the links that are measured here, in all processes.

    Args:
        base: the chip's tables, with matmuls as in a step.
        date: of the measurement.
        advance: called with a few words, as often as `measurements` says.
        hosts: how many hosts the devices are on, numbered host by host.
        loops: the chip's tables with matmuls as in a loop, which is how they are timed here; by
            default `base`.
        sizes: what to measure.

    Raises:
        ValueError: if there is but one device, or if hosts do not divide the devices.
    """
    devices = jax.devices()
    if len(devices) < 2 or len(devices) % hosts:
        raise ValueError(
            f"{len(devices)} devices on {hosts} hosts: expected two devices or more, as many on "
            "each host; start one process a device with --coordinator, --processes and --process"
        )
    alone = _timed(list(_alone(sizes, hosts)), sizes, advance)
    both = _timed(list(_together_programs(sizes, hosts, alone)), sizes, advance)
    return _tables(base, loops or base, date, hosts, sizes, alone, both)


@dataclass(frozen=True)
class Concurrently:
    """A collective and matmuls, alone and at once; seconds.

    Attributes:
        collective_s, compute_s: alone.
        together_s: of both, started at once.
        matmuls: how many.
        taken: the share of compute that the collective takes while it runs.
    """

    collective_s: float
    compute_s: float
    together_s: float
    matmuls: int
    taken: float


def concurrently(kind: str, sizes: Sizes, advance: Callable[[str], None]) -> Concurrently:
    """Measure matmuls and one kind of collective of all devices, of the second largest size.

    Raises:
        ValueError: if XLA's schedule does not overlap the collective with matmuls.
    """
    everyone = (kind, WITHIN, len(jax.devices()))
    first = [p for p in _alone(sizes, 1) if p.keys[0][0] == MATMUL or p.keys[0][:3] == everyone]
    alone = _timed(first, sizes, advance)
    wanted = ("alone", kind, WITHIN)
    both = _timed(
        [p for p in _together_programs(sizes, 1, alone) if p.keys[0] == wanted], sizes, advance
    )
    if wanted not in both:
        raise ValueError(
            f"XLA's schedule does not overlap {kind} with matmuls, so that what it takes from them "
            "cannot be measured; measure without XLA_FLAGS of your own"
        )
    return Concurrently(
        alone[*everyone, sizes.elements[-2]],
        both[wanted],
        both["together", kind, WITHIN],
        _matmuls_during(kind, WITHIN, everyone[2], sizes, alone),
        _taken(kind, WITHIN, alone, both, sizes),
    )


# -- programs -------------------------------------------------------------------------------------


@dataclass
class _Program:
    """A program of several loops, of which a run takes one.

    Attributes:
        keys: what each loop times.
        bodies: what each loop repeats.
        arrays: shape and dtype of the arrays on each device that each body takes and gives.
        mesh: with axes "groups" and "x", along which collectives run.
        overlaps: whether a collective of it is to overlap with matmuls.
    """

    keys: tuple[Key, ...]
    bodies: tuple[Body, ...]
    arrays: tuple[Arrays, ...]
    mesh: Mesh
    overlaps: bool = False
    compiled: Any = field(init=False, default=None)
    trips: list[int] = field(init=False, default_factory=list)

    def prepare(self) -> None:
        """Make the arrays, and lower; in one thread, as devices take part."""
        everywhere = P(("groups", "x"))
        sharding = NamedSharding(self.mesh, everywhere)
        self._carries = tuple(
            tuple(_filled(shape, dtype, sharding) for shape, dtype in arrays)
            for arrays in self.arrays
        )

        def run(trips: jax.Array, carries: Any) -> jax.Array:
            ends = []
            for number, (body, carry) in enumerate(zip(self.bodies, carries, strict=True)):
                last = lax.fori_loop(0, trips[number], lambda _, c, body=body: body(*c), carry)
                ends += [x.reshape(-1)[0].astype(jnp.float32) for x in last]
            return jnp.stack(ends)[None]

        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(P(), everywhere),
            out_specs=everywhere,
            check_vma=False,
        )
        self._lowered = jax.jit(mapped).lower(self._counts(0, 0), self._carries)

    def compile(self) -> None:
        """Compile, in any thread."""
        self.compiled = self._lowered.compile()

    @property
    def is_concurrent(self) -> bool:
        """Return whether a collective that is to overlap with matmuls does, by XLA's schedule.

        XLA:CPU's schedule does not say.
        """
        if not self.overlaps or jax.devices()[0].platform == "cpu":
            return True
        total = audit(self.compiled.as_text()).total
        return total.covered == total.count

    def seconds(self, loop: int, trips: int) -> float:
        """Run a loop so many times on all devices at once."""
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("links")
        began = time.perf_counter()
        jax.block_until_ready(self.compiled(self._counts(loop, trips), self._carries))
        return time.perf_counter() - began

    def _counts(self, loop: int, trips: int) -> jax.Array:
        counts = np.zeros(len(self.bodies), np.int32)
        counts[loop] = trips
        return replicated(self.mesh, counts)


def _filled(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    whole = (sharding.mesh.size * shape[0], *shape[1:])
    return jax.make_array_from_callback(whole, sharding, lambda _: _values(shape, dtype))


@functools.lru_cache(maxsize=8)
def _values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return random values whose products keep their size: a GPU multiplies zeros faster."""
    scale = (12.0 / shape[-1]) ** 0.5 if len(shape) > 1 else 1.0
    return ((np.random.default_rng(0).random(shape, np.float32) - 0.5) * scale).astype(dtype)


def _alone(sizes: Sizes, hosts: int) -> Iterator[_Program]:
    """Yield the programs of what runs alone."""
    matmuls = tuple(_operands(sizes, dtype) for dtype in sizes.dtypes)
    everyone = _mesh(np.array(jax.devices())[:, None])
    yield _Program(
        (*((MATMUL, dtype) for dtype in sizes.dtypes), (MEMORY,)),
        (*(_matmul,) * len(sizes.dtypes), _kernel),
        (*matmuls, (((sizes.memory_elements,), jnp.float32),)),
        everyone,
    )
    for where, mesh, kind in _collectives(hosts):
        group = mesh.shape["x"]
        body, lengths, _ = COLLECTIVES[kind]
        yield _Program(
            tuple((kind, where, group, count) for count in sizes.elements),
            (body,) * len(sizes.elements),
            tuple(_sent(lengths(count, group)) for count in sizes.elements),
            mesh,
        )


def _operands(sizes: Sizes, dtype: str) -> Arrays:
    rows, side = sizes.matmul
    return ((rows, side), _NAMES[dtype]), ((side, side), _NAMES[dtype])


def _sent(lengths: tuple[int, ...]) -> Arrays:
    return tuple(((length,), jnp.float32) for length in lengths)


def _together_programs(sizes: Sizes, hosts: int, alone: Mapping[Key, float]) -> Iterator[_Program]:
    """Yield, for each kind and link, matmuls alone and with a collective.

    Args:
        alone: what was measured alone, by which the number of matmuls is chosen: they take twice as
            long as the collective. Empty: one matmul.
    """
    dtype, count = sizes.dtypes[0], sizes.elements[-2]
    operands = _operands(sizes, dtype)
    largest = {(where, kind): mesh for where, mesh, kind in _collectives(hosts)}
    for (where, kind), mesh in largest.items():
        group = mesh.shape["x"]
        matmuls = _matmuls_during(kind, where, group, sizes, alone)
        body, lengths, _ = COLLECTIVES[kind]
        yield _Program(
            (("alone", kind, where), ("together", kind, where)),
            (partial(_several, matmuls), partial(_together, matmuls, body)),
            (operands, (*operands, *_sent(lengths(count, group)))),
            mesh,
            overlaps=True,
        )


def _matmuls_during(
    kind: str, where: str, group: int, sizes: Sizes, alone: Mapping[Key, float]
) -> int:
    collective_s = alone.get((kind, where, group, sizes.elements[-2]), 0.0)
    matmul_s = alone.get((MATMUL, sizes.dtypes[0]), 1.0)
    return min(max(math.ceil(2 * collective_s / matmul_s), 1), _MOST_MATMULS)


def _collectives(hosts: int) -> Iterator[tuple[str, Mesh, str]]:
    """Yield where a collective runs, in groups of which mesh, and its kind; the largest last."""
    grid = np.array(jax.devices()).reshape(hosts, -1)
    per_host = grid.shape[1]
    meshes = [(WITHIN, _mesh(grid.reshape(-1, size))) for size in sorted({2, per_host})
              if size > 1 and per_host % size == 0]  # fmt: skip
    if hosts > 1:
        meshes.append((BETWEEN, _mesh(grid.T)))
        if per_host > 1:
            meshes.append((BETWEEN, _mesh(grid.reshape(1, -1))))
    ring_of = {where: mesh for where, mesh in reversed(meshes) if where == BETWEEN}
    ring_of |= {where: mesh for where, mesh in meshes if where == WITHIN}
    for where, mesh in meshes:
        for kind in COLLECTIVES:
            if kind != PERMUTE or ring_of[where] is mesh:
                yield where, mesh, kind


def _mesh(groups: np.ndarray) -> Mesh:
    return Mesh(groups, ("groups", "x"))


def _matmul(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """Run one matmul of the last one's result; the barrier keeps XLA from merging two."""
    return jnp.dot(lax.optimization_barrier(x), w), w


def _several(count: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    for _ in range(count):
        x, w = _matmul(x, w)
    return x, w


def _together(count: int, body: Body, *carry: jax.Array) -> tuple[jax.Array, ...]:
    """Run matmuls, and concurrently a collective that is independent of them."""
    return *_several(count, *carry[:2]), *body(*carry[2:])


def _kernel(x: jax.Array) -> tuple[jax.Array, ...]:
    """Read and write an array; the barrier keeps iterations apart."""
    return (lax.optimization_barrier(x) * 0.5 + 1.0,)


# -- timing ---------------------------------------------------------------------------------------


def _timed(programs: Sequence[_Program], sizes: Sizes, advance: Callable[[str], None]) -> Seconds:
    """Compile programs side by side, time each loop in turn, round by round; return medians."""
    for program in programs:
        program.prepare()
    workers = max(2, (os.cpu_count() or 2) // jax.process_count())
    with ThreadPoolExecutor(min(workers, len(programs))) as pool:
        named = {pool.submit(program.compile): program for program in programs}
        for done in as_completed(named):
            done.result()
            advance(f"compiled {_words(named[done].keys[0])}")
    concurrent = [program for program in programs if program.is_concurrent]
    for program in programs:
        if program not in concurrent:
            advance(f"{_words(program.keys[0])}: XLA's schedule does not overlap it, left out")
            continue
        advance(f"first runs of {_words(program.keys[0])}")
        for loop in range(len(program.keys)):
            program.trips.append(_trips(program, loop, sizes.target_s))
    taken: dict[Key, list[float]] = {key: [] for program in concurrent for key in program.keys}
    for turn in range(sizes.rounds):
        advance(f"round {turn + 1} of {sizes.rounds}")
        for program in concurrent:
            for loop, (key, trips) in enumerate(zip(program.keys, program.trips, strict=True)):
                taken[key].append(program.seconds(loop, trips) / trips)
    return {key: statistics.median(rounds) for key, rounds in taken.items()}


def _trips(program: _Program, loop: int, target_s: float) -> int:
    """Return how often a loop runs to take long enough; the same in all processes."""
    trips = _FIRST_TRIPS
    program.seconds(loop, trips)  # the first run makes communicators
    while first_says(program.seconds(loop, trips) < target_s / 2):
        trips *= _MORE_TRIPS
    return trips


def _words(key: Key) -> str:
    return " ".join(map(str, key))


# -- tables ---------------------------------------------------------------------------------------


def _tables(
    base: ChipTables,
    loops: ChipTables,
    date: str,
    hosts: int,
    sizes: Sizes,
    alone: Seconds,
    both: Seconds,
) -> ChipTables:
    devices = jax.devices()
    by_link = {
        where: _link(where, alone, both, sizes)
        for where in (WITHIN, BETWEEN)
        if any(key[1:2] == (where,) for key in alone)
    }
    within = by_link.get(WITHIN, by_link.get(BETWEEN))
    assert within is not None
    matmuls = {dtype: _matmuls(base, loops, dtype, sizes, alone) for dtype in sizes.dtypes}
    slower = _first_factor(loops, sizes, alone)
    narrow = {name: _slower(t, slower) for name, t in base.matmuls.items() if name not in matmuls}
    moved, memory_s = 2.0 * _FLOAT32 * sizes.memory_elements, alone[MEMORY,]
    rest_s = max(memory_s - base.memory.launch_s, 0.1 * memory_s)
    return msgspec.structs.replace(
        base,
        chip=_chip_name(base.chip, devices[0].device_kind),
        date=date,
        matmuls=narrow | matmuls,
        memory=MemoryTable(base.memory.launch_s, moved / rest_s, SOURCE),
        attention=base.attention and _slower(base.attention, slower),
        collectives=within.collectives,
        permutes=within.permutes,
        taken_by=within.taken,
        between=by_link.get(BETWEEN) if hosts > 1 else None,
        profiled=("", {}),
        here=measured_on(devices, hosts),
    )


def _chip_name(table: str, kind: str) -> str:
    """Return the package's name of a chip whose devices call themselves `kind`, else `kind`."""
    known = (chip.name for chip in chips() if chip.device_name == kind)
    names = list(known)
    return table if table in names or not names else names[0]


def _first_factor(loops: ChipTables, sizes: Sizes, alone: Seconds) -> float:
    """Return how many times longer the first dtype's matmul takes than in the tables, at rates."""
    dtype = sizes.dtypes[0]
    table = loops.matmuls.get(dtype) or loops.matmuls["bf16"]
    return _times(table, sizes, alone[MATMUL, dtype])


def _times(table: MatmulTable, sizes: Sizes, measured_s: float, **fixed: float) -> float:
    """Return by how much a table's rates have to fall for a matmul to take so long.

    Args:
        fixed: rates that make the part of the time that stays: infinite ones leave the launch.
    """
    stays = fixed or dict(flops_per_s=math.inf, bytes_per_s=math.inf)
    stays_s = msgspec.structs.replace(table, **stays).seconds(*sizes.dims)
    rest_s = max(measured_s - stays_s, 0.1 * measured_s)  # a launch may be shorter here
    return rest_s / (table.seconds(*sizes.dims) - stays_s)


def _slower[Table: (MatmulTable, AttentionTable)](table: Table, times: float) -> Table:
    """Return a table whose rates, but not launches, are so many times lower."""
    rates = dict(flops_per_s=table.flops_per_s / times, bytes_per_s=table.bytes_per_s / times)
    return msgspec.structs.replace(table, **rates)


def _matmuls(
    base: ChipTables, loops: ChipTables, dtype: str, sizes: Sizes, alone: Seconds
) -> MatmulTable:
    """Return the table of a dtype: bf16's, if it has none of its own, at the measured rate.

    Bytes take longer by the first dtype's factor; the rest of a matmul's time is its operations.
    """
    name = dtype if dtype in base.matmuls else "bf16"
    slower, width = _first_factor(loops, sizes, alone), float(np.dtype(_NAMES[dtype]).itemsize)
    wide = dict(element_bytes=width, result_bytes=width, source=SOURCE)
    loop, table = (
        msgspec.structs.replace(_slower(tables.matmuls[name], slower), **wide)
        for tables in (loops, base)
    )
    times = _times(loop, sizes, alone[MATMUL, dtype], flops_per_s=math.inf)
    return msgspec.structs.replace(table, flops_per_s=table.flops_per_s / times)


def _link(where: str, alone: Seconds, both: Seconds, sizes: Sizes) -> Between:
    rows = []
    for kind, _, group, count in (k for k in alone if k[1:2] == (where,)):
        share = 1.0 if kind == PERMUTE else (group - 1) / group
        moved = COLLECTIVES[kind][2] * _FLOAT32 * count * share
        rows.append(fit.CollectiveRow(kind, group, moved, alone[kind, where, group, count]))
    hops = [row for row in rows if row.kind == PERMUTE]
    curve = Curve(tuple(r.bytes_moved for r in hops), tuple(r.seconds for r in hops))
    permutes = Permutes(curve.floor_s, 0.0, curve.last_bytes_per_s, SOURCE, None, curve)
    others = [row for row in rows if row.kind != PERMUTE]
    taken = {
        kind: _taken(kind, where, alone, both, sizes)
        for _, kind, link in (key for key in both if key[0] == "together")
        if link == where
    }
    return Between(fit.fit_collectives(others, SOURCE), permutes, taken)


def _taken(kind: str, where: str, alone: Seconds, both: Seconds, sizes: Sizes) -> float:
    """Return the share of compute that a collective takes while it runs.

    The matmuls take longer by the share of the collective's time; where the collective lasts
    longer, it takes longer by the share of the matmuls' time.
    """
    group = max(k[2] for k in alone if k[:2] == (kind, where))
    collective_s = alone[kind, where, group, sizes.elements[-2]]
    compute_s, together_s = both["alone", kind, where], both["together", kind, where]
    more = (together_s - max(compute_s, collective_s)) / min(compute_s, collective_s)
    return round(min(max(more, 0.0), 1.0), 3)
