"""The steps of the suite: models and pods, at sizes that fit."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jaxoverlap
from benchmarks.plain_gpt import EVERYWHERE, Sizes, abstract_args, make_step, plain_mlp, rules_mlp
from benchmarks.pods.hand_ring import hand_mlp
from benchmarks.pods.names import HAND, IN_SHARDINGS, PRESET_ROWS, ROWS, RULES
from jaxoverlap.hardware.cluster import parse_cluster

# 7B as in benchmarks/plain_gpt.py. 70B class: layers, hidden size and heads of LLaMA-65B
# (arXiv:2302.13971, table 2) with an MLP of two matrices, 4 x hidden: 65B parameters.
GPT_7B = Sizes()
GPT_70B = Sizes(layers=80, hidden=8192, heads=64, mlp=32768)


@dataclass(frozen=True)
class Step:
    """A train step for a pod.

    Attributes:
        pod: as `jaxoverlap.parse_cluster` takes it.
        axes: of the mesh.
        gpt: sizes of benchmarks/plain_gpt.py's; None: another model.
        model: a module of models/, at `RECIPE.config.pod(**axes, **changes)`.
        presets: whether it is compiled with them too.
        more: rows of this step besides ROWS.
    """

    pod: str
    axes: dict[str, int]
    gpt: Sizes | None = None
    model: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    presets: bool = True
    more: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        rows = ROWS if self.presets else tuple(row for row in ROWS if row not in PRESET_ROWS)
        return (*rows, *self.more)

    def build(self, row: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The jitted step that a row compiles, and its arguments as shapes."""
        if self.gpt is not None:
            pinned = {} if row == IN_SHARDINGS else EVERYWHERE
            if row == RULES:
                step = make_step(self.gpt, mesh, pinned, rules_mlp, jaxoverlap.einsum)
                return step, abstract_args(self.gpt, mesh)
            mlp = hand_mlp(mesh) if row == HAND else plain_mlp
            return make_step(self.gpt, mesh, pinned, mlp), abstract_args(self.gpt, mesh)
        module = importlib.import_module(f"models.{self.model}")
        changes = self.changes | ({"ops": True} if row == RULES else {})
        config = module.RECIPE.config.pod(**self.axes, **changes)
        return module.make_step(config, mesh), module.abstract_args(config, mesh)


STEPS = {
    "7b-h100-8": Step(
        "h100-sxm:1x8", {"fsdp": 2, "tp": 4}, replace(GPT_7B, batch=16), more=(HAND,)
    ),
    "7b-h100-64": Step(
        "h100-sxm:8x8", {"fsdp": 8, "tp": 8}, replace(GPT_7B, batch=64), more=(HAND, IN_SHARDINGS)
    ),
    "7b-h100-512": Step(
        "h100-sxm:64x8", {"fsdp": 64, "tp": 8}, replace(GPT_7B, batch=512), more=(HAND,)
    ),
    "7b-a100-64": Step(
        "a100-sxm-80:8x8", {"fsdp": 8, "tp": 8}, replace(GPT_7B, batch=64), more=(HAND,)
    ),
    "70b-gb200-8": Step("gb200:2x4", {"fsdp": 1, "tp": 8}, replace(GPT_70B, batch=4)),
    "70b-h100-64": Step("h100-sxm:8x8", {"fsdp": 8, "tp": 8}, replace(GPT_70B, batch=32)),
    "70b-gb200-512": Step("gb200:128x4", {"fsdp": 64, "tp": 8}, replace(GPT_70B, batch=256)),
    # Mixtral 8x7B's, ViT-22B's and a 7B GPT's sizes and depths, as each module's `pod` says.
    "moe-h100-64": Step(
        "h100-sxm:8x8", {"data": 8, "expert": 8}, model="moe", changes={"layers": 32}
    ),
    "vit-a100-64": Step(
        "a100-sxm-80:8x8", {"data": 8, "model": 8}, model="vit", changes={"layers": 48}
    ),
    "long-h100-64": Step(
        "h100-sxm:8x8", {"data": 8, "context": 8}, model="long_context", changes={"layers": 32}
    ),
}


def a_process_a_gpu(step: Step) -> Step:
    """The step where each GPU has a process of its own: plain, overlapped and with the pass."""
    gpus = parse_cluster(step.pod).gpus_per_host
    return replace(step, pod=f"{step.pod}/{gpus}", presets=False, more=())


BY_PROCESS = {f"{name}, a process a GPU": a_process_a_gpu(step) for name, step in STEPS.items()}
ALL = {
    name: step
    for both in zip(STEPS.items(), BY_PROCESS.items(), strict=True)
    for name, step in both
}
