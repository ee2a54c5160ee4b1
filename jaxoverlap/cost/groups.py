"""Describe the devices of a collective, and what it takes from the kernels beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.hardware.topology import axis_domains, axis_processes


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
    """The resources that running collectives take from compute beside them: Lagom's two terms.

    Attributes:
        sms: streaming multiprocessors.
        memory_bytes_per_s: bandwidth of the device memory.
    """

    sms: float = 0.0
    memory_bytes_per_s: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.sms + other.sms, self.memory_bytes_per_s + other.memory_bytes_per_s)


ALONE = Share()


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
