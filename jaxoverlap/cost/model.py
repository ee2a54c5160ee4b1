"""Estimate the seconds of matmuls, attention, other kernels and collectives, alone or concurrent.

Ops alone are estimated by measured tables (`jaxoverlap.cost.tables`; benchmarks/accuracy.py has
their errors), collectives across NVLink domains by NCCL's tuning model (`jaxoverlap.cost.nccl`), as
none of those were measured.

Concurrent ops are estimated by the two terms of Lagom (arXiv 2602.20656): the channels of a
collective take SMs, so that a matmul needs more waves, and its traffic takes memory bandwidth, so
that each wave may last longer. The paper's closed forms were not at hand: this is a reconstruction
from its description, with FlashOverlap's ratio of waves (arXiv 2504.19519).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from jaxoverlap.cost import nccl
from jaxoverlap.cost.groups import ALONE, Group, Sent, Share, compute_factor, legs_of
from jaxoverlap.cost.kernels import KernelWork
from jaxoverlap.cost.nccl import Channels
from jaxoverlap.cost.tables import ChipTables, MatmulTable
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.plan.collectives import PERMUTE

# Kinds of collectives that were not measured are priced as these.
_COUNTED_AS = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}
# The dtypes of HLO: the table that holds for one, and how many times longer its matmuls take.
# TF32, which XLA takes for float32, has half of bf16's rate and twice its bytes.
_DTYPES = {
    "f16": ("bf16", 1.0),
    "f32": ("bf16", 2.0),
    "f8e4m3fn": ("fp8", 1.0),
    "f8e5m2": ("fp8", 1.0),
}
# The tile that cuBLAS takes for a matmul is not known, so its usual large ones are averaged.
_TILES = ((128, 128), (128, 256), (256, 128))
# Bytes of device memory read and written for each byte sent. Ring, Simple protocol: what arrives is
# written, read and copied or added to what lies there; a permute reads once and writes once.
_MEMORY_BYTES_PER_BYTE = {"all-reduce": 3.0, "reduce-scatter": 3.0, PERMUTE: 2.0}
_MEMORY_BYTES_OF_OTHERS = 2.0
# A permute by copy engines: bf16[512, 24576] in 100 µs, where NCCL's took 445 (openxla/xla, pull
# request 11182, by NVIDIA; one host, the chip is not named and taken for an H100). The latency is
# NCCL's; the rest is 0.6 of NVLink's peak.
_COPY_LATENCY_S, _COPY_EFFICIENCY = 8.4e-6, 25.2e6 / (100e-6 - 8.4e-6) / 450e9

# Copies of megabytes from pinned memory reach this share of the link's peak: 25 to 26 GB/s over
# PCIe 4 x16 and 53 to 55 over PCIe 5 x16 are what public runs of NVIDIA's bandwidth tests report.
# No row was measured here.
_HOST_EFFICIENCY = 0.82


@dataclass(frozen=True)
class CostModel:
    """The seconds of one device's ops in a cluster. Make one by `cost_model`.

    Attributes:
        cluster: chip and links.
        tables: what was measured of the chip.
        permute_channels: channels of each permute on NVLink; None: as many as NCCL gives it.
        given: the channels of single collectives, by kind, bytes moved and group; others have
            NCCL's.
        most_channels: the most channels of any collective, as NCCL_MAX_CTAS has it; None: NCCL's
            own most.
    """

    cluster: Cluster
    tables: ChipTables
    permute_channels: int | None = None
    given: tuple[tuple[Sent, Channels], ...] = ()
    most_channels: int | None = None

    def __post_init__(self) -> None:
        if self.most_channels is not None and self.most_channels < 1:
            raise ValueError(f"at most {self.most_channels} channels: give 1 or more, or None")

    def matmul_s(
        self, m: int, n: int, k: int, *, batch: int = 1, dtype: str = "bf16", beside: Share = ALONE
    ) -> float:
        """Seconds of [batch, m, k] x [batch, k, n].

        Alone: the table. During a collective the time over the launch grows by the ratio of waves,
        ceil(tiles / SMs left) / ceil(tiles / SMs), and by the collective's share of the memory
        (`compute_factor`); it is no shorter than the matmul's bytes take at the memory
        bandwidth that is left.

        Args:
            dtype: the operands', as HLO writes it; "fp8" for either kind; on Blackwell also
                "mxfp8" and "nvfp4", with their scales.

        Raises:
            ValueError: for dims below one, or a dtype that was not measured.
        """
        if min(m, n, k, batch) < 1:
            raise ValueError(f"a matmul of {batch} x [{m}, {k}] x [{k}, {n}]: give dims above zero")
        table, times = self._matmuls(dtype)
        over_launch_s = max(table.seconds(m, n, k, batch) - table.launch_s, 0.0) * times
        if beside != ALONE:
            memory_s = table.bytes_touched(m, n, k, batch) * times / self._memory_left(beside)
            waves = self._more_waves(m, n, batch, beside)
            slower = compute_factor(waves, beside, self.cluster.chip)
            over_launch_s = max(over_launch_s * slower, memory_s)
        return table.launch_s + over_launch_s

    def attention_s(
        self,
        queries: int,
        keys: int,
        heads: int,
        head_size: int,
        *,
        causal: bool = False,
        backward: bool = False,
        dtype: str = "bf16",
        beside: Share = ALONE,
    ) -> float:
        """Seconds of one kernel of fused attention.

        Alone: the table, which is of square causal scores, forward. Others by their operations at
        the same rate: twice without a mask (`benchmarks/accuracy.py` has the error of that), 2.5
        times backward (FlashAttention-2, arXiv 2307.08691, section 4.1; assumed, not measured).
        Scores that are not square count as the square one with as many. During a collective as a
        matmul, with a tile for 128 queries of a head.

        Args:
            heads: number of heads in all the batch.

        Raises:
            ValueError: for dims below one, a dtype of other than 16 bits, or a chip without table.
        """
        if min(queries, keys, heads, head_size) < 1:
            raise ValueError(
                f"attention of {heads} heads, {queries} x {keys} x {head_size}: give dims above 0"
            )
        table = self.tables.attention
        if table is None or dtype not in ("bf16", "f16"):
            known = "bf16 and f16" if table else "none"
            raise ValueError(
                f"no attention of {dtype} was measured on {self.tables.chip}: known are {known}"
            )
        times = (1.0 if causal else 2.0) * (2.5 if backward else 1.0)
        seconds = table.seconds(math.sqrt(queries * keys), heads, head_size, times)
        if beside == ALONE:
            return seconds
        moved = 4.0 * heads * (queries + keys) * head_size
        waves = self._waves_ratio(heads * math.ceil(queries / 128), beside)
        slower = compute_factor(waves, beside, self.cluster.chip)
        over_launch_s = max(seconds - table.launch_s, 0.0) * slower
        return table.launch_s + max(over_launch_s, moved / self._memory_left(beside))

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes whose matmuls have a price, as HLO writes them."""
        measured = self.tables.matmuls
        return frozenset(measured) | {d for d, (of, _) in _DTYPES.items() if of in measured}

    def kernel_s(
        self, kernel: KernelWork, beside: Share = ALONE, *, matmuls_s: float | None = None
    ) -> float:
        """Seconds of a kernel: bound by its matmuls or by its bytes, whichever takes longer.

        Measured seconds of attention include its bytes.

        Args:
            kernel: its work.
            beside: what collectives take meanwhile.
            matmuls_s: seconds of its matmuls, where these are estimated otherwise.

        Raises:
            ValueError: for a dtype that was not measured; `known` gives a kernel that has a price.
        """
        if kernel.attention:
            return self.attention_s(**vars(kernel.attention), beside=beside)
        if matmuls_s is None:
            matmuls_s = sum(
                self.matmul_s(m.m, m.n, m.k, batch=m.batch, dtype=m.dtype, beside=beside)
                for m in kernel.matmuls
            )
        if not kernel.memory_bytes:
            return matmuls_s
        memory_s = self.memory_s(
            kernel.memory_bytes,
            transcendentals=kernel.transcendentals,
            transposed_bytes=kernel.transposed_bytes,
            beside=beside,
        )
        return max(matmuls_s, memory_s)

    def known(self, kernel: KernelWork) -> KernelWork:
        """Return a kernel, or only its bytes, named in `unknown`, if it has no price."""
        try:
            self.kernel_s(kernel)
        except ValueError:
            strange = kernel.attention or kernel.matmuls[0]
            kind = "attention" if kernel.attention else "matmul"
            name = kernel.unknown or f"{kind} of {strange.dtype}"
            moved = kernel.memory_bytes + sum(m.memory_bytes for m in kernel.matmuls)
            return replace(kernel, matmuls=(), memory_bytes=moved, unknown=name, attention=None)
        return kernel

    def memory_s(
        self,
        num_bytes: float,
        *,
        transcendentals: int = 0,
        transposed_bytes: float = 0,
        beside: Share = ALONE,
    ) -> float:
        """Seconds of a kernel that is no matmul, with its launch.

        Args:
            num_bytes: bytes that it reads and writes.
            transcendentals: elements that it takes an exponential, a tangent, a root of. They take
                no time of their own on a GPU; on a CPU as long as was measured.
            transposed_bytes: bytes that it reads along one dim and writes along another; likewise.
        """
        memory = self.tables.memory
        if memory.curve:
            moving_s = memory.curve.at(num_bytes)
        else:
            rate = min(memory.bytes_per_s, self._memory_left(beside))
            moving_s = memory.launch_s + num_bytes / rate
        hard_s = transcendentals * memory.transcendental_s
        return moving_s + hard_s + transposed_bytes * memory.transposed_s

    def collective_s(
        self, kind: str, bytes_moved: int, group: Group, channels: Channels | None = None
    ) -> float:
        """Seconds of a collective that runs alone on its links.

        Args:
            kind: as HLO writes it, as in "all-gather".
            bytes_moved: bytes that each device sends by a ring (`simulation.audit.Collective`).
            channels: what bounds the rate; None: the channels given, or NCCL's own choice.

        Raises:
            ValueError: for a kind that was not measured, or a negative number of bytes.
        """
        if len(legs := legs_of(kind, bytes_moved, group)) > 1:
            return sum(self.collective_s(*leg) for leg in legs)
        channels = self._channels(kind, bytes_moved, group, channels)
        kind = self._known(kind, bytes_moved)
        if group.size == 1:
            return self.tables.memory.launch_s  # nothing to send
        if kind == PERMUTE:
            return self._permute_s(bytes_moved, group, channels)
        if group.domains == 1:
            seconds = self._on_nvlink(
                self.tables.collectives.seconds(kind, bytes_moved, group.size),
                self.tables.collectives.seconds(kind, 0, group.size),
            )
        elif between := self.tables.between:
            seconds = between.collectives.seconds(kind, bytes_moved, group.size)
        else:
            spread = nccl.Spread(
                group.size,
                group.domains,
                self._nvlink_rate(kind),
                self.cluster.network,
                self.cluster.gpus_per_nvlink_domain,
            )
            seconds = nccl.collective_s(kind, bytes_moved, spread)
        if channels is None:
            return seconds
        rate = channels.bytes_per_s(self.cluster.chip.compute_capability)
        return max(seconds, self.collective_s(kind, 0, group) + bytes_moved / rate)

    def host_copy(self, bytes_moved: int) -> tuple[float, Share]:
        """Return the seconds of a copy from or to the host's memory, and what it takes meanwhile.

        A copy engine carries it, so it takes no SMs: it reads or writes the device's memory once.
        """
        link = self.cluster.chip.host_link
        seconds = link.latency_s + bytes_moved / (_HOST_EFFICIENCY * link.bandwidth_bytes_per_s)
        return seconds, Share(0, bytes_moved / seconds if bytes_moved else 0.0)

    @property
    def on_cpus(self) -> bool:
        """Return whether these are prices of XLA:CPU.

        It makes no reduce-scatter of an all-reduce that is only sliced, and adds partial results of
        a matmul up in kernels of their own, where XLA:GPU's matmuls add to what is there.
        """
        return self.tables.here is not None and self.tables.here.platform == "cpu"

    def skew_s(self, computed_s: float, kind: str, group: Group) -> float:
        """Return seconds that a collective waits for the last device after `computed_s` of compute.

        Zero where each device has cores of its own. XLA:CPU lets a permute wait for all devices.
        """
        if self.tables.skew is None:
            return 0.0
        size = self.cluster.num_devices if kind == PERMUTE else group.size
        return self.tables.skew.seconds(computed_s, size)

    def share(
        self, kind: str, bytes_moved: int, group: Group, channels: Channels | None = None
    ) -> Share:
        """Return the share of the chip that a collective takes from compute while it runs.

        SMs: its channels; a copy takes none. Memory bandwidth: two or three bytes read and written
        for each byte sent (a sum reads what it adds to), over the time that it takes alone.

        Raises:
            ValueError: as `collective_s`.
        """
        channels = self._channels(kind, bytes_moved, group, channels)
        kind = self._known(kind, bytes_moved)
        most = self.tables.channels
        if group.size > 1 and (taken := self._taken(kind, group)) is not None:
            return Share(self._at_most(taken * self.cluster.chip.num_sms))
        if group.size == 1 or most == 0:
            return ALONE
        rate = bytes_moved / self.collective_s(kind, bytes_moved, group, channels)
        traffic = rate * _MEMORY_BYTES_PER_BYTE.get(kind, _MEMORY_BYTES_OF_OTHERS)
        if kind == PERMUTE and group.by_copy:
            return Share(0, traffic)
        if channels is not None:
            return Share(channels.count, traffic)
        if kind != PERMUTE:
            count = nccl.ring_channels(bytes_moved, group.size, group.domains, most)
        elif group.domains > 1:
            count = self._at_most(nccl.NETWORK_PERMUTE_CHANNELS)
        else:
            count = self._channels_of_permute(bytes_moved, group)
        return Share(count, traffic)

    # -- pieces -----------------------------------------------------------------------------------

    def _taken(self, kind: str, group: Group) -> float | None:
        """The measured share of compute that a collective takes; None if it was not measured."""
        between = self.tables.between
        by_kind = between.taken if between and group.domains > 1 else self.tables.taken_by
        return by_kind.get(kind, self.tables.taken or None)

    @functools.cached_property
    def _given(self) -> dict[Sent, Channels]:
        return dict(self.given)

    def _channels(
        self, kind: str, bytes_moved: int, group: Group, asked: Channels | None
    ) -> Channels | None:
        """Return the channels that bound a collective; None where NCCL chooses below its most."""
        channels, most = asked or self._given.get((kind, bytes_moved, group)), self.most_channels
        if most is None or kind == PERMUTE or self.tables.channels == 0:
            return channels
        if channels is not None:
            return replace(channels, count=min(channels.count, most))
        usual = nccl.ring_channels(bytes_moved, group.size, group.domains, self.tables.channels)
        return Channels(most) if usual > most else None

    def _at_most(self, count: float) -> float:
        return count if self.most_channels is None else min(count, self.most_channels)

    def _matmuls(self, dtype: str) -> tuple[MatmulTable, float]:
        """The table that holds for a dtype, and how many times longer its matmuls take."""
        tables = self.tables.matmuls
        name, times = (dtype, 1.0) if dtype in tables else _DTYPES.get(dtype, (dtype, 1.0))
        if name not in tables:
            also = [d for d, (of, _) in _DTYPES.items() if of in tables and d not in tables]
            raise ValueError(
                f"no matmuls of {dtype} were measured on {self.tables.chip}: known are "
                f"{', '.join([*tables, *also])}"
            )
        return tables[name], times

    def _more_waves(self, m: int, n: int, batch: int, beside: Share) -> float:
        """Return the factor by which a matmul needs more waves on the SMs that are left."""
        counts = (
            batch * math.ceil(m / tile_m) * math.ceil(n / tile_n) for tile_m, tile_n in _TILES
        )
        return sum(self._waves_ratio(tiles, beside) for tiles in counts) / len(_TILES)

    def _waves_ratio(self, tiles: int, beside: Share) -> float:
        """Waves of so many tiles on the SMs that are left, over those on all SMs."""
        sms = self.cluster.chip.num_sms
        left = max(sms - beside.sms, 1.0)
        return math.ceil(tiles / left) / math.ceil(tiles / sms)

    def _memory_left(self, beside: Share) -> float:
        """The memory's bytes per second that compute can have; a tenth at least."""
        peak = self.cluster.chip.memory_bandwidth_bytes_per_s
        return max(peak - beside.memory_bytes_per_s, peak / 10)

    def _known(self, kind: str, bytes_moved: int) -> str:
        """Return the kind of collective whose measured curves estimate the time of another kind."""
        if bytes_moved < 0:
            raise ValueError(f"a {kind} of {bytes_moved} bytes: give zero or more")
        known = _COUNTED_AS.get(kind, kind)
        curves = self.tables.collectives.curves
        if known != PERMUTE and known not in curves:
            names = ", ".join(dict.fromkeys([*curves, PERMUTE, *_COUNTED_AS]))
            raise ValueError(f"unknown collective {kind!r}: known are {names}")
        return known

    def _permute_s(self, bytes_moved: int, group: Group, channels: Channels | None) -> float:
        if group.domains > 1 and self.tables.between and self.tables.between.permutes.curve:
            return self.tables.between.permutes.curve.at(bytes_moved)
        if group.domains > 1:
            return nccl.network_permute_s(bytes_moved, self.cluster.network)
        if group.by_copy:
            peak = self.cluster.nvlink.bandwidth_bytes_per_s
            return _COPY_LATENCY_S + bytes_moved / (_COPY_EFFICIENCY * peak)
        table = self.tables.permutes
        if table.curve:
            return table.curve.at(bytes_moved)
        rate = table.bytes_per_s
        if table.channel_bytes_per_s:
            count = channels.count if channels else self._channels_of_permute(bytes_moved, group)
            rate = min(rate, nccl.permute_rate(bytes_moved, count, table.channel_bytes_per_s))
        return self._on_nvlink(table.latency_s + bytes_moved / rate, table.latency_s)

    def _channels_of_permute(self, bytes_moved: int, group: Group) -> int:
        """Count a permute's NVLink channels; a communicator of all devices counts as a domain's."""
        if self.permute_channels is not None:
            return self.permute_channels
        devices = group.communicator or self.cluster.gpus_per_nvlink_domain
        return int(self._at_most(nccl.permute_channels(bytes_moved, devices)))

    def _nvlink_rate(self, kind: str) -> float:
        """Return the bytes per second that a device sends in a large collective within a domain."""
        curves = self.tables.collectives.curves[kind]
        have, was = self.cluster.nvlink, self.cluster.chip.nvlink
        slower = was.bandwidth_bytes_per_s / have.bandwidth_bytes_per_s
        return curves[max(curves)].bytes_per_s / slower

    def _on_nvlink(self, seconds: float, floor_s: float) -> float:
        """Scale measured seconds to the cluster's link, where it is another than the chip's own.

        `floor_s`, which does not grow with the bytes, goes by the links' latencies, the rest by
        their rates.
        """
        have, was = self.cluster.nvlink, self.cluster.chip.nvlink
        if have == was:
            return seconds
        slower = was.bandwidth_bytes_per_s / have.bandwidth_bytes_per_s
        return floor_s * have.latency_s / was.latency_s + (seconds - floor_s) * slower
