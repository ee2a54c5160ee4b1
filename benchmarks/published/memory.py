"""Compare the form's memory with what published runs are known to have used.

torchtitan reports what its allocator reserved, Megatron-Bridge what was allocated at the peak. Of
runs whose memory is not published it is known that they fit: every row of published steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published.steps import Step
from jaxoverlap._util.text import table
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.memory import peak
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.search import memory_budget
from jaxoverlap.parallelism.stack import MAXTEXT, MEGATRON_CORE, TORCH, Stack

_GIB = 2**30
_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, skills/mbridge-perf-memory-tuning"
_DISPATCHER = "NVIDIA-NeMo/Megatron-Bridge, skills/mbridge-perf-moe-dispatcher-selection"


@dataclass(frozen=True)
class Used:
    """A published run and the memory of a GPU that it used.

    Attributes:
        model, sequence: what was trained.
        configuration, stack, global_batch: how.
        used_bytes: at the peak.
        reserved: whether that is what the allocator took from the GPU, not what was allocated.
        source: where it was published.
    """

    model: str
    sequence: int
    configuration: Configuration
    stack: Stack
    global_batch: int
    used_bytes: float
    reserved: bool
    source: str

    @property
    def predicted_bytes(self) -> float:
        """What the form counts, with the allocator's reserve where that was published."""
        model = named_model(self.model, sequence=self.sequence)
        needs = peak(model, self.configuration, self.stack, self.global_batch).total
        return needs * (self.stack.reserve if self.reserved else 1.0)


def _titan(name: str, sequence: int, batch: int, gib: float, **config: Any) -> Used:
    return Used(name, sequence, Configuration(**config), TORCH, batch, gib * _GIB, True, _TITAN)


def _bridge(gigabytes: float, recompute: str = "core_attn", **axes: Any) -> Used:
    split = Configuration(**axes, recompute=recompute, sequence_parallel=True, zero_stage=1)
    fp8 = replace(MEGATRON_CORE, matmul_dtype="fp8")
    return Used("llama3-70b", 4096, split, fp8, 32, gigabytes * 1e9, False, _BRIDGE)


USED = (
    _titan("llama3-8b", 8192, 16, 77.0, fsdp=8, micro_batch=2, recompute="selective_op"),
    _titan("llama3-8b", 8192, 256, 62.0, fsdp=128, micro_batch=2, recompute="selective_op"),
    _titan("llama3-8b", 32768, 8, 83.9, fsdp=8),
    _titan("llama3-70b", 8192, 512, 71.9, fsdp=32, model=8, micro_batch=16, sequence_parallel=True),
    _bridge(58.8, model=4, pipeline=4, interleave=5, data=2),
    _bridge(60.2, model=4, pipeline=4, interleave=10, data=2),
    _bridge(53.2, model=4, pipeline=8, interleave=5),
    _bridge(50.2, model=8, pipeline=4, interleave=5),
    _bridge(55.6, "mlp", model=4, pipeline=4, interleave=5, data=2),
    Used("qwen3-30b-a3b", 4096, Configuration(expert=16, recompute="none", zero_stage=1),
         replace(MEGATRON_CORE, sends_once=False), 1024, 61.351e9, False, _DISPATCHER),
)  # fmt: skip
# MaxText's Llama3-70B ran with a pool of 94% of a GPU (NVIDIA/dgxc-benchmarking,
# maxtext/configure.sh): it needs no more.
FITS = (
    named_model("llama3-70b"),
    Configuration(fsdp=128, micro_batch=2, recompute="save_qkv_proj"),
)


def by_run() -> str:
    """Tabulate the memory of the runs whose memory is published."""
    rows = []
    for run in USED:
        ratio = run.predicted_bytes / run.used_bytes
        rows.append(
            (
                f"{run.stack.name}, {run.model}, {run.sequence}",
                str(run.configuration),
                f"{run.predicted_bytes / 1e9:.1f}",
                f"{run.used_bytes / 1e9:.1f}",
                f"{ratio:.2f}",
            )
        )
    columns = ("run", "configuration", "counted GB", "published GB", "ratio")
    return table("Memory of published runs", columns, rows, right=columns[2:], width=166)


def does_not_fit(steps: Iterable[Step]) -> list[tuple[Step, float]]:
    """Return the steps that ran and that the form's count refuses, with its share of the pool."""
    found = []
    for step in steps:
        cluster = parse_cluster(step.cluster)
        needs = peak(step.model, step.configuration, step.stack, step.global_batch).total
        share = 0.95 * needs / memory_budget(cluster, step.stack)
        if share > 1.0:
            found.append((step, share))
    return found


def maxtexts_share() -> float:
    """Return the share of JAX's largest pool that MaxText's Llama3-70B needs by the count."""
    model, config = FITS
    needs = peak(model, config, MAXTEXT, 256).total
    return needs / (MAXTEXT.most_pool * parse_cluster("h100-sxm:16x8").chip.memory_bytes)
