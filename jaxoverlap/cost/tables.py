"""Define the measured tables behind the cost model, and read them from their files.

A table file holds what one kind of device was measured to do: matmuls as a factor over three
rates, collectives as seconds by bytes, memory-bound kernels as a rate. The files that come with
the package (`jaxoverlap/cost/data/*.json`) are made by `python -m benchmarks.chip_tables`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from jaxoverlap.cost.collective_tables import Between, Collectives, Permutes, Skew
from jaxoverlap.cost.interpolation import Curve, FitError, factor
from jaxoverlap.plan.collectives import PERMUTE

FORMAT = 2


class _Rates(msgspec.Struct, frozen=True):
    """A kernel's time before its factor: launch + flops / peak + bytes / rate.

    Attributes:
        launch_s: seconds of a kernel with nothing to do.
        flops_per_s, bytes_per_s: the rates; a multiply-add is two.
    """

    launch_s: float
    flops_per_s: float
    bytes_per_s: float

    def scaled(self, times: float) -> Self:
        """Return the table of kernels that take so many times longer."""
        return replace(
            self,
            launch_s=self.launch_s * times,
            flops_per_s=self.flops_per_s / times,
            bytes_per_s=self.bytes_per_s / times,
        )


class MatmulTable(_Rates, frozen=True):
    """Seconds of [m, k] x [k, n] of one dtype: (launch + flops / peak + bytes / rate) * factor.

    The factor is exp of a table over (m, n, k), linear in their logarithms between the knots and
    constant outside them. It carries what three rates cannot: waves that do not fill the chip,
    short contractions, throttling, the choice of kernels.

    Attributes:
        element_bytes: bytes of an operand's element.
        result_bytes: bytes of a result's element.
        m, n, k: the knots, rising.
        log_factor: the table, m slowest and k fastest.
        source: where the measurements come from.
        error: the fit's error on the measurements held back.
    """

    element_bytes: float
    result_bytes: float
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    log_factor: tuple[float, ...]
    source: str
    error: FitError

    def bytes_touched(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Bytes of both operands and the result, each touched once."""
        return batch * (self.element_bytes * (m * k + k * n) + self.result_bytes * m * n)

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of a matmul alone on the chip; the factor is that of m * batch."""
        base = (
            self.launch_s
            + 2.0 * batch * m * n * k / self.flops_per_s
            + self.bytes_touched(m, n, k, batch) / self.bytes_per_s
        )
        return base * factor((self.m, self.n, self.k), self.log_factor, (m * batch, n, k))


class AttentionTable(_Rates, frozen=True):
    """Seconds of one kernel of attention under a causal mask, forward, of one dtype.

    (launch + flops / peak + bytes / rate) * factor, the factor as `MatmulTable` has it, over the
    length of the sequence, heads (of all the batch) and their size. Two matmuls a head, of which
    the mask takes half: 2 * heads * length^2 * size operations.

    Attributes:
        length, heads, head_size: the knots, rising.
        log_factor: the table, length slowest and head_size fastest.
        source: where the measurements come from.
        error: the fit's error on the measurements held back.
        error_full: the error on kernels without a mask, which no part was fitted to; None if there
            are none.
    """

    length: tuple[int, ...]
    heads: tuple[int, ...]
    head_size: tuple[int, ...]
    log_factor: tuple[float, ...]
    source: str
    error: FitError
    error_full: FitError | None = None

    def seconds(self, length: float, heads: int, head_size: int, times: float = 1.0) -> float:
        """Return seconds alone on the chip.

        Args:
            times: factor on the operations, at the same rate, as for a kernel without a mask.
        """
        base = (
            self.launch_s
            + times * 2.0 * heads * length**2 * head_size / self.flops_per_s
            + 8.0 * heads * length * head_size / self.bytes_per_s
        )
        knots = (self.length, self.heads, self.head_size)
        return base * factor(knots, self.log_factor, (length, heads, head_size))


class MemoryTable(msgspec.Struct, frozen=True):
    """Seconds of a kernel that is no matmul: launch + bytes / rate + transcendentals + transposes.

    Attributes:
        launch_s: seconds of a kernel with nothing to do.
        bytes_per_s: rate of bytes read and written together.
        source: where these come from.
        curve: seconds by bytes, instead of launch and rate, where caches make it no line.
        transcendental_s: seconds of one exponential, tangent or root; 0 where they hide behind the
            bytes, as on GPUs.
        transposed_s: seconds that one byte takes longer if it is transposed; 0 where tiles hide
            it, as on GPUs.
    """

    launch_s: float
    bytes_per_s: float
    source: str
    curve: Curve | None = None
    transcendental_s: float = 0.0
    transposed_s: float = 0.0

    def scaled(self, times: float) -> MemoryTable:
        """Return the table of kernels that take so many times longer."""
        return MemoryTable(
            self.launch_s * times,
            self.bytes_per_s / times,
            self.source,
            self.curve and self.curve.scaled(times),
            self.transcendental_s * times,
            self.transposed_s * times,
        )


class ChipTables(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that were measured on one kind of device.

    Attributes:
        format: the file's format; this reads FORMAT.
        chip: the device's name: of `jaxoverlap.hardware.cluster`, or as JAX calls what was found
            here.
        date: when the tables were fitted.
        matmuls: a table for each dtype, as HLO writes it ("fp8" for both of its kinds).
        attention: the table of bf16; None if it was not measured.
        memory, collectives, permutes: see their classes.
        channels: the most channels that a collective runs on, each with an SM to itself; 0 where
            collectives take no SMs.
        skew: how long collectives wait for the last device; None where each has cores of its own.
        taken: the share of compute that a collective takes while it runs, where both share cores.
        taken_by: the same by kind, within a host, where `--links` measured it.
        between: collectives between hosts, where `--links` measured them; None: NCCL's tuning model
            estimates them.
        here: what `--here` found: how many devices, on what host; None for a chip of the package.
        profiled: the cluster whose profile corrected them (`--from-profile`), and measured against
            predicted seconds by class of kernel, which are in the tables; empty if none did.
    """

    chip: str
    date: str
    matmuls: dict[str, MatmulTable]
    memory: MemoryTable
    collectives: Collectives
    permutes: Permutes
    channels: int
    attention: AttentionTable | None = None
    skew: Skew | None = None
    taken: float = 0.0
    taken_by: dict[str, float] = {}
    between: Between | None = None
    here: Here | None = None
    profiled: tuple[str, dict[str, float]] = ("", {})
    format: int = FORMAT

    def scaled(self, times: Mapping[str, float]) -> ChipTables:
        """Return the tables, each class of kernels so many times longer; others as they are.

        Args:
            times: factors of "matmul", "attention", "memory", PERMUTE and kinds of collectives. The
                wait for the last device is scaled as permutes are.
        """
        permutes = times.get(PERMUTE, 1.0)
        return replace(
            self,
            matmuls={
                d: table.scaled(times.get("matmul", 1.0)) for d, table in self.matmuls.items()
            },
            memory=self.memory.scaled(times.get("memory", 1.0)),
            attention=self.attention and self.attention.scaled(times.get("attention", 1.0)),
            collectives=self.collectives.scaled(times),
            permutes=self.permutes.scaled(permutes),
            between=self.between and self.between.scaled(times, permutes),
            skew=self.skew and self.skew.scaled(permutes),
        )


class Here(msgspec.Struct, frozen=True):
    """The machine that `--here` measured.

    Attributes:
        devices: number of devices that ran at once.
        platform: JAX's name of it.
        versions: the versions of jax and python.
        in_a_step: the factors from a loop to a step that the tables have in them.
        processes: how many processes the devices were in.
        hosts: how many hosts, if links between hosts were measured apart from those within.
    """

    devices: int
    platform: str
    versions: str
    in_a_step: InAStep
    processes: int = 1
    hosts: int = 1


class InAStep(msgspec.Struct, frozen=True):
    """The factors by which each kind takes longer in a step than in a loop of nothing else.

    One where devices have cores of their own: there it was not measured.

    Attributes:
        memory: kernels bound by memory.
        matmuls: kernels that are matmuls.
        collectives: permutes too, and the wait for the last device.
    """

    memory: float = 1.0
    matmuls: float = 1.0
    collectives: float = 1.0


# A chip whose matmuls and collectives are another's: the same die, measured once, and Blackwell
# Ultra as Blackwell (`adjusted_tables` has what a step takes less).
_MEASURED_AS = {
    "a100-sxm-40": "a100-sxm-80",
    "h100-sxm-500w": "h100-sxm",
    "b300": "b200",
    "gb300": "gb200",
}


@functools.cache
def packaged(chip: str) -> ChipTables | None:
    """The package's tables of a chip, or None if it has none."""
    name = f"{_MEASURED_AS.get(chip, chip)}.json"
    file = resources.files("jaxoverlap.cost") / "data" / name
    return decode(file.read_bytes(), name) if file.is_file() else None


def read(path: str | os.PathLike[str]) -> ChipTables:
    """The tables of a file that `python -m jaxoverlap.calibrate --here` wrote.

    Raises:
        ValueError: if the file is no such table.
    """
    return decode(Path(path).read_bytes(), str(path))


def decode(text: bytes, name: str) -> ChipTables:
    """Tables from JSON.

    Raises:
        ValueError: if the text is no such table.
    """
    try:
        tables = msgspec.json.decode(text, type=ChipTables)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{name} is no table of the cost model: {error}; make it by `python -m "
            "jaxoverlap.calibrate`"
        ) from error
    if tables.format != FORMAT:
        raise ValueError(f"{name} has format {tables.format}, this reads {FORMAT}: make it again")
    return tables
