"""One row of a question: its step on a mesh, by a policy and options, compiled and simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import jaxoverlap
from benchmarks.frame import Row, provenance
from benchmarks.pods.child import seconds
from benchmarks.pods.rows import unfinished
from benchmarks.questions.asked import QUESTIONS
from benchmarks.questions.model import KEPT, abstract_args, make_step
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap.flags.published import COMPARED, accepted
from jaxoverlap.hardware.pods import compiler_options, pod_mesh

MEMORY = 0.92  # the share of a GPU's memory that a step may need
DEFAULTS, NO_TRITON, OVERLAPPED = "XLA's defaults", "no Triton matmuls", "overlap()"
WITH_MEMORY = f"overlap(memory={MEMORY})"
PLAIN_OPTIONS = (DEFAULTS, *COMPARED, NO_TRITON)
FREE_POLICY = "chosen"  # the policy of the rows whose recomputation the library chooses
OVERLAP = (OVERLAPPED, WITH_MEMORY)
CHILD_S = 3000


def measured(question: str, mesh: str, policy: str, options: str) -> Row:
    """Compile a row and simulate it.

    Args:
        question, mesh: names of `asked.py`.
        policy: a name of KEPT; FREE_POLICY, the library's, with WITH_MEMORY.
        options: a name of PLAIN_OPTIONS or OVERLAP.
    """
    asked = QUESTIONS[question]
    devices = pod_mesh(asked.pod, asked.meshes[mesh])
    if asked.explicit:
        kinds = (AxisType.Explicit,) * len(devices.axis_names)
        devices = Mesh(devices.devices, devices.axis_names, axis_types=kinds)
    args = abstract_args(asked.model, devices)
    step: Any = make_step(asked.model, devices, KEPT.get(policy))
    xla: dict[str, Any] | None = compiler_options()
    if options in OVERLAP:
        memory = MEMORY if options == WITH_MEMORY else None
        step, xla = jaxoverlap.overlap(step, cluster=asked.pod, memory=memory), None
    elif options in COMPARED:
        xla |= accepted(options, devices.devices.flat[0])[0]
    elif options == NO_TRITON:
        xla |= {"xla_gpu_enable_triton_gemm": False}
    with jax.set_mesh(devices) if asked.explicit else contextlib.nullcontext():
        compiled = step.lower(*args).compile(xla)
    chip = asked.cluster.chip
    return {
        **provenance(),
        **seconds(jaxoverlap.simulate(compiled, asked.pod), lines=False),
        "peak_bytes": peak_bytes(compiled.memory_analysis()),
        "chip_bytes": chip.memory_bytes,
        "model_s": asked.model.model_flops / asked.cluster.num_devices / chip.bf16_flops_per_s,
        **({"taken": compiled.speedup.taken} if xla is None and compiled.speedup else {}),
    }


def fastest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that fit, in order of their seconds."""
    return sorted(filter(fits, rows), key=lambda row: row["step_s"])


def fits(row: Row) -> bool:
    """Return whether a row has seconds of a complete step, in the memory that it may need."""
    return not unfinished(row) and row["peak_bytes"] <= MEMORY * row["chip_bytes"]
