"""A compilation as bytes: what one process has lowered, another can compile.

XLA's compiler ends the process where it meets a bug. What is tried out is therefore compiled in a
child, which needs the lowered module and XLA's options, and not the user's Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

from jaxoverlap._jax import custom_partitioners, jits, partitioner
from jaxoverlap._jax.custom_partitioners import Answers


@dataclass(frozen=True)
class Job:
    """A lowered module and how XLA is to compile it.

    Attributes:
        module: StableHLO, as MLIR bytecode.
        options: `xla_client.CompileOptions`, serialized; they name devices as `positions` does.
        platform: the devices' platform: "cuda" or "cpu".
        positions: for each device, in the order of the mesh, the rank of its id. Ids may differ
            where the module is compiled.
        answers: the answers of operations that partition themselves by Python.
    """

    module: bytes
    options: bytes
    platform: str
    positions: tuple[int, ...]
    answers: Answers = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledJob:
    """A compiled job: its scheduled module and its memory need.

    Attributes:
        text: the scheduled module.
        peak_bytes: the memory that a device needs.
    """

    text: str
    peak_bytes: int


def job_of(lowered: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None) -> Job:
    """Make the job that compiles a lowered step.

    Raises:
        ValueError: if the step calls back into Python, which a child cannot; or if XLA does not
            partition it.
    """
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    if lowering.compile_args["host_callbacks"]:
        raise ValueError(
            "the step calls back into Python (io_callback, pure_callback or debug.print), and "
            "only a step without callbacks can be compiled by another process: take them out to "
            "tune it, or to hold it against plain"
        )
    devices = list(lowering._device_list)
    options = jits.compile_options(lowering, compiler_options)
    gpu = devices[0].platform in ("gpu", "cuda")
    place_of = {i: position for position, i in enumerate(sorted(device.id for device in devices))}
    positions = [place_of[device.id] for device in devices]
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([positions]))
    module, answers = _module_of(lowered)
    return Job(
        module,
        options.SerializeAsString(),
        "cuda" if gpu else devices[0].platform,
        tuple(positions),
        answers,
    )


def _module_of(lowered: jax.stages.Lowered) -> tuple[bytes, Answers]:
    """Return the module of a lowered step, and the answers of what partitions itself in it."""
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    keys = custom_partitioners.keys_of(lowering)
    if not keys:
        return mlir.module_to_bytecode(lowering._hlo), {}
    custom_partitioners.record()
    try:
        partitioner.let_answer(lowered)
    except partitioner.NoAnswerError as error:
        raise ValueError(f"XLA does not partition the step: {error}") from error
    names = {key: f"operation {position}" for position, key in enumerate(keys)}
    answers = {names[key]: said for key, said in custom_partitioners.recorded(keys).items()}
    return custom_partitioners.renamed(lowering._hlo, names), answers


def compile_job(job: Job, devices: Sequence[Any], kernels: Path) -> CompiledJob:
    """Compile a job for devices of its platform, whose ids count from 0.

    Args:
        kernels: a file from which XLA takes GPU kernels, and into which it puts new ones.
    """
    by_id = sorted(devices, key=lambda device: device.id)
    assert [device.id for device in by_id] == [*range(len(by_id))]
    devices = [by_id[position] for position in job.positions]
    custom_partitioners.give(job.answers)
    options = xla_client.CompileOptions.ParseFromString(job.options)
    options.executable_build_options.debug_options.xla_gpu_kernel_cache_file = str(kernels)
    with mlir.make_ir_context():
        module = ir.Module.parse(job.module)
        executable: Any = compiler.backend_compile_and_load(
            devices[0].client, module, xla_client.DeviceList(tuple(devices)), options, []
        )
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    return CompiledJob(text, peak_bytes(executable.get_compiled_memory_stats()))


def peak_bytes(memory: Any) -> int:
    """Sum up a device's `memory_analysis()`: arguments + temp + outputs - aliased."""
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return resident - memory.alias_size_in_bytes + memory.temp_size_in_bytes
