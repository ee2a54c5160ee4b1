"""Define the measured tables behind the cost model, and read them from their files.

A table file holds what one kind of device was measured to do: matmuls as a factor over three
rates, collectives as seconds by bytes, memory-bound kernels as a rate. The files that come with
the package (`jaxoverlap/cost/data/*.json`) are made by `python -m jaxoverlap.calibrate`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

FORMAT = 2


class FitError(msgspec.Struct, frozen=True):
    """The error of a fit on rows that it did not see: |predicted / measured - 1|.

    Attributes:
        rows: how many rows were held back.
        mean, median, worst: the error over all these rows.
    """

    rows: int
    mean: float
    median: float
    worst: float


class Matmuls(msgspec.Struct, frozen=True):
    """Seconds of [m, k] x [k, n] of one dtype: (launch + flops / peak + bytes / rate) * factor.

    The factor is exp of a table over (m, n, k), linear in their logarithms between the knots and
    constant outside them. It carries what three rates cannot: waves that do not fill the chip,
    short contractions, throttling, the choice of kernels.

    Attributes:
        launch_s: seconds of a kernel with nothing to do.
        flops_per_s, bytes_per_s: the rates; a multiply-add is two.
        element_bytes: bytes of an operand's element.
        result_bytes: bytes of a result's element.
        m, n, k: the knots, rising.
        log_factor: the table, m slowest and k fastest.
        source: where the rows come from.
        error: the fit's error on the rows held back.
    """

    launch_s: float
    flops_per_s: float
    bytes_per_s: float
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
        """Return seconds alone on the chip; a batch is looked up as that many times more rows."""
        base = (
            self.launch_s
            + 2.0 * batch * m * n * k / self.flops_per_s
            + self.bytes_touched(m, n, k, batch) / self.bytes_per_s
        )
        return base * _factor((self.m, self.n, self.k), self.log_factor, (m * batch, n, k))


class Attention(msgspec.Struct, frozen=True):
    """Seconds of one kernel of attention under a causal mask, forward, of one dtype.

    (launch + flops / peak + bytes / rate) * factor, the factor as `Matmuls` has it, over the
    length of the sequence, heads (of all the batch) and their size. Two matmuls a head, of which
    the mask takes half: 2 * heads * length^2 * size operations.

    Attributes:
        launch_s, flops_per_s, bytes_per_s: as those of `Matmuls`.
        length, heads, head_size: the knots, rising.
        log_factor: the table, length slowest and head_size fastest.
        source: where the rows come from.
        error: the fit's error on the rows held back.
        error_full: the error on kernels without a mask, which no part was fitted to; None if there
            are none.
    """

    launch_s: float
    flops_per_s: float
    bytes_per_s: float
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
        return base * _factor(knots, self.log_factor, (length, heads, head_size))


def _factor(
    knots: Sequence[Sequence[int]], log_factor: Sequence[float], at: Sequence[float]
) -> float:
    """Look a factor up in a table of its logarithms over three dims, the first slowest."""
    places = [_place(grid, x) for grid, x in zip(knots, at, strict=True)]
    strides = (len(knots[1]) * len(knots[2]), len(knots[2]), 1)
    interpolated = 0.0
    for corner in itertools.product((0, 1), repeat=3):
        weight, index = 1.0, 0
        for (low, share), up, stride in zip(places, corner, strides, strict=True):
            weight *= share if up else 1 - share
            index += (low + up) * stride
        if weight:
            interpolated += weight * log_factor[index]
    return math.exp(interpolated)


def _place(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The knot at or below x, and x's share of the way to the next, by logarithms; clamped."""
    low = min(max(bisect_right(knots, x) - 1, 0), len(knots) - 2)
    share = math.log(x / knots[low]) / math.log(knots[low + 1] / knots[low])
    return low, min(max(share, 0.0), 1.0)


class Curve(msgspec.Struct, frozen=True):
    """Seconds of one collective among so many devices of one NVLink domain, by bytes.

    Attributes:
        bytes_moved: what each device sends, rising.
        seconds: how long that takes.
    """

    bytes_moved: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def floor_s(self) -> float:
        """Return the seconds of the smallest message."""
        return self.seconds[0]

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second that each device sends in the largest message."""
        return self.bytes_moved[-1] / self.seconds[-1]

    def at(self, bytes_moved: float) -> float:
        """Interpolate between measured sizes by logarithms; above, take the largest one's rate."""
        if bytes_moved <= self.bytes_moved[0]:
            return self.floor_s
        if bytes_moved >= self.bytes_moved[-1]:
            return bytes_moved / self.bytes_per_s
        low, share = _place(self.bytes_moved, bytes_moved)
        return self.seconds[low] ** (1 - share) * self.seconds[low + 1] ** share


class Collectives(msgspec.Struct, frozen=True):
    """Collectives inside one NVLink domain.

    Attributes:
        curves: one for each kind, as HLO writes it, and each number of devices.
        source: where the rows come from.
        error: on rows held back at random; a size is measured in two dtypes, so most of those have
            a twin among the rows that were fitted.
        error_new_sizes: the error of a second fit, with all rows of some sizes held back.
    """

    curves: dict[str, dict[int, Curve]]
    source: str
    error: FitError
    error_new_sizes: FitError

    def seconds(self, kind: str, bytes_moved: float, size: int) -> float:
        """Interpolate between measured group sizes by logarithms; past them add the steps' latency.

        Raises:
            KeyError: for a kind that is not in the table.
        """
        curves = self.curves[kind]
        sizes = sorted(curves)
        if size in curves:
            return curves[size].at(bytes_moved)
        if size < sizes[0]:
            return curves[sizes[0]].at(bytes_moved)
        if size > sizes[-1]:
            steps_s = (size - sizes[-1]) * self._step_s(kind)
            return curves[sizes[-1]].at(bytes_moved) + steps_s
        low, share = _place(sizes, size)
        below, above = (curves[sizes[i]].at(bytes_moved) for i in (low, low + 1))
        return below ** (1 - share) * above**share

    def _step_s(self, kind: str) -> float:
        """Return seconds that a device adds to the smallest message, by the two largest groups."""
        curves = self.curves[kind]
        *_, few, many = (min(curves), *sorted(curves))
        if few == many:
            return 0.0
        return max(curves[many].floor_s - curves[few].floor_s, 0.0) / (many - few)


class Permutes(msgspec.Struct, frozen=True):
    """Permutes inside one NVLink domain; the formula is in `CostModel`.

    Attributes:
        latency_s: seconds of the smallest.
        channel_bytes_per_s: rate of one channel; 0 where permutes do not run on channels.
        bytes_per_s: rate of the link, in one direction.
        source: where these come from.
        curve: seconds by bytes, in the place of these, where caches make it no line.
        error: on the rows they are fitted to (three numbers: none was held back); None if there
            are no rows.
    """

    latency_s: float
    channel_bytes_per_s: float
    bytes_per_s: float
    source: str
    error: FitError | None
    curve: Curve | None = None


class Memory(msgspec.Struct, frozen=True):
    """Seconds of a kernel that is no matmul: launch + bytes / rate + transcendentals + transposes.

    Attributes:
        launch_s: seconds of a kernel with nothing to do.
        bytes_per_s: rate of bytes read and written together.
        source: where these come from.
        curve: seconds by bytes, in the place of launch and rate, where caches make it no line.
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


class Skew(msgspec.Struct, frozen=True):
    """Seconds that a collective waits for the last device, where devices share cores.

    Devices that computed for a while do not come to a collective together: a loop of collectives
    alone, which the curves are measured by, does not show that. The wait grows with what they
    computed since they last met, up to about the slice of time that a thread is given:
    most * (1 - exp(-computed / slice)).

    Attributes:
        slice_s: the slice of time in that formula.
        most_s: the longest wait, by the number of devices that take part.
        source: where these come from.
    """

    slice_s: float
    most_s: dict[int, float]
    source: str

    def seconds(self, compute_s: float, size: int) -> float:
        """Return the wait; sizes not measured take that of the next larger one, or the largest."""
        measured = next((n for n in sorted(self.most_s) if n >= size), max(self.most_s))
        return self.most_s[measured] * -math.expm1(-compute_s / self.slice_s)


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that were measured on one kind of device.

    Attributes:
        format: the file's format; this reads FORMAT.
        chip: the device's name: of `jaxoverlap.hardware.cluster`, or as JAX calls what was found
            here.
        date: when the rows were fitted.
        matmuls: a table for each dtype, as HLO writes it ("fp8" for both of its kinds).
        attention: the table of bf16; None if there are no rows.
        memory, collectives, permutes: see their classes.
        channels: the most channels that a collective runs on, each with an SM to itself; 0 where
            collectives take no SMs.
        skew: how long collectives wait for the last device; None where each has cores of its own.
        taken: the share of compute that a collective takes while it runs, where both share cores.
        here: what `--here` found: how many devices, on what host; None for a chip of the package.
        profiled: the cluster whose profile corrected them (`--from-profile`), and measured against
            predicted seconds by class of kernel, which are in the tables; empty if none did.
    """

    chip: str
    date: str
    matmuls: dict[str, Matmuls]
    memory: Memory
    collectives: Collectives
    permutes: Permutes
    channels: int
    attention: Attention | None = None
    skew: Skew | None = None
    taken: float = 0.0
    here: Here | None = None
    profiled: tuple[str, dict[str, float]] = ("", {})
    format: int = FORMAT


class Here(msgspec.Struct, frozen=True):
    """The machine that `--here` measured.

    Attributes:
        devices: number of devices that ran at once.
        platform: JAX's name of it.
        versions: the versions of jax and python.
        in_a_step: the factors from a loop to a step that the tables have in them.
        processes: how many processes the devices were in.
    """

    devices: int
    platform: str
    versions: str
    in_a_step: InAStep
    processes: int = 1


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


# A chip whose matmuls and collectives are another's: the same die, measured once.
_MEASURED_AS = {"a100-sxm-40": "a100-sxm-80"}


@functools.cache
def packaged(chip: str) -> Tables | None:
    """The package's tables of a chip, or None if it has none."""
    name = f"{_MEASURED_AS.get(chip, chip)}.json"
    file = resources.files("jaxoverlap.cost") / "data" / name
    return decode(file.read_bytes(), name) if file.is_file() else None


def read(path: str | os.PathLike[str]) -> Tables:
    """The tables of a file that `python -m jaxoverlap.calibrate --here` wrote.

    Raises:
        ValueError: if the file is no such table.
    """
    return decode(Path(path).read_bytes(), str(path))


def decode(text: bytes, name: str) -> Tables:
    """Tables from JSON.

    Raises:
        ValueError: if the text is no such table.
    """
    try:
        tables = msgspec.json.decode(text, type=Tables)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{name} is no table of the cost model: {error}; make it by `python -m "
            "jaxoverlap.calibrate`"
        ) from error
    if tables.format != FORMAT:
        raise ValueError(f"{name} has format {tables.format}, this reads {FORMAT}: make it again")
    return tables
