"""Compute NCCL's seconds over a network, and the channels that it runs on, without tables.

The measured tables end at one NVLink domain. Beyond it this is the model by which NCCL itself picks
algorithm and protocol (NVIDIA/nccl, src/graph/tuning.cc of 2.18.3): latency + bytes / bandwidth,
the least over ring and tree and the three protocols. It is a model and no measurement.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxoverlap.hardware.cluster import Link

# Seconds of (LL, LL128, Simple): to start, per step over NVLink, per step over the network.
_RING = ((6.6e-6, 14.0e-6, 8.4e-6), (0.6e-6, 1.9e-6, 3.4e-6), (2.7e-6, 4.0e-6, 14.0e-6))
_TREE = ((6.8e-6, 14.0e-6, 0.0), (0.6e-6, 1.25e-6, 4.0e-6), (5.0e-6, 8.5e-6, 14.0e-6))
_LL_BYTES_PER_S, _LL_BYTES_PER_S_OF_TWO = 19.0e9, 22.5e9  # at most, by domains
_LL128_EFFICIENCY = _TREE_EFFICIENCY = 0.92
_CHANNEL_BYTES_PER_S = {"Ampere": 20e9, "Hopper": 36.7e9}  # perChMaxRingLL128Bws
# Trees reach these shares of their bandwidth, by protocol and log2 of the bytes from 64 on.
_TREE_REACHES = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9),
    (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, *(0.5,) * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
_PLATEAU = 1.4  # an all-reduce by a ring over the network, Simple: its latency is longer

# The latency of a network's transfer for which `step_s` gives NCCL's own steps: NCCL chooses the
# algorithm and the protocol by those, whatever the network really takes.
_ASSUMED_LATENCY_S = _RING[0][2] + _RING[2][2]
# LL128 is not taken above this, an assumption: 32 hosts of H100s gather 2 GB in Simple's time, and
# 155 to 309 MB in LL128's (NVIDIA/nccl issue 1218; marin-community/marin issue 6304).
_LARGEST_LL128_BYTES = 512 * 2**20
# Racks of NVLink (GB200 NVL72) joined by InfiniBand: seconds of a ring's step, and the share of
# NVLink's rate that more than two racks reach. Fitted to CoreWeave's all-reduces of 512 MiB and
# 16 GiB on 1440 GPUs (coreweave/nccl-tests, NCCL 2.26.2); those on 144 GPUs had no part in it.
_RACK_STEP_S, _MANY_RACKS_SHARE = 1.5e-6, 0.55
_LARGEST_HOST = 8  # GPUs: a larger NVLink domain is a rack

# NCCL's search for channels settles at this share of a NIC's rate: 48 of a 400 Gb/s NIC's 50 GB/s
# (src/graph/search.cc, sm90SpeedArrayInter).
_NETWORK_EFFICIENCY = 0.96


THREADS = 512  # of a channel, by NCCL's own choice for large messages
_BYTES_A_THREAD = 64  # threadThresholds: bytes that Simple wants for each thread


@dataclass(frozen=True)
class Channels:
    """The resources that a collective is given: Lagom's NC, C and NT.

    Attributes:
        count: channels; each is a thread block with an SM to itself.
        chunk_bytes: bytes that a channel sends before it waits for its neighbour.
        threads: threads of a channel.
    """

    count: int
    chunk_bytes: int = 512 * 1024  # NCCL: a buffer of 4 MiB in 8 steps
    threads: int = THREADS

    def __post_init__(self) -> None:
        if self.count < 1 or self.chunk_bytes < 1 or self.threads < 1:
            raise ValueError(f"{self}: give at least one channel, one byte and one thread")

    def bytes_per_s(self, compute_capability: tuple[int, int]) -> float:
        """Return the channels' total rate: each sends a chunk, then waits for a step over NVLink.

        A channel's own rate is that of NCCL's tuning model (ring, LL128). The terms for chunks and
        threads are reconstructions: Lagom says that the rate rises with C, and little with NT, and
        gives no formula. A thread has 64 bytes under way for a step's time (Little's law), so that
        512 threads never bound the rate, and 96 halve an A100's.
        """
        channel = _CHANNEL_BYTES_PER_S["Hopper" if compute_capability >= (9, 0) else "Ampere"]
        channel = min(channel, self.threads * _BYTES_A_THREAD / _RING[1][0])
        return self.count * self.chunk_bytes / (self.chunk_bytes / channel + _RING[1][0])


@dataclass(frozen=True)
class Spread:
    """A group of devices that spread evenly over two or more NVLink domains.

    Attributes:
        size: devices that take part together.
        domains: NVLink domains.
        nvlink_bytes_per_s: what each device can send inside its domain, as measured.
        network: the link between domains. Each GPU has a NIC of its own (rails).
        gpus: GPUs of a domain.
    """

    size: int
    domains: int
    nvlink_bytes_per_s: float
    network: Link
    gpus: int = 8

    @property
    def here(self) -> int:
        """Devices in a domain."""
        return -(-self.size // self.domains)

    @property
    def joins_racks(self) -> bool:
        """Return whether the domains are racks, which NVLink joins across hosts."""
        return self.here > _LARGEST_HOST

    @property
    def nic_bytes_per_s(self) -> float:
        """Return the bytes per second that a device sends over the network."""
        return self.network.bandwidth_bytes_per_s * _NETWORK_EFFICIENCY

    @property
    def ring_bytes_per_s(self) -> float:
        """Return a device's rate in a ring, which crosses between domains on all NICs at once.

        A host's groups share its NICs evenly, and the way between its sockets where they need it.
        """
        rate = min(self.nvlink_bytes_per_s, self.here * self.nic_bytes_per_s)
        between = self.network.between_sockets_bytes_per_s
        if between is None or self.here in (1, self.gpus):
            return rate
        return min(rate, between * self.here / self.gpus)

    def rate(self, protocol: int) -> float:
        """Return a device's rate in a ring by protocol LL (0), LL128 (1) or Simple (2)."""
        if protocol == 0:
            most = _LL_BYTES_PER_S if self.domains > 2 else _LL_BYTES_PER_S_OF_TWO
            return min(most, self.ring_bytes_per_s / 4)
        return self.ring_bytes_per_s * (_LL128_EFFICIENCY if protocol == 1 else 1.0)

    def step_s(self, nccl_s: float) -> float:
        """NCCL's seconds of a step over the network, for a network with another latency."""
        return nccl_s * max(self.network.latency_s - _RING[0][2], 0.0) / _RING[2][2]


def collective_s(kind: str, bytes_moved: float, spread: Spread) -> float:
    """Seconds of a collective across NVLink domains.

    Args:
        bytes_moved: what each device sends, by a ring.
    """
    if kind == "all-to-all":
        return _exchange_s(bytes_moved, spread)
    if spread.joins_racks:
        return _racks_s(kind, bytes_moved, spread)
    algorithms: list[Callable[[int, float, Spread], float]] = [
        functools.partial(_ring_s, kind=kind)
    ]
    if kind == "all-reduce":  # NCCL has trees for nothing else
        algorithms.append(_tree_s)
    assumed = replace(spread, network=replace(spread.network, latency_s=_ASSUMED_LATENCY_S))
    algorithm, protocol = min(
        itertools.product(algorithms, _protocols(bytes_moved, spread.network)),
        key=lambda choice: choice[0](choice[1], bytes_moved, assumed),
    )
    if kind == "all-reduce":
        return algorithm(protocol, bytes_moved, spread)
    return _ring_in_step_s(protocol, bytes_moved, spread)


def _protocols(bytes_moved: float, network: Link) -> tuple[int, ...]:
    """Return the protocols that a network allows for a message."""
    if network.simple_only:
        return (2,)
    return (0, 1, 2) if bytes_moved <= _LARGEST_LL128_BYTES else (0, 2)


def _ring_in_step_s(protocol: int, bytes_moved: float, spread: Spread) -> float:
    """Return the seconds of a ring, each of whose steps waits for the hops between domains.

    NCCL's tuning model lets only the steps between domains take the network's time (`_ring_s`). In
    every step of a ring some hop crosses the network, though, and all others wait for it: 32 hosts
    of H100s gather 2 GB at about 200 GB/s, where NCCL's formula says 360.
    All-reduces are left with NCCL's formula, which their published curves follow.
    """
    start_s, _, far_s = (seconds[protocol] for seconds in _RING)
    return start_s + (spread.size - 1) * spread.step_s(far_s) + bytes_moved / spread.rate(protocol)


def _racks_s(kind: str, bytes_moved: float, spread: Spread) -> float:
    """Return the seconds of a ring through racks that NVLink joins inside."""
    steps = (2 if kind == "all-reduce" else 1) * (spread.size - 1)
    share = _MANY_RACKS_SHARE if spread.domains > 2 else 1.0
    rate = min(share * spread.nvlink_bytes_per_s, spread.here * spread.nic_bytes_per_s)
    return _RING[0][2] + steps * _RACK_STEP_S + bytes_moved / rate


def _ring_s(protocol: int, bytes_moved: float, spread: Spread, *, kind: str) -> float:
    """Return the seconds that NCCL expects of a ring."""
    start_s, near_s, far_s = (seconds[protocol] for seconds in _RING)
    reduces = kind == "all-reduce"
    steps = (2 if reduces else 1) * (spread.size - 1)
    across = 2 * spread.domains if reduces else spread.domains - 1
    latency_s = start_s + max(steps - across, 0) * near_s + across * spread.step_s(far_s)
    if reduces and protocol == 2:
        latency_s *= _PLATEAU
    return latency_s + bytes_moved / spread.rate(protocol)


def _tree_s(protocol: int, bytes_moved: float, spread: Spread) -> float:
    start_s, near_s, far_s = (seconds[protocol] for seconds in _TREE)
    depth_s = (spread.here - 1) * near_s + math.log2(spread.domains) * spread.step_s(far_s)
    summed_bytes = bytes_moved * spread.size / (2 * (spread.size - 1))
    reaches, at = _TREE_REACHES[protocol], int(math.log2(max(summed_bytes / 64, 1)))
    part = _TREE_EFFICIENCY * (reaches[at] if at < len(reaches) else 1.0)
    return start_s + 2 * depth_s + bytes_moved / (spread.rate(protocol) * part)


def _exchange_s(bytes_moved: float, spread: Spread) -> float:
    """An all-to-all: to each peer directly, to near and far ones at once.

    NCCL's tuning model has none. Latency: peers are served eight at a time (an assumption, from
    the eight sends and receives that a block of NCCL's kernel takes).
    """
    far = (spread.size - spread.here) / (spread.size - 1)
    rounds = math.ceil((spread.size - spread.here) / 8)
    latency_s = spread.network.latency_s + (rounds - 1) * spread.step_s(_RING[2][0])
    near_s = bytes_moved * (1 - far) / spread.nvlink_bytes_per_s
    return latency_s + max(near_s, bytes_moved * far / spread.nic_bytes_per_s)


def network_permute_s(bytes_moved: float, network: Link) -> float:
    """A permute over the network: the link's latency, then bytes at its rate.

    It follows the P2P model of aiconfigurator-core (10 µs + bytes / 50 GB/s at 400 Gb/s), with the
    latency of the cluster's own link.
    """
    return network.latency_s + bytes_moved / (network.bandwidth_bytes_per_s * _NETWORK_EFFICIENCY)


# -- channels -------------------------------------------------------------------------------------

_CHANNEL_BYTES = THREADS * _BYTES_A_THREAD  # what Simple wants for a channel
_CHANNELS_A_NIC = 4  # as NCCL logs for hosts of few GPUs (NVIDIA/nccl issue 1189)
_P2P_CHANNELS = 32  # as NCCL logs on HGX hosts: "24 coll channels, ..., 32 p2p channels"
_PART_BYTES = 16 * 1024 * 1024  # the most of a permute on one channel while others are free
_P2P_LL_BYTES = 512 * 1024  # up to here a permute goes by LL, in the measured rows


def ring_channels(bytes_moved: float, size: int, domains: int, most: int) -> int:
    """Channels of a collective: `most`, unless it is small or has few NICs.

    Source: NCCL's `threadThresholds` (64 bytes a thread for Simple, 512 threads a channel).
    """
    if domains > 1:
        most = min(most, _CHANNELS_A_NIC * -(-size // domains))
    return max(1, min(most, math.ceil(bytes_moved / _CHANNEL_BYTES)))


def permute_channels(bytes_moved: float, communicator: int) -> int:
    """Channels of one send and receive inside an NVLink domain.

    Source: addP2pToPlan in NCCL's src/enqueue.cc: an equal part of the p2p channels for each
    device of the communicator, doubled while more than 16 MiB are left for each. XLA's measurements
    on 8, 64 and 72 GPUs show the same steps.
    """
    count = max(1, _P2P_CHANNELS // communicator)
    while bytes_moved / count > _PART_BYTES and count <= _P2P_CHANNELS // 2:
        count *= 2
    return count


def permute_rate(bytes_moved: float, channels: int, channel_bytes_per_s: float) -> float:
    """Bytes per second of a permute's channels: LL has a quarter of Simple's rate."""
    ll = 4 if bytes_moved <= _P2P_LL_BYTES else 1
    return channels * channel_bytes_per_s / ll


NETWORK_PERMUTE_CHANNELS = 2  # for a peer over the network: NCCL_NCHANNELS_PER_NET_PEER
