"""The wires that join processes on one GPU, as settings of NCCL.

Copies inside the GPU take NCCL 2.30.3 or later, which lets several ranks share one
(NCCL_MULTI_RANK_GPU_ENABLE); their rate grows with the CTAs that NCCL may use. Where NCCL is told
that each process is on a host of its own (NCCL_HOSTID), it sends over sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALL = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "VERSION"}
_COPIES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class Wire:
    """How processes on one GPU reach each other.

    Attributes:
        name: of the wire.
        ctas: that NCCL may use for each collective; 0: as many as it likes.
        per_host: processes that NCCL takes to be on one host; 0: all.
        dtype: of the raced steps: a slow wire takes slow matmuls to be balanced.
    """

    name: str
    ctas: int = 0
    per_host: int = 0
    dtype: str = "bfloat16"

    def environment(self, rank: int, count: int) -> dict[str, str]:
        """Return NCCL's variables of a process, of so many, and its share of the GPU's memory."""
        variables = _ALL | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / count:.3f}"}
        if self.per_host != 1:
            variables |= _COPIES
        if self.per_host:
            variables |= _SOCKETS | {"NCCL_HOSTID": f"host{rank // self.per_host}"}
        if self.ctas:
            variables |= {"NCCL_MAX_CTAS": str(self.ctas)}
        return variables

    def hosts(self, count: int) -> int:
        """Return how many hosts are told apart: two links, if some processes share a host."""
        return count // self.per_host if self.per_host > 1 else 1


WIRES = {
    wire.name: wire
    for wire in (
        Wire("copies, 2 CTAs", ctas=2),
        Wire("sockets", per_host=1, dtype="float32"),
        Wire("copies, 1 CTA", ctas=1),
        Wire("copies, 4 CTAs", ctas=4),
        Wire("copies in pairs, sockets between", ctas=2, per_host=2, dtype="float32"),
    )
}
