"""Give the seconds of kernels and collectives: by the chip's tables, or by its facts alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from jaxoverlap.cost.find import cost_model, has_cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.kernels import AttentionKernel, MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.parallelism.work import Work
from jaxoverlap.plan.collectives import PERMUTE


class Rates(Protocol):
    """The seconds of one device's kernels, and of collectives."""

    def matmul_s(self, kernel: MatmulKernel) -> float:
        """Return the seconds of a matmul."""
        ...

    def attention_s(self, kernel: AttentionKernel) -> float:
        """Return the seconds of a kernel of fused attention."""
        ...

    def memory_s(self, num_bytes: float, kernels: int) -> float:
        """Return the seconds of kernels that read and write so many bytes in all."""
        ...

    def collective_s(self, kind: str, sent_bytes: float, group: Group) -> float:
        """Return the seconds of a collective; `sent_bytes` is what each device sends by a ring."""
        ...


def work_s(rates: Rates, work: Work) -> float:
    """Return the seconds of a part's kernels, one after the other."""
    matmuls_s = sum(rates.matmul_s(m) for m in work.matmuls)
    attention_s = sum(rates.attention_s(a) for a in work.attention)
    return matmuls_s + attention_s + rates.memory_s(work.memory_bytes, work.kernels)


class Tabled:
    """Seconds by the cost model: measured tables within a host, NCCL's model beyond."""

    def __init__(self, model: CostModel):
        self._model = model
        self._matmul_s = functools.cache(self._matmul_uncached)
        self._collective_s = functools.cache(model.collective_s)

    def _matmul_uncached(self, kernel: MatmulKernel) -> float:
        return self._model.matmul_s(
            kernel.m, kernel.n, kernel.k, batch=kernel.batch, dtype=kernel.dtype
        )

    def matmul_s(self, kernel: MatmulKernel) -> float:
        """Return a matmul's measured seconds."""
        return self._matmul_s(kernel)

    def attention_s(self, kernel: AttentionKernel) -> float:
        """Return attention's measured seconds; where none were measured, by its operations.

        A chip without rows gets the rate of a square matmul of 4096, halved: FlashAttention-2
        reaches 0.5 to 0.7 of that on A100s (Dao 2023, figure 4).
        """
        if self._model.tables.attention is not None:
            return self._model.attention_s(**vars(kernel))
        square = MatmulKernel(4096, 4096, 4096)
        return 2 * kernel.flops / square.flops * self.matmul_s(square)

    def memory_s(self, num_bytes: float, kernels: int) -> float:
        """Return seconds at the memory's measured rate, and a launch for each kernel."""
        memory = self._model.tables.memory
        return kernels * memory.launch_s + num_bytes / memory.bytes_per_s

    def collective_s(self, kind: str, sent_bytes: float, group: Group) -> float:
        """Return the cost model's seconds."""
        if group.size == 1 or not sent_bytes:
            return 0.0
        return self._collective_s(kind, int(sent_bytes), group)


@dataclass(frozen=True)
class Analytic:
    """Seconds by a chip's facts: peaks, links, and one share of the peak for matmuls.

    Attributes:
        cluster: chip and links.
        matmul_share: matmuls' operations per second, over the chip's peak.
        memory_share: bytes per second of the memory, over its peak.
        link_share: bytes per second of a link, over its peak.
    """

    cluster: Cluster
    matmul_share: float
    memory_share: float = 0.8
    link_share: float = 0.8

    def matmul_s(self, kernel: MatmulKernel) -> float:
        """Return seconds by operations or by bytes, whichever takes longer."""
        chip = self.cluster.chip
        bytes_s = kernel.memory_bytes / (self.memory_share * chip.memory_bandwidth_bytes_per_s)
        return max(kernel.flops / (self.matmul_share * chip.bf16_flops_per_s), bytes_s)

    def attention_s(self, kernel: AttentionKernel) -> float:
        """Return seconds by operations."""
        return kernel.flops / (self.matmul_share * self.cluster.chip.bf16_flops_per_s)

    def memory_s(self, num_bytes: float, kernels: int) -> float:
        """Return seconds by bytes."""
        rate = self.memory_share * self.cluster.chip.memory_bandwidth_bytes_per_s
        return num_bytes / rate

    def collective_s(self, kind: str, sent_bytes: float, group: Group) -> float:
        """Return a ring's seconds: hops at the links' latency, bytes at the slowest link's rate.

        Across hosts a ring crosses on the NICs of all its devices on a host.
        """
        if group.size == 1 or not sent_bytes:
            return 0.0
        near, far = self.cluster.nvlink, self.cluster.network
        here = -(-group.size // group.domains)
        rate, latency_s = near.bandwidth_bytes_per_s, near.latency_s
        if group.domains > 1:
            rate, latency_s = min(rate, here * far.bandwidth_bytes_per_s), far.latency_s
        hops = 1 if kind == PERMUTE else group.size - 1
        return hops * latency_s + sent_bytes / (self.link_share * rate)


def rates_of(cluster: Cluster) -> Rates:
    """The rates of a cluster: by tables where the package has some, else by facts.

    Without tables matmuls are counted at 0.5 of the peak: an assumption, which a measured step
    should replace (`Analytic(cluster, matmul_share=...)`).
    """
    if has_cost_model(cluster):
        return Tabled(cost_model(cluster))
    return Analytic(cluster, matmul_share=0.5)
