"""The questions of a user: a model, a cluster and a global batch; the mesh is part of the answer.

*Without* jaxoverlap the answer is the fastest of all meshes that fit, with XLA's defaults and each
published preset. *With* it is the fastest of the meshes, overlapped by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.plain_gpt import Sizes
from benchmarks.pods.suite import DEFAULT, GPT_7B, GPT_70B, PLAIN, PRESET_ROWS, Step
from jaxoverlap.hardware.cluster import parse_cluster

ASKED_ROWS = (PLAIN, *PRESET_ROWS, DEFAULT)
_WITHIN = (1, 2, 4, 8)  # GPUs along the second axis, which stays within a host where one has eight


@dataclass(frozen=True)
class Question:
    """A model, a cluster and a global batch.

    Attributes:
        pod: the cluster, as `jaxoverlap.parse_cluster` takes it.
        batch: sequences, or images, of all GPUs.
        axes: the names of the two axes of a mesh: the batch's, and that within a sequence.
        gpt: sizes of benchmarks/plain_gpt.py's model; None: another model.
        model: a module of models/; changes: to its `pod` configuration.
        within: sizes of the second axis that are tried.
    """

    pod: str
    batch: int
    axes: tuple[str, str] = ("fsdp", "tp")
    gpt: Sizes | None = None
    model: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    within: tuple[int, ...] = _WITHIN

    @property
    def meshes(self) -> list[dict[str, int]]:
        """The meshes whose first axis divides the batch."""
        gpus = parse_cluster(self.pod).num_devices
        first, second = self.axes
        sizes = [(gpus // n, n) for n in self.within]
        return [{first: a, second: n} for a, n in sizes if self.batch % a == 0]

    def step(self, axes: Mapping[str, int]) -> Step:
        """The train step on one of the meshes."""
        gpt = self.gpt and replace(self.gpt, batch=self.batch)
        changes = self.changes if self.gpt else self.changes | {"batch": self.batch}
        return Step(self.pod, dict(axes), gpt, self.model, changes)


# Attention is cuDNN's, as people run it. Llama 3's batch of 4M tokens is 512 sequences of 8192.
_7B, _70B = (replace(sizes, attention="cudnn") for sizes in (GPT_7B, GPT_70B))
_LONG = replace(_70B, sequence=8192)
_DEPTH = {"moe": {"layers": 32}, "vit": {"layers": 48}, "long_context": {"layers": 32}}

QUESTIONS: Mapping[str, Question] = {
    "7B, 64 H100, batch 64": Question("h100-sxm:8x8", 64, gpt=_7B),
    "7B, 512 H100, batch 512": Question("h100-sxm:64x8", 512, gpt=_7B),
    "7B, 64 A100, batch 64": Question("a100-sxm-80:8x8", 64, gpt=_7B),
    "70B, 64 H100, batch 32": Question("h100-sxm:8x8", 32, gpt=_70B),
    "70B, 512 H100, 4M tokens": Question("h100-sxm:64x8", 512, gpt=_LONG),
    "70B, 1024 H100, 4M tokens": Question("h100-sxm:128x8", 512, gpt=_LONG),
    "70B, 512 GB200, 4M tokens": Question("gb200:128x4", 512, gpt=_LONG),
    "8x7B mixture, 64 H100, batch 64": Question(
        "h100-sxm:8x8", 64, ("data", "expert"), model="moe", changes=_DEPTH["moe"], within=(2, 4, 8)
    ),
    "7B, texts of 32768, 64 H100, batch 16": Question(
        "h100-sxm:8x8",
        16,
        ("data", "context"),
        model="long_context",
        changes=_DEPTH["long_context"],
        within=(4, 8),
    ),
    "ViT-22B, 64 A100, batch 512": Question(
        "a100-sxm-80:8x8", 512, ("data", "model"), model="vit", changes=_DEPTH["vit"]
    ),
}


def named(question: str, axes: Mapping[str, int]) -> str:
    """The name of a question's step on a mesh, as in "7B, 64 H100, batch 64 | fsdp 8 x tp 8"."""
    return f"{question} | {mesh_name(axes)}"


def mesh_name(axes: Mapping[str, int]) -> str:
    """A mesh in words, without axes of one."""
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)


MESH_STEPS: Mapping[str, Step] = {
    named(name, axes): question.step(axes)
    for name, question in QUESTIONS.items()
    for axes in question.meshes
}
