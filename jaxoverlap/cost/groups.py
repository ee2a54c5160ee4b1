"""Describe the devices of a collective, and what it takes from the kernels that run meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jaxoverlap.hardware.cluster import Chip, Cluster
from jaxoverlap.hardware.topology import axis_domains, axis_processes

NVLINK, NETWORK = "NVLink", "network"  # the links that collectives wait for each other on


@dataclass(frozen=True)
class Group:
    """The devices of a collective, as far as its time depends on them.

    Attributes:
        size: devices that take part together; a permute: 2.
        domains: NVLink domains that they spread over; 1: all traffic stays on NVLink.
        by_copy: whether it is a permute that the GPUs' copy engines carry out, and not NCCL: inside
            one process, with XLA's option for it (`flags/required.py`).
        communicator: for a permute: the size of its communicator; None means an NVLink domain.
    """

    size: int
    domains: int = 1
    by_copy: bool = False
    communicator: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.domains <= self.size:
            raise ValueError(
                f"{self}: give at least one device, and no more NVLink domains than devices"
            )


Sent = tuple[str, int, Group]  # a collective: its kind, the bytes that a device sends, its group


@dataclass(frozen=True)
class Share:
    """The resources that running collectives take from concurrent kernels: Lagom's two terms.

    Attributes:
        sms: streaming multiprocessors.
        memory_bytes_per_s: bandwidth of the device memory.
    """

    sms: float = 0.0
    memory_bytes_per_s: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.sms + other.sms, self.memory_bytes_per_s + other.memory_bytes_per_s)


ALONE = Share()


def legs_of(kind: str, bytes_moved: int, group: Group) -> list[Sent]:
    """Return the collectives as which XLA:GPU carries out one, in order: mostly itself.

    A ragged all-to-all that leaves NVLink is two: all its tokens are gathered across the domains
    (or exchanged there, where they come back), and sent on within each
    (`ragged_all_to_all_multi_host_decomposer.cc`).
    """
    if kind != "ragged-all-to-all" or not 1 < group.domains < group.size:
        return [(kind, bytes_moved, group)]
    domains, within = group.domains, group.size // group.domains
    held = bytes_moved * group.size // (group.size - 1)
    across = "all-gather", held * (domains - 1), Group(domains, domains)
    return [across, ("all-to-all", held * domains * (within - 1) // within, Group(within))]


def pair(group: Group) -> Group:
    """Return the group of a hop along a ring of this group: two devices."""
    return replace(group, size=2, domains=min(group.domains, 2))


def groups_of(mesh: Mesh, cluster: Cluster | None) -> dict[str, Group]:
    """Map each mesh axis to the group of its collectives; permutes in one process are copies."""
    spread, processes = axis_domains(mesh, cluster), axis_processes(mesh, cluster)
    return {
        axis: Group(size, spread[axis], processes[axis] == 1, communicator=size)
        for axis, size in mesh.shape.items()
    }


# -- kernels beside collectives -------------------------------------------------------------------

# SMs that a collective must take for its traffic to be in a kernel's way as much as it can be: what
# NCCL takes for a large collective. Copy engines take none, and TE's userbuffers one.
CROWDING_SMS = 16


def compute_factor(waves: float, beside: Share, chip: Chip) -> float:
    """Return the slowdown of a kernel bound by its SMs while collectives run.

    It needs more waves on the SMs that are left (FlashOverlap, arXiv 2504.19519), and each wave
    waits for the memory as often as the collective's SMs have it. The second factor is an
    assumption: it makes an 8192^3 matmul during an all-gather of 64 MiB a rank on eight H100s
    (pytorch pull 172714: 2.02 ms on SMs, 1.77 by copy engines) 1.94 and 1.71 ms.

    Args:
        waves: waves on the SMs that are left, over those on all SMs.
        beside: what the collectives take.
        chip: whose memory both share.
    """
    crowding = min(beside.sms / CROWDING_SMS, 1.0)
    busy = min(beside.memory_bytes_per_s / chip.memory_bandwidth_bytes_per_s, 1.0)
    return waves * (1.0 + crowding * busy)


def together_s(alone_s: float, beside_s: float, collective_s: float) -> float:
    """Return when a kernel and a collective that start together have both ended.

    Args:
        alone_s: the kernel's seconds with the chip to itself.
        beside_s: its seconds if the collective lasted throughout.
        collective_s: the collective's seconds.
    """
    done = collective_s / beside_s
    return max(beside_s, collective_s) if done >= 1 else collective_s + (1 - done) * alone_s
