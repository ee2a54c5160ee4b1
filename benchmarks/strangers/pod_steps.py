"""List published train steps at the size of pods: four layers, 4096 wide, 4096 tokens a row."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from benchmarks.drawn.step import Built, Step
from benchmarks.strangers.stranger import Case

LAYERS, HIDDEN, SEQUENCE = 4, 4096, 4096
_H100_8, _H100_64 = "h100-sxm:1x8", "h100-sxm:8x8"

# Each trainer has names of its own for the sizes; MaxText's module sets the width of the MLP.
_MAXTEXT = {
    "base_num_decoder_layers": LAYERS,
    "base_emb_dim": HIDDEN,
    "max_target_length": SEQUENCE,
}
_MAXTEXT_CUDNN = _MAXTEXT | {"attention": "cudnn_flash_jax"}
_CONFIG = {"num_layers": LAYERS, "embed_dim": HIDDEN}
_HEADS = {"num_kv_heads": 8}  # it has four, which eight devices cannot share
_GEMMA3 = {
    "model": "gemma3",
    "constraints": True,
    "length": SEQUENCE,
    "changes": {**_CONFIG, **_HEADS},
}
_QWEN3 = {"model": "qwen3", "constraints": False, "length": SEQUENCE, "changes": _CONFIG}
_KAULDRON = {"length": SEQUENCE, "layers": LAYERS, "changes": {"embed_dim": HIDDEN}}


def _build(module: str, options: Mapping[str, Any], mesh: Mesh) -> Built:
    """Build a stranger's step on a mesh, a row of the batch for each GPU."""
    case = Case(module, module, dict(mesh.shape), packages=(), options=dict(options))
    theirs = importlib.import_module(f"benchmarks.strangers.{module}")
    stranger = theirs.build(case, mesh, real=True)
    return Built(stranger.step, stranger.args, stranger.context)


def _steps() -> dict[str, Step]:
    tunix = {"tunix gemma3": _GEMMA3, "tunix qwen3, no constraints": _QWEN3}
    trainers = [("maxtext", "maxtext_pretrain", "maxtext fsdp 8", "tensor", _MAXTEXT)]
    trainers += [(name, "tunix_sft", name, "tp", options) for name, options in tunix.items()]
    steps = []
    for name, module, environment, tensor, options in trainers:
        meshes = (
            (_H100_8, {"fsdp": 1, tensor: 8}),
            (_H100_8, {"fsdp": 2, tensor: 4}),
            (_H100_8, {"fsdp": 8, tensor: 1}),
            (_H100_64, {"fsdp": 8, tensor: 8}),
        )
        for pod, axes in meshes:
            build = partial(_build, module, options)
            shown = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            steps.append(Step(f"{name}, {shown}", pod, axes, build, stranger=environment))
    steps += _maxtext_cudnn()
    gemma = "gemma, kauldron fsdp"  # kauldron knows one axis
    for pod, size in ((_H100_8, 8), (_H100_64, 64)):
        build = partial(_build, "gemma_kauldron", _KAULDRON)
        steps.append(Step(f"{gemma} {size}", pod, {"devices": size}, build, stranger=gemma))
    return {step.name: step for step in steps}


def _maxtext_cudnn() -> Iterator[Step]:
    """Yield MaxText's step with cuDNN's attention, on each mesh."""
    meshes = (
        (_H100_8, {"tensor": 8}),
        (_H100_8, {"tensor_sequence": 8}),  # as Megatron's sequence parallelism
        (_H100_8, {"fsdp": 2, "tensor_sequence": 4}),
        (_H100_8, {"fsdp": 8}),
        (_H100_64, {"fsdp": 8, "tensor": 8}),
    )
    for pod, sizes in meshes:
        axes = {"fsdp": 1, **sizes}
        build = partial(_build, "maxtext_pretrain", _MAXTEXT_CUDNN)
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        name, environment = f"maxtext cudnn, {shown}", "maxtext fsdp 8"
        yield Step(name, pod, axes, build, stranger=environment)


POD_STEPS = _steps()
