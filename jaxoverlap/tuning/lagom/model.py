"""Estimate a step by Lagom's unified model of communication overlapped with computation.

Communications run one after the other on one lane, computations on another, from the same moment
on. A step takes max(X, Y): X, the sum of the communications, by their own settings; Y, the
computations, slowed only while a communication overlaps with them. Two things slow them
(arXiv 2602.20656; the paper's closed forms were not at hand, this is a reconstruction):

- SMs: a channel has one to itself, so matmuls need more waves (`CostModel.matmul_s`).
- What all SMs share: the traffic of communication takes memory bandwidth, and its chunks take L2,
  so that matmuls read again from memory what they lost. A matmul with S elements of cache reads
  2 m n k / sqrt(S) of them at least (the bound of Hong and Kung, in the tight form of arXiv
  1702.02017), and what it waits for memory comes on top of its arithmetic, as in the base form that
  the tables of matmuls are fitted with. How much of L2 chunks take is `_MOST_OF_L2`.

A communication may belong to the computation that needs it (its site) and be split in pieces with
it. Then one piece of each has nothing to hide behind: a step takes the longer of Y and one piece of
each such communication, and X and one piece of each site; pieces cost launches and the matmul's
efficiency. All is arithmetic on `CostModel`; nothing is measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxoverlap.cost import nccl
from jaxoverlap.cost.groups import ALONE, Group, Sent, Share, pair
from jaxoverlap.cost.kernels import KernelWork, MatmulKernel
from jaxoverlap.cost.model import Channels, CostModel
from jaxoverlap.plan.collectives import PERMUTE
from jaxoverlap.tuning.lagom.search import Config, ModelledStep, SettingIndex

# Chunks take at most this share of L2, however many are under way. It is the one fitted number:
# with it NCCL's default settings slow the matmuls of benchmarks/lagom.py on an A40 by 32.2%, where
# Lagom's authors measured 30 to 35%.
_MOST_OF_L2 = 0.77
CHUNK_BYTES = 2 << 20  # NCCL's own, for Simple: half of a buffer of 4 MiB


@dataclass(frozen=True)
class SettingSpace:
    """The settings that a communication can have: all combinations of a few axes, each rising.

    Attributes:
        counts: numbers of channels.
        chunk_bytes: bytes of a channel's chunk.
        threads: threads of a channel.
        pieces: numbers of pieces that the communication and its computation may be split into.
    """

    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 24)
    chunk_bytes: tuple[int, ...] = (128 << 10, 512 << 10, 1 << 20, 2 << 20)
    threads: tuple[int, ...] = (nccl.THREADS,)
    pieces: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for axis in self.axes:
            if not axis or axis[0] < 1 or list(axis) != sorted(set(axis)):
                raise ValueError(f"{self}: give each axis numbers above zero that rise")

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """The axes, in the order in which they are walked: what matters most first."""
        return (self.counts, self.chunk_bytes, self.threads, self.pieces)

    def setting(self, place: SettingIndex) -> tuple[Channels, int]:
        """Return the channels and the number of pieces at an index on the axes."""
        count, chunk, threads, pieces = (axis[p] for axis, p in zip(self.axes, place, strict=True))
        return Channels(count, chunk, threads), pieces

    def near(self, channels: Channels, pieces: int = 1) -> SettingIndex:
        """Return the index of the setting that is nearest, by ratio, on each axis."""
        wanted = (channels.count, channels.chunk_bytes, channels.threads, pieces)
        return tuple(
            min(range(len(axis)), key=lambda p, a=axis, w=value: abs(math.log(a[p] / w)))
            for axis, value in zip(self.axes, wanted, strict=True)
        )


@dataclass(frozen=True)
class Communication:
    """One collective of a step.

    Attributes:
        kind: as HLO writes it, as in "all-gather".
        bytes_moved: bytes that each device sends by a ring.
        group: the devices that take part.
        runs: how often it runs, one after the other.
        site: which of the computations needs it (gives it) piece by piece; None: none waits.
        space: the settings that it can have.
        ring: the devices of the ring that it becomes if split in so many pieces or a multiple; one
            piece is there from the start, the others are hops. 0: it never does.
    """

    kind: str
    bytes_moved: int
    group: Group
    runs: int = 1
    site: int | None = None
    space: SettingSpace = field(default_factory=SettingSpace)
    ring: int = 0

    def exposed_share(self, pieces: int) -> float:
        """Return the share that nothing can hide: one piece, but none in a ring."""
        return 0.0 if self._in_hops(pieces) else 1 / pieces

    def sent(self, pieces: int) -> tuple[int, Sent]:
        """Return the number of collectives that it is split into, and the kind and size of each.

        An all-reduce in hops is a reduce-scatter's, which a gather follows; `bytes_moved` are of
        both, and both are taken for hops.
        """
        if not self._in_hops(pieces):
            return pieces, (self.kind, self.bytes_moved // pieces, self.group)
        count = (self.ring - 1) * (pieces // self.ring)
        return count, (PERMUTE, self.bytes_moved // count, pair(self.group))

    def _in_hops(self, pieces: int) -> bool:
        return self.ring > 1 and pieces % self.ring == 0


@dataclass(frozen=True)
class Computation:
    """One kernel of a step.

    Attributes:
        work: its matmuls and bytes.
        runs: how often it runs, one after the other.
        cut: the kernels of one piece, by the number of pieces; for other numbers, one piece is an
            equal part of each matmul's first dim.
    """

    work: KernelWork
    runs: int = 1
    cut: tuple[tuple[int, tuple[KernelWork, ...]], ...] = ()


@dataclass(frozen=True)
class Makespan:
    """A problem for `jaxoverlap.tuning.lagom.search.search`: the model of a step, by settings.

    Attributes:
        cost: the cost model of the cluster.
        communications: the communications, in the order in which they run.
        computations: the computations, in the order in which they run.
    """

    cost: CostModel
    communications: tuple[Communication, ...]
    computations: tuple[Computation, ...]

    def __post_init__(self) -> None:
        sites = [c.site for c in self.communications if c.site is not None]
        if len(set(sites)) < len(sites) or not set(sites) <= set(range(len(self.computations))):
            raise ValueError(
                f"sites {sites} of {len(self.computations)} computations: give each communication "
                "one of them, or None, and no computation twice"
            )

    @property
    def axes(self) -> Sequence[Sequence[int]]:
        """The number of settings on each axis of each communication."""
        return self._axes

    @property
    def default(self) -> Config:
        """NCCL's own channels and chunks, in one piece, as near as the spaces come to them."""
        return tuple(c.space.near(self._nccl(c)) for c in self.communications)

    def measure(self, config: Config) -> ModelledStep:
        """Price the step with these settings. Nothing is slowed by contention but kernels."""
        windows, head_s, tail_s = [], 0.0, 0.0
        each_s = tuple(self.seconds(j, place) for j, place in enumerate(config))
        times = [float(c.runs) for c in self.computations]
        for j, (c, place) in enumerate(zip(self.communications, config, strict=True)):
            exposed = 0.0
            if c.site is not None:
                pieces = c.space.setting(place)[1]
                exposed = c.exposed_share(pieces)
                times[c.site] *= self.in_pieces(j, place)
                head_s += exposed * each_s[j]
                tail_s += times[c.site] * self.alone_s(c.site) / pieces
            windows.append((1 - exposed) * each_s[j])
        communication_s, computation_s = sum(each_s), self._beside(config, windows, times)
        step_s = max(communication_s + tail_s, computation_s + head_s)
        return ModelledStep(communication_s, computation_s, step_s, each_s)

    def _beside(self, config: Config, windows: list[float], times: list[float]) -> float:
        """Sum the seconds of all computations, window by window of overlapped communication."""
        now, j = 0.0, 0
        window = windows[0] if windows else math.inf
        for i, left in enumerate(times):
            while j < len(windows):
                slowed_s = self.slowed_s(i, j, config[j])
                if left * slowed_s <= window:
                    now, window, left = now + left * slowed_s, window - left * slowed_s, 0.0
                    break
                now, left, j = now + window, left - window / slowed_s, j + 1
                window = windows[j] if j < len(windows) else math.inf
            if left:
                now += left * self.alone_s(i)
        return now

    # -- the tables: each entry worked out once ---------------------------------------------------

    def seconds(self, j: int, place: SettingIndex) -> float:
        """Return the seconds of communication j with a setting: all runs, all their pieces."""
        c = self.communications[j]
        return c.runs * self._prices.communication_s(self._alike[j], place)

    def alone_s(self, i: int) -> float:
        """Return the seconds of one run of computation i without overlapped communication."""
        return self._prices.kernel_s(self.computations[i].work, None)

    def slowed_s(self, i: int, j: int, place: SettingIndex) -> float:
        """Return the seconds of one run of computation i, fully overlapped with communication j."""
        beside = self._prices.beside(self._alike[j], place)
        return self._prices.kernel_s(self.computations[i].work, beside)

    def in_pieces(self, j: int, place: SettingIndex) -> float:
        """Return the slowdown of communication j's computation if split by that setting."""
        c = self.communications[j]
        if c.site is None:
            return 1.0
        pieces = c.space.setting(place)[1]
        site = self.computations[c.site]
        return self._prices.in_pieces(site.work, dict(site.cut).get(pieces), pieces)

    @functools.cached_property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(len, c.space.axes)) for c in self.communications)

    @functools.cached_property
    def _alike(self) -> tuple[Communication, ...]:
        """The communications, with equal-cost ones normalised to one value, as cache keys."""
        return tuple(replace(c, runs=1, site=None) for c in self.communications)

    @functools.cached_property
    def _prices(self) -> _Prices:
        return _Prices(self.cost)

    def _nccl(self, c: Communication) -> Channels:
        count = self.cost.share(c.kind, c.bytes_moved, c.group).sms
        return Channels(max(int(count), 1), CHUNK_BYTES)


@dataclass(frozen=True)
class _Beside:
    """The share of the chip, and of its L2, that a communication takes while it runs."""

    share: Share
    l2_bytes: float


class _Prices:
    """Seconds of communications and kernels on a cluster, each worked out once."""

    def __init__(self, cost: CostModel):
        self.cost = cost
        self.communication_s = functools.cache(self._communication_s)
        self.beside = functools.cache(self._beside)
        self.kernel_s = functools.cache(self._kernel_s)
        self.in_pieces = functools.cache(self._in_pieces)

    def _communication_s(self, c: Communication, place: SettingIndex) -> float:
        channels, pieces = c.space.setting(place)
        count, sent = c.sent(pieces)
        return count * self.cost.collective_s(*sent, _of(sent, channels))

    def _beside(self, c: Communication, place: SettingIndex) -> _Beside:
        channels, pieces = c.space.setting(place)
        _, sent = c.sent(pieces)
        share = self.cost.share(*sent, _of(sent, channels))
        if not share.sms:  # copies, which have no buffers
            return _Beside(share, 0.0)
        most = _MOST_OF_L2 * self.cost.cluster.chip.l2_bytes
        return _Beside(share, min(channels.count * channels.chunk_bytes, most))

    def _kernel_s(self, work: KernelWork, beside: _Beside | None) -> float:
        matmuls_s = sum(self._matmul_s(m, beside) for m in work.matmuls)
        return self.cost.kernel_s(work, beside.share if beside else ALONE, matmuls_s=matmuls_s)

    def _matmul_s(self, m: MatmulKernel, beside: _Beside | None) -> float:
        """Price a matmul: its memory time grows by lost L2 and lost rate, the rest by waves.

        At least a tenth of the memory's rate is left, as in `CostModel`.
        """
        price = functools.partial(self.cost.matmul_s, m.m, m.n, m.k, batch=m.batch, dtype=m.dtype)
        alone_s = price()
        if beside is None:
            return alone_s
        chip = self.cost.cluster.chip
        rate = chip.memory_bandwidth_bytes_per_s
        had, has = (memory_traffic(m, b) for b in (chip.l2_bytes, chip.l2_bytes - beside.l2_bytes))
        in_memory_s = min(had / rate, alone_s)
        left = max(rate - beside.share.memory_bytes_per_s, rate / 10)
        waves_s = price(beside=Share(beside.share.sms)) - alone_s
        grows = has / had * rate / left
        return alone_s + waves_s * (1 - in_memory_s / alone_s) + in_memory_s * (grows - 1)

    def _in_pieces(
        self, work: KernelWork, cut: tuple[KernelWork, ...] | None, pieces: int
    ) -> float:
        if pieces == 1 or not work.matmuls:
            return 1.0
        if cut is None:
            cut = tuple(KernelWork((replace(m, m=-(-m.m // pieces)),)) for m in work.matmuls)
        return pieces * sum(self.kernel_s(w, None) for w in cut) / self.kernel_s(work, None)


def _of(sent: Sent, channels: Channels) -> Channels | None:
    """Return the channels of a collective; None for a hop, for which NCCL calls no tuner."""
    return None if sent[0] == PERMUTE else channels


def memory_traffic(m: MatmulKernel, cache_bytes: float) -> float:
    """Return the fewest bytes that a matmul reads and writes in memory, with so large a cache.

    2 m n k / sqrt(S) elements for a cache of S elements, and no less than operands and result.
    """
    touched = m.memory_bytes
    elements = m.batch * (m.m * m.k + m.k * m.n + m.m * m.n)
    element_bytes = touched / elements
    cached = math.sqrt(cache_bytes / element_bytes)
    return max(touched, 2.0 * m.batch * m.m * m.n * m.k / cached * element_bytes)


def places(axes: Sequence[int]) -> list[SettingIndex]:
    """List all index tuples on some axes, in order."""
    return list(itertools.product(*map(range, axes)))
