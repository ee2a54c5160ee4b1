"""Compare published recipes with what `configure` chooses.

`python -m benchmarks.accuracy --regret` prints the table. A recipe's regret is by how much the form
says that it is slower than the first choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jaxoverlap
from jaxoverlap._util.text import table
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.parallelism.configuration import Configuration
from jaxoverlap.parallelism.iteration_time import IterationTime
from jaxoverlap.parallelism.memory import Memory, peak
from jaxoverlap.parallelism.published.models import named_model
from jaxoverlap.parallelism.recompute import saved_by
from jaxoverlap.parallelism.search import (
    Scored,
    best_placement,
    interleavings,
    memory_budget,
    menu,
    values_of,
)
from jaxoverlap.parallelism.stack import JAX_LHS, MAXTEXT, MEGATRON_CORE, STACKS, TORCH, Stack

_DGXC = "NVIDIA/dgxc-benchmarking"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md"


@dataclass(frozen=True)
class Asked:
    """A published run, asked again with the configuration left open.

    Attributes:
        model, sequence, cluster, global_batch, stack, dtype: what is asked.
        recipe: how it was run.
        measured_s: its seconds.
        source: where it was published.
    """

    model: str
    sequence: int
    cluster: str
    global_batch: int
    stack: Stack
    dtype: str
    recipe: Configuration
    measured_s: float
    source: str

    def answer(self) -> Answered:
        """Search the configurations, and estimate the recipe."""
        model, cluster = (
            named_model(self.model, sequence=self.sequence),
            parse_cluster(self.cluster),
        )
        stack = replace(self.stack, matmul_dtype=self.dtype)
        found = jaxoverlap.configure(
            model, cluster, global_batch=self.global_batch, stack=self.stack, dtype=self.dtype
        )
        times = IterationTime(model, cost_model(cluster), stack, global_batch=self.global_batch)
        needs = peak(model, self.recipe, stack, self.global_batch)
        scored = best_placement(self.recipe, cluster, times, needs)
        return Answered(self, found[0], scored, found.found.search_s)

    def outside(self, needs: Memory) -> str:
        """Say why a search never takes the recipe; "" if it is in the space."""
        model, recipe = named_model(self.model, sequence=self.sequence), self.recipe
        stack = replace(self.stack, matmul_dtype=self.dtype)
        values = values_of(model)
        kept = {saved_by(choice) & values for choice in menu(stack, model)}
        for outside, why in (
            (recipe.illegal(model, self.global_batch, stack), ""),
            (recipe.offload, "layers are offloaded"),
            (recipe.interleave not in interleavings(model, recipe.pipeline), "interleaving"),
            (saved_by(recipe.recompute) & values not in kept, "its recompute"),
            (needs.total > memory_budget(parse_cluster(self.cluster), stack), "memory"),
        ):
            if outside:
                return why or str(outside)
        return ""


@dataclass(frozen=True)
class Answered:
    """A question, the first choice, and the recipe in its best placement."""

    question: Asked
    first: Scored
    recipe: Scored
    search_s: float

    @property
    def regret(self) -> float:
        """Estimated seconds of the recipe over those of the first choice, less one."""
        return self.recipe.step_s / self.first.step_s - 1


def _megatron(
    *, data: int = 1, model: int = 1, pipeline: int = 1, expert: int = 1, context: int = 1,
    micro_batch: int = 1, interleave: int = 1,
) -> Configuration:  # fmt: skip
    return Configuration(
        data=data, model=model, pipeline=pipeline, expert=expert, context=context,
        micro_batch=micro_batch, interleave=interleave, recompute="none", zero_stage=1,
        sequence_parallel=model > 1,
    )  # fmt: skip


_2026 = STACKS["megatron-core-2026"]
QUESTIONS = (
    Asked(
        "llama2-70b", 4096, "h100-sxm:8x8", 128, MAXTEXT, "bf16",
        Configuration(fsdp=64, micro_batch=2, recompute="save_dot_except_mlpwi"), 6.999,
        f"{_DGXC}, maxtext/README_70b.md",
    ),
    Asked(
        "llama2-70b", 4096, "h100-sxm:8x8", 128, MAXTEXT, "fp8",
        Configuration(fsdp=64, micro_batch=2, recompute="save_dot_except_mlp"), 4.324,
        f"{_DGXC}, maxtext/README_70b.md",
    ),
    Asked(
        "llama3-70b", 8192, "h100-sxm:16x8", 256, MAXTEXT, "bf16",
        Configuration(fsdp=128, micro_batch=2, recompute="save_qkv_proj"), 15.563,
        f"{_DGXC}, maxtext/README_70b.md",
    ),
    Asked(
        "llama2-7b", 4096, "h100-sxm:32x8@1600", 1024, MAXTEXT, "bf16",
        Configuration(data=32, fsdp=8, micro_batch=4, recompute="minimal_flash"), 1.5,
        "AI-Hypercomputer/gpu-recipes, a3-mega, llama-2-7b",
    ),
    Asked(
        "llama2-7b", 4096, "h100-sxm:32x8@efa", 1024, JAX_LHS, "bf16",
        Configuration(data=32, fsdp=8, micro_batch=4, recompute="save_attention"), 1.78,
        "apple/axlearn, experiments/text/gpt/fuji.py",
    ),
    Asked(
        "llama3-8b", 8192, "h100-sxm-500w:1x8", 16, TORCH, "bf16",
        Configuration(fsdp=8, micro_batch=2, recompute="selective_op"), 2.4575,
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    ),
    Asked(
        "llama3-8b", 8192, "h100-sxm:1x8", 128, MEGATRON_CORE, "bf16",
        _megatron(data=4, context=2), 12.78, f"{_DGXC}, llama3.1/README_8b.md",
    ),
    Asked(
        "llama3-70b", 8192, "h100-sxm:8x8", 256, MEGATRON_CORE, "fp8",
        _megatron(pipeline=8, data=2, model=4, interleave=5), 19.692, _BRIDGE,
    ),
    Asked(
        "llama3-70b", 8192, "gb200:16x4", 256, MEGATRON_CORE, "mxfp8",
        _megatron(pipeline=4, data=8, model=2, interleave=5), 8.54, _BRIDGE,
    ),
    Asked(
        "llama3-405b", 8192, "gb200:64x4", 1536, MEGATRON_CORE, "fp8",
        _megatron(pipeline=16, data=4, model=4, interleave=4), 58.306, _BRIDGE,
    ),
    Asked(
        "llama3-405b", 8192, "gb300:64x4", 1536, MEGATRON_CORE, "fp8",
        _megatron(pipeline=8, data=8, model=4, interleave=4), 46.901, _BRIDGE,
    ),
    Asked(
        "qwen3-30b-a3b", 4096, "h100-sxm:2x8", 1024, MEGATRON_CORE, "bf16",
        _megatron(expert=16), 24.714, "NVIDIA-NeMo/Megatron-Bridge, skills, moe-comm-overlap",
    ),
    Asked(
        "qwen3-235b-a22b", 4096, "gb300:64x4", 8192, _2026, "mxfp8",
        _megatron(pipeline=4, data=2, expert=32, micro_batch=2, interleave=12), 14.539, _BRIDGE,
    ),
)  # fmt: skip


def answers() -> Iterator[Answered]:
    """Yield the answer of each question."""
    return (question.answer() for question in QUESTIONS)


def by_question() -> str:
    """Tabulate the recipes and the first choices."""
    rows = []
    for answer in answers():
        asked, first, recipe = answer.question, answer.first, answer.recipe
        rows.append(
            (
                f"{asked.model}, {asked.cluster}, {asked.dtype}, {asked.stack.name}",
                str(recipe.configuration),
                f"{asked.measured_s:.3f}",
                f"{recipe.step_s:.3f}",
                f"{answer.regret:+.1%}",
                first.shown,
                f"{first.step_s:.3f}",
                asked.outside(recipe.memory),
                f"{answer.search_s:.1f}",
            )
        )
    right = ("published s", "by the form", "regret", "s", "search s")
    columns = ("asked", "recipe", *right[:3], "first choice", "s", "not in the space for", right[4])
    title = "Published recipes, and what is chosen without them"
    return table(title, columns, rows, right=right, width=250)
