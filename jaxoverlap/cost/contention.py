"""Price kernels that run while collectives do.

A collective takes SMs and memory bandwidth from kernels beside it (`groups.Share`). A simulation
asks `CostModel.kernel_s(kernel, beside=share)` for a kernel's seconds while a share is taken;
`together_s` is the closed form for one kernel and one collective that start together.
"""

from __future__ import annotations

from jaxoverlap.cost.groups import Share
from jaxoverlap.hardware.cluster import Chip

NVLINK, NETWORK = "NVLink", "network"  # the links that collectives wait for each other on


# SMs that a collective must take for its traffic to be in a kernel's way as much as it can be: what
# NCCL takes for a large collective. Copy engines take none, and TE's userbuffers one.
_CROWDING_SMS = 16


def compute_factor(waves: float, beside: Share, chip: Chip) -> float:
    """Return how many times longer the work of a kernel bound by its SMs takes beside a collective.

    It needs more waves on the SMs that are left (FlashOverlap, arXiv 2504.19519), and each wave
    waits for the memory as often as the collective's SMs have it. The second factor is an
    assumption: it makes an 8192^3 matmul beside an all-gather of 64 MiB a rank on eight H100s
    (pytorch pull 172714: 2.02 ms on SMs, 1.77 by copy engines) 1.94 and 1.71 ms.

    Args:
        waves: waves on the SMs that are left, over those on all SMs.
        beside: what the collectives take.
        chip: whose memory both share.
    """
    crowding = min(beside.sms / _CROWDING_SMS, 1.0)
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
