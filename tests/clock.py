"""A cost model of round numbers, so that times in tests can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap.cluster import Cluster, parse_cluster
from jaxoverlap.cost import ALONE, Group, Share


@dataclass(frozen=True)
class Clock:
    """A matmul of 1024 cubed, 2 MB of memory, a megabyte over NVLink: one second each.

    A byte over the network takes four times as long. Beside a collective matmuls run at
    1 / (1 + sms), what is bound by memory at 1 / (1 + memory_bytes_per_s).
    """

    cluster: Cluster
    sms: float = 0.0
    memory: float = 0.0
    speedup: float = 1.0  # of the links

    def matmul_s(self, m, n, k, *, batch=1, dtype="bf16", beside=ALONE):
        if dtype == "f64":
            raise ValueError("no matmuls of f64 were measured")
        return batch * m * n * k / 1024**3 * (1 + beside.sms)

    def memory_s(self, num_bytes, *, beside=ALONE):
        return num_bytes / 2e6 * (1 + beside.memory_bytes_per_s)

    def collective_s(self, kind, bytes_moved, group: Group):
        return bytes_moved / 1e6 * (4 if group.domains > 1 else 1) / self.speedup

    def share(self, kind, bytes_moved, group: Group):
        return Share(self.sms, self.memory)


def clock(cluster: str = "h100-sxm:2x8", **more) -> Clock:
    return Clock(parse_cluster(cluster), **more)
