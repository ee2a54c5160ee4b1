"""Hold the measured seconds of collectives and permutes inside one NVLink domain."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from jaxoverlap.cost.interpolation import Curve, FitError, position

# Seconds to launch a collective outside of a CUDA graph: the median by which XLA's own table (eight
# H100s, eight B200s; jax-cuda12-pjrt) and nccl-tests (eight H200s and B200s; stas00/ml-engineering,
# network/README.md) exceed the rows of aiconfigurator-core from 256 kB to 8 MB. Fitted to XLA's
# rows alone; nccl-tests' had no part in it.
LAUNCH_S = 17e-6


class Collectives(msgspec.Struct, frozen=True):
    """Collectives inside one NVLink domain.

    Attributes:
        curves: one for each kind, as HLO writes it, and each number of devices.
        source: where the measurements come from.
        graph_sizes: numbers of devices that were timed inside CUDA graphs, which launch collectives
            at no cost; `seconds` adds LAUNCH_S to those.
        error: on measurements held back at random; a size is measured in two dtypes, so most of
            those have a twin among the measurements that were fitted.
        error_new_sizes: the error of a second fit, with all measurements of some sizes held back.
    """

    curves: dict[str, dict[int, Curve]]
    source: str
    error: FitError
    error_new_sizes: FitError
    graph_sizes: tuple[int, ...] = ()

    def seconds(self, kind: str, bytes_moved: float, size: int) -> float:
        """Interpolate between measured group sizes by logarithms; past them add the steps' latency.

        Raises:
            KeyError: for a kind that is not in the table.
        """
        sizes = sorted(self.curves[kind])
        if size <= sizes[0] or size in sizes:
            return self._measured_s(kind, bytes_moved, max(size, sizes[0]))
        if size > sizes[-1]:
            steps_s = (size - sizes[-1]) * self._step_s(kind)
            return self._measured_s(kind, bytes_moved, sizes[-1]) + steps_s
        low, share = position(sizes, size)
        below, above = (self._measured_s(kind, bytes_moved, sizes[i]) for i in (low, low + 1))
        return below ** (1 - share) * above**share

    def scaled(self, times: Mapping[str, float]) -> Collectives:
        """Return curves, launches included, so many times longer by kind; others as they are."""
        curves = {
            kind: {
                size: curve.scaled(times.get(kind, 1.0), self._launch_s(size))
                for size, curve in sizes.items()
            }
            for kind, sizes in self.curves.items()
        }
        return msgspec.structs.replace(self, curves=curves, graph_sizes=())

    def _launch_s(self, size: int) -> float:
        return LAUNCH_S if size in self.graph_sizes else 0.0

    def _measured_s(self, kind: str, bytes_moved: float, size: int) -> float:
        """Return the seconds among a number of devices that was measured, launch included."""
        return self._launch_s(size) + self.curves[kind][size].at(bytes_moved)

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
        curve: seconds by bytes, instead of these, where caches make it no line.
        error: on the measurements they are fitted to (three numbers: none was held back); None if
            there are none.
    """

    latency_s: float
    channel_bytes_per_s: float
    bytes_per_s: float
    source: str
    error: FitError | None
    curve: Curve | None = None

    def scaled(self, times: float) -> Permutes:
        """Return the table of permutes that take so many times longer."""
        return Permutes(
            self.latency_s * times,
            self.channel_bytes_per_s / times,
            self.bytes_per_s / times,
            self.source,
            self.error,
            self.curve and self.curve.scaled(times),
        )


class Between(msgspec.Struct, frozen=True):
    """Collectives and permutes between hosts, measured by `--links`.

    Attributes:
        collectives: of groups with one device on each host, and of all devices.
        permutes: to the next host.
        taken: the share of compute that each kind takes while it runs.
    """

    collectives: Collectives
    permutes: Permutes
    taken: dict[str, float]

    def scaled(self, times: Mapping[str, float], permutes: float) -> Between:
        """Return links whose collectives, by kind, and permutes take so many times longer."""
        collectives, hops = self.collectives.scaled(times), self.permutes.scaled(permutes)
        return Between(collectives, hops, self.taken)


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

    def scaled(self, times: float) -> Skew:
        """Return waits that are so many times longer, with the same slice of time."""
        return Skew(self.slice_s, {n: s * times for n, s in self.most_s.items()}, self.source)

    def seconds(self, compute_s: float, size: int) -> float:
        """Return the wait; sizes not measured take that of the next larger one, or the largest."""
        measured = next((n for n in sorted(self.most_s) if n >= size), max(self.most_s))
        return self.most_s[measured] * -math.expm1(-compute_s / self.slice_s)
