"""A cost model of round numbers, so that times in tests can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

from jaxoverlap.cost.groups import ALONE, Group, Share
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster, parse_cluster


@dataclass(frozen=True)
class Clock:
    """A cost model: a 1024-cubed matmul, 2 MB of memory or a megabyte over NVLink take one second.

    A million transcendentals take a second, and so do a million attention scores. With `skew`, a
    collective first waits for that part of the time computed before it. A byte over the network
    takes four times as long. Beside a collective, matmuls run at a speed of 1 / (1 + sms) and
    memory-bound kernels at 1 / (1 + memory_bytes_per_s).
    """

    on_cpus = False

    cluster: Cluster
    sms: float = 0.0
    memory: float = 0.0
    speedup: float = 1.0  # of the links
    skew: float = 0.0

    def matmul_s(self, m, n, k, *, batch=1, dtype="bf16", beside=ALONE):
        if dtype == "f64":
            raise ValueError("no matmuls of f64 were measured")
        return batch * m * n * k / 1024**3 * (1 + beside.sms)

    def memory_s(self, num_bytes, *, transcendentals=0, transposed_bytes=0, beside=ALONE):
        return num_bytes / 2e6 * (1 + beside.memory_bytes_per_s) + transcendentals / 1e6

    def attention_s(
        self, queries, keys, heads, head_size, *, causal, backward, dtype="bf16", beside=ALONE
    ):
        if dtype == "f8e4m3fn":
            raise ValueError("no attention of float8 was measured")
        scores = heads * queries * keys / 1e6 * (0.5 if causal else 1.0)
        return scores * (2.5 if backward else 1.0) * (1 + beside.sms)

    kernel_s = CostModel.kernel_s
    known = CostModel.known

    def skew_s(self, computed_s, kind, group: Group):
        return self.skew * computed_s

    def collective_s(self, kind, bytes_moved, group: Group):
        return bytes_moved / 1e6 * (4 if group.domains > 1 else 1) / self.speedup

    def share(self, kind, bytes_moved, group: Group):
        return Share(self.sms, self.memory)


def clock(cluster: str = "h100-sxm:2x8", **more) -> Clock:
    return Clock(parse_cluster(cluster), **more)
