"""OPT's streamed steps, compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.zeroth_order import opt
from jaxoverlap import parse_cluster
from jaxoverlap.hardware.pods import compiler_options, devices
from jaxoverlap.train import zeroth_order as zo

SEQUENCE = 2048
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": "True"}


def mesh_of(chip: str, gpus: int) -> Mesh:
    """Return GPUs of one host: a pair, if there are two or more, of so many for the batch."""
    sizes = (min(gpus, 2), max(gpus // 2, 1))
    found = np.array(devices(parse_cluster(f"{chip}:1x{gpus}")), dtype=object)
    return Mesh(found.reshape(sizes), ("pair", "data"), axis_types=(AxisType.Auto,) * 2)


def lowered(
    size: opt.Size, chip: str, gpus: int, *, sliced: bool = True, rows: int = 1
) -> tuple[Any, dict[str, str]]:
    """Lower a step of PertP, or of 2D from four GPUs on; return it and options to compile it by.

    Args:
        size: the model's.
        chip, gpus: of one host.
        sliced: whether each GPU uploads a slice of each block.
        rows: sequences of each forward pass.
    """
    mesh = mesh_of(chip, gpus)
    step = zo.step(
        opt.model(size),
        zo.mezo(eps=1e-3, lr=1e-7, rounding="nearest"),  # as ZO2 rounds
        mesh,
        perturb="pair" if gpus > 1 else None,
        data="data" if gpus > 2 else None,
        host=True,
        sliced=sliced,
        check=False,
    )
    state = step.abstract(opt.shapes(size))
    shape = (rows * mesh.shape["data"], SEQUENCE + 1)
    sharding = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    made = step.lower(state, dict(tokens=tokens))
    marks = state._replace(params=dict(outer=None, blocks=state.params["blocks"]))
    in_host_memory(made, range(len(jax.tree.leaves(marks.params))))
    host_bytes = 2 * sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state.params["blocks"])
    )
    # XLA counts arguments in host memory as the device's; over its limit it schedules for memory.
    memory = parse_cluster(f"{chip}:1x{gpus}").chip.memory_bytes
    slop = {"xla_gpu_memory_limit_slop_factor": str(95 + int(125 * host_bytes / memory))}
    return made, compiler_options() | OPTIONS | slop


def in_host_memory(lowered: Any, arguments: Collection[int]) -> None:
    """Mark arguments of a lowering as lying in pinned host memory; the lowering is changed.

    On real devices a sharding says so. The devices of a pod have no memories to ask, and
    `NamedSharding` drops its memory kind there (jax 0.12.0.1).

    Args:
        lowered: what `jax.jit(...).lower` gave, not compiled yet.
        arguments: numbers of its flattened arguments.

    Raises:
        ValueError: if it has fewer arguments.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(
            op for op in module.body.operations if op.attributes["sym_name"].value == "main"
        )
        attributes = list(main.attributes["arg_attrs"])
        if arguments and max(arguments) >= len(attributes):
            raise ValueError(
                f"argument {max(arguments)} of a step with {len(attributes)}: expected numbers of "
                "its flattened arguments"
            )
        for number in arguments:
            named = {one.name: one.attr for one in attributes[number]}
            named["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes[number] = ir.DictAttr.get(named)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def with_layers(size: opt.Size, layers: int) -> opt.Size:
    """Return a model of the same width and another depth."""
    return replace(size, layers=layers)
