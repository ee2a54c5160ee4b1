"""The questions: a model, a cluster and a global batch; mesh and recomputation are to be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from benchmarks.questions.model import Model
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.plan.table import mesh_text

STATE_BYTES = 12  # of a weight: a float32 master and Adam's two moments


class Measured(NamedTuple):
    """A figure that others measured of nearly the same question, without the library.

    Attributes:
        tokens: a second and GPU.
        what: where it differs from the question.
        source: where it is published.
    """

    tokens: float
    what: str
    source: str


@dataclass(frozen=True)
class Question:
    """A model, a cluster, and the meshes that are tried.

    Attributes:
        pod: the cluster, as `jaxoverlap.parse_cluster` takes it.
        model: with its batch.
        second: the axis within a sequence or of experts: "tp", "context" or "expert".
        within: its sizes that are tried.
        replicas: whether meshes that replicate the weights over groups of hosts are tried (HSDP).
        explicit: whether the mesh's axes are explicit.
    """

    pod: str
    model: Model
    second: str = "tp"
    within: tuple[int, ...] = (1, 2, 4, 8)
    replicas: bool = False
    explicit: bool = False

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(self.pod)

    @property
    def meshes(self) -> dict[str, dict[str, int]]:
        """The meshes by name: those that divide the batch, and hold the weights' state."""
        return {mesh_text(axes): axes for axes in self._meshes() if self._fits(axes)}

    def _meshes(self) -> Iterator[dict[str, int]]:
        gpus = self.cluster.num_devices
        for n in self.within:
            yield {"fsdp": gpus // n} | ({self.second: n} if n > 1 else {})
        for shards in (self.cluster.gpus_per_nvlink_domain, 64) if self.replicas else ():
            if shards < gpus:
                yield {"replica": gpus // shards, "fsdp": shards}

    def _fits(self, axes: Mapping[str, int]) -> bool:
        batch = prod(n for name, n in axes.items() if name in ("replica", "fsdp", "expert"))
        state = (
            STATE_BYTES * self.model.weights / prod(n for a, n in axes.items() if a != "replica")
        )
        micro = self.model.batch // self.model.micro_batches
        return micro % batch == 0 and state < self.cluster.chip.memory_bytes / 2


# Llama 3's shapes (arXiv:2407.21783, table 3). 4M tokens are 512 sequences of 8192.
_8B = Model(32, 4096, 32, 14336, 128256, batch=64, sequence=8192, kv_heads=8)
_70B = Model(80, 8192, 64, 28672, 128256, batch=64, sequence=8192, kv_heads=8)
_4M = replace(_70B, batch=512)
_FP8 = replace(_70B, fp8=True)
# Qwen3-30B-A3B (arXiv:2505.09388): 128 experts of 768, of which a token has 8.
_QWEN = Model(
    48,
    2048,
    32,
    768,
    151936,
    batch=128,
    sequence=4096,
    kv_heads=4,
    size=128,
    experts=128,
    choices=8,
)
# ViT-22B (arXiv:2302.05442) on images of 224 in patches of 14.
_VIT = Model(48, 6144, 48, 24576, 1000, batch=512, sequence=256, gated=False, pixels=588)

QUESTIONS: Mapping[str, Question] = {
    "8B, 64 H100, 64 texts": Question("h100-sxm:8x8", _8B, replicas=True),
    "8B, 512 H100, 512 texts": Question("h100-sxm:64x8", replace(_8B, batch=512), replicas=True),
    "8B, 64 A100, 64 texts, explicit mesh": Question(
        "a100-sxm-80:8x8", _8B, replicas=True, explicit=True
    ),
    "70B, 64 H100, 64 texts": Question("h100-sxm:8x8", _70B),
    "70B, 512 H100, 4M tokens": Question("h100-sxm:64x8", _4M, replicas=True),
    "70B, 1024 H100, 4M tokens, a process a GPU": Question(
        "h100-sxm:128x8/8", _4M, within=(2, 4, 8)
    ),
    "70B, 512 GB200, 4M tokens": Question("gb200:128x4", _4M, replicas=True),
    "70B in fp8, 64 H100, 64 texts": Question("h100-sxm:8x8", _FP8),
    "70B in fp8, 256 H100, 256 texts": Question("h100-sxm:32x8", replace(_FP8, batch=256)),
    "Qwen3-30B-A3B, 64 H100, 128 texts": Question("h100-sxm:8x8", _QWEN, "expert", (4, 8, 16)),
    "8B, texts of 32768, 64 H100, 16 texts": Question(
        "h100-sxm:8x8", replace(_8B, batch=16, sequence=32768), "context", (4, 8)
    ),
    "ViT-22B, 64 A100, 512 images": Question("a100-sxm-80:8x8", _VIT),
    "8B, 8 micro-batches, 32 A100 at 100 Gbit/s": Question(
        "a100-sxm-80:4x8@100",
        replace(_8B, batch=256, micro_batches=8),
        within=(1, 8),
        replicas=True,
    ),
}

# Each question's meshes, as in "8B, 64 H100, 64 texts | fsdp 64".
STEPS = {f"{name} | {mesh}": (name, mesh) for name, one in QUESTIONS.items() for mesh in one.meshes}

_NEMO = "NVIDIA/dgxc-benchmarking v25.02, llama3.1/README_8b.md"
_MAXTEXT = "NVIDIA/dgxc-benchmarking v24.11.1, maxtext/README_70b.md"
_LLAMA2 = "MaxText, Llama 2 70B, texts of 4096"
MEASURED: Mapping[str, Measured] = {
    "8B, 64 H100, 64 texts": Measured(10082.5, "NeMo, 16 times the batch", _NEMO),
    "70B, 64 H100, 64 texts": Measured(1170.5, _LLAMA2, _MAXTEXT),
    "70B, 512 H100, 4M tokens": Measured(1155.3, _LLAMA2, _MAXTEXT),
    "70B, 1024 H100, 4M tokens, a process a GPU": Measured(
        1156.4, f"{_LLAMA2}, twice the tokens", _MAXTEXT
    ),
    "70B in fp8, 64 H100, 64 texts": Measured(1894.5, _LLAMA2, _MAXTEXT),
    "70B in fp8, 256 H100, 256 texts": Measured(1651.9, _LLAMA2, _MAXTEXT),
}
