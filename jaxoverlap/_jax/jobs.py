"""A compilation as bytes: what one process has lowered, another can compile.

XLA's compiler ends the process where it meets a bug. What is tried out is therefore compiled in a
child, which needs the lowered module and XLA's options, and not the user's Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

from jaxoverlap._jax import jits


@dataclass(frozen=True)
class Job:
    """A lowered module and how XLA is to compile it.

    Attributes:
        module: StableHLO, as MLIR bytecode.
        options: `xla_client.CompileOptions`, serialized; they name devices as `places` does.
        platform: the devices' platform: "cuda" or "cpu".
        places: for each device, in the order of the mesh, how many have a smaller id. Ids may be
            others where it is compiled.
    """

    module: bytes
    options: bytes
    platform: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
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
        ValueError: if the step calls back into Python, which a child cannot.
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
    place_of = {i: place for place, i in enumerate(sorted(device.id for device in devices))}
    places = [place_of[device.id] for device in devices]
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([places]))
    return Job(
        mlir.module_to_bytecode(lowering._hlo),
        options.SerializeAsString(),
        "cuda" if gpu else devices[0].platform,
        tuple(places),
    )


def compile_job(job: Job, devices: Sequence[Any], kernels: Path) -> Compiled:
    """Compile a job for devices of its platform, whose ids count from 0.

    Args:
        kernels: a file from which XLA takes GPU kernels, and into which it puts new ones.
    """
    by_id = sorted(devices, key=lambda device: device.id)
    assert [device.id for device in by_id] == [*range(len(by_id))]
    devices = [by_id[place] for place in job.places]
    options = xla_client.CompileOptions.ParseFromString(job.options)
    options.executable_build_options.debug_options.xla_gpu_kernel_cache_file = str(kernels)
    with mlir.make_ir_context():
        module = ir.Module.parse(job.module)
        executable: Any = compiler.backend_compile_and_load(
            devices[0].client, module, xla_client.DeviceList(tuple(devices)), options, []
        )
    text = "\n\n".join(module.to_string() for module in executable.hlo_modules())
    return Compiled(text, peak_bytes(executable.get_compiled_memory_stats()))


def peak_bytes(memory: Any) -> int:
    """Sum up a device's `memory_analysis()`: arguments + temp + outputs - aliased."""
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return resident - memory.alias_size_in_bytes + memory.temp_size_in_bytes
