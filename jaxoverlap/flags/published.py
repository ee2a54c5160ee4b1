"""Sets of XLA options that others publish for training on GPUs.

Unlike `presets.py`, which has what a cluster needs, these are whole sets that claim to make a plain
step fast: `overlap()` compiles some of them too, and takes what is fastest. Left out of each: what
the installed XLA refuses (`accepted` says which), and matmuls by cuBLAS, which pods have anyway.
Environment variables (NCCL's, the allocator's) change no schedule. Flags that have been renamed
stand under their new names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxoverlap._jax import jits

_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# xla_gpu_enable_pipelined_*=true; XLA_FLAGS still take that name, compiler options the new one.
_PIPELINES = {
    "xla_gpu_pipeline_all_reduce": _PIPELINED,
    "xla_gpu_pipeline_all_gather": _PIPELINED,
    "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
}
_LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": "True"}


@dataclass(frozen=True)
class Published:
    """A published set of XLA options, with its source."""

    source: str
    options: dict[str, str]


def _combine(all_reduce: int, all_gather: int, reduce_scatter: int) -> dict[str, str]:
    """Return options with the sizes in bytes up to which XLA combines collectives."""
    sizes = dict(all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter)
    return {f"xla_gpu_{kind}_combine_threshold_bytes": str(n) for kind, n in sizes.items()}


PUBLISHED = {
    "O1": Published(
        "NVIDIA/JAX-Toolbox docs/GPU_performance.md: optimization level, FSDP's thresholds",
        {"optimization_level": "O1", **_combine(8 << 30, 8 << 30, 8 << 30)},
    ),
    "gpu-recipes": Published(
        "AI-Hypercomputer/gpu-recipes and maxtext: Llama 3.1 70B on a3ultra and a4; AxLearn's too",
        {
            **_LATENCY_HIDING,
            "xla_gpu_graph_level": "0",
            "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
            **_combine(2 << 30, 2 << 30, 16 << 20),
            **_PIPELINES,
            "xla_gpu_enable_while_loop_double_buffering": "True",
            "xla_gpu_enable_all_gather_combine_by_dim": "False",
            "xla_gpu_enable_reduce_scatter_combine_by_dim": "False",
            "xla_disable_hlo_passes": "rematerialization",
        },
    ),
    # Published with xla_gpu_multi_streamed_windowed_einsum=true: XLA of jax 0.12.0.1 then stops, as
    # its own verifier finds the streams' custom calls malformed (7B step, 64 GPUs).
    "collective matmul": Published(
        "NVIDIA/JAX-Toolbox docs/GPU_performance.md: flags to enable collective matmul",
        {
            **_LATENCY_HIDING,
            "xla_gpu_threshold_for_windowed_einsum_mib": "0",
            "xla_gpu_multi_streamed_windowed_einsum": "False",
        },
    ),
}


# Those that `overlap()` holds a step against. The other one is slower than XLA's defaults in all of
# the ten steps of benchmarks.pods that XLA compiles with it.
COMPARED: tuple[Literal["O1", "gpu-recipes"], ...] = ("O1", "gpu-recipes")


def accepted(name: str, device: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a set's options that a device's XLA accepts, and the names of those it rejects."""
    options = PUBLISHED[name].options
    known = {n: v for n, v in options.items() if jits.accepts_option(n, v, device)}
    return known, tuple(n for n in options if n not in known)
