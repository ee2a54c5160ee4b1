"""How long NCCL takes over a network, and how many channels it runs on: arithmetic, no tables.

The measured tables end at one NVLink domain. Beyond it stands the model by which NCCL itself picks
algorithm and protocol (NVIDIA/nccl, src/graph/tuning.cc of 2.18.3): latency + bytes / bandwidth,
the least over ring and tree and the three protocols. It is a model and no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxoverlap.cluster import Link

# Seconds of (LL, LL128, Simple): to start, per step over NVLink, per step over the network.
_RING = ((6.6e-6, 14.0e-6, 8.4e-6), (0.6e-6, 1.9e-6, 3.4e-6), (2.7e-6, 4.0e-6, 14.0e-6))
_TREE = ((6.8e-6, 14.0e-6, 0.0), (0.6e-6, 1.25e-6, 4.0e-6), (5.0e-6, 8.5e-6, 14.0e-6))
_LL_BYTES_PER_S = {1: 87.7e9, 2: 22.5e9}  # all channels together, by domains; more: 19 GB/s
_LL128_EFFICIENCY = _TREE_EFFICIENCY = 0.92
_CHANNEL_BYTES_PER_S = {"Ampere": 20e9, "Hopper": 36.7e9}  # perChMaxRingLL128Bws
_STEP_SIMPLE_S = _RING[2][2]  # what the other protocols' network steps are scaled by

# Of a NIC's rate, what NCCL's search for channels settles at: 48 of a 400 Gb/s NIC's 50 GB/s
# (src/graph/search.cc, sm90SpeedArrayInter).
_NETWORK_EFFICIENCY = 0.96
_BASE_S = _RING[0][2]  # what a Link's latency has besides the step


@dataclass(frozen=True)
class Channels:
    """How many resources a collective is given: Lagom's NC and C.

    Attributes:
        count: channels; each is a thread block with an SM to itself.
        chunk_bytes: that a channel sends before it waits for its neighbour.
    """

    count: int
    chunk_bytes: int = 512 * 1024  # NCCL: a buffer of 4 MiB in 8 steps

    def __post_init__(self) -> None:
        if self.count < 1 or self.chunk_bytes < 1:
            raise ValueError(f"{self}: give at least one channel and one byte")

    def bytes_per_s(self, compute_capability: tuple[int, int]) -> float:
        """What they can send together: each a chunk, then a step over NVLink to be told to go on.

        A channel's own rate is that of NCCL's tuning model (ring, LL128). The term for chunks is a
        reconstruction: Lagom says that the rate rises with C, and gives no formula.
        """
        channel = _CHANNEL_BYTES_PER_S["Hopper" if compute_capability >= (9, 0) else "Ampere"]
        return self.count * self.chunk_bytes / (self.chunk_bytes / channel + _RING[1][0])


def collective_s(
    kind: str,
    bytes_moved: float,
    size: int,
    domains: int,
    rate_bytes_per_s: float,
    network: Link,
) -> float:
    """Seconds of a collective whose devices spread evenly over several NVLink domains.

    Each GPU has a NIC of its own (rails), so a ring crosses from domain to domain on as many NICs
    as the group has devices in each.

    Args:
        bytes_moved: what each device sends, by a ring.
        size: devices that take part together.
        domains: NVLink domains that they spread over; two or more.
        rate_bytes_per_s: what each device can send over NVLink, as measured.
        network: the link between domains.
    """
    here = -(-size // domains)  # devices in a domain
    nic = network.bandwidth_bytes_per_s * _NETWORK_EFFICIENCY
    if kind == "all-to-all":
        return _exchange_s(bytes_moved, size, here, rate_bytes_per_s, nic, network)
    bandwidth = min(rate_bytes_per_s, here * nic)
    reduces = kind == "all-reduce"
    steps = (2 if reduces else 1) * (size - 1)
    across = 2 * domains if reduces else domains - 1
    found = [
        _RING[0][p]
        + (steps - across) * _RING[1][p]
        + across * _network_step_s(_RING[2][p], network)
        + bytes_moved / _protocol_rate(p, bandwidth, domains, reduces)
        for p in range(3)
    ]
    if reduces:  # NCCL has trees for nothing else
        found += [
            _TREE[0][p]
            + 2 * (here - 1) * _TREE[1][p]
            + 2 * math.log2(domains) * _network_step_s(_TREE[2][p], network)
            + bytes_moved / (_protocol_rate(p, bandwidth, domains, reduces) * _TREE_EFFICIENCY)
            for p in range(3)
        ]
    return min(found)


def _protocol_rate(protocol: int, bandwidth: float, domains: int, reduces: bool) -> float:
    """Bytes per second of LL (0), LL128 (1) or Simple (2)."""
    if protocol == 0:
        return min(_LL_BYTES_PER_S.get(domains, 19e9), bandwidth / (4 if reduces else 3))
    return bandwidth * (_LL128_EFFICIENCY if protocol == 1 else 1.0)


def _network_step_s(nccl_s: float, network: Link) -> float:
    """NCCL's seconds of a step over the network, for a network with another latency."""
    return nccl_s * max(network.latency_s - _BASE_S, 0.0) / _STEP_SIMPLE_S


def _exchange_s(
    bytes_moved: float, size: int, here: int, rate: float, nic: float, network: Link
) -> float:
    """An all-to-all: to each peer directly, to near and far ones at once.

    NCCL's tuning model has none. Latency: peers are served eight at a time (an assumption, from
    NCCL's eight works of a send/recv kernel's block).
    """
    far = (size - here) / max(size - 1, 1)
    rounds = math.ceil((size - here) / 8)
    steps_s = (rounds - 1) * _network_step_s(_RING[2][0], network)
    return (
        network.latency_s + steps_s + max(bytes_moved * (1 - far) / rate, bytes_moved * far / nic)
    )


def network_permute_s(bytes_moved: float, network: Link) -> float:
    """A permute over the network: the link's latency, then bytes at its rate.

    As the P2P model of aiconfigurator-core (10 µs + bytes / 50 GB/s at 400 Gb/s), with the
    latency of the cluster's own link.
    """
    return network.latency_s + bytes_moved / (network.bandwidth_bytes_per_s * _NETWORK_EFFICIENCY)


# -- channels -------------------------------------------------------------------------------------

_CHANNEL_BYTES = 512 * 64  # threads of a block, and the bytes that Simple wants for each
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
    device of the communicator, doubled while more than 16 MiB are left for each. The rows that XLA
    measured on 8, 64 and 72 GPUs show the same steps.
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
