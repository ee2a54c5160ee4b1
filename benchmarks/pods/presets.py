"""XLA options that others publish for training on GPUs, as they publish them.

Left out of each: what the installed XLA refuses (`accepted` says which), and what every row of this
benchmark has anyway: matmuls by cuBLAS. Environment variables (NCCL's, the allocator's) change no
schedule. Flags that have been renamed stand under their new names.
"""

import functools
from dataclasses import dataclass

from jaxoverlap._jax import jits
from jaxoverlap.hardware.cluster import chips
from jaxoverlap.hardware.pods import compiler_options, pod_mesh

_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# xla_gpu_enable_pipelined_*=true; XLA_FLAGS still take that name, compiler options the new one.
_PIPELINES = {
    "xla_gpu_pipeline_all_reduce": _PIPELINED,
    "xla_gpu_pipeline_all_gather": _PIPELINED,
    "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
}
_LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": "True"}


@dataclass(frozen=True)
class Preset:
    """Options by name, and who publishes them."""

    source: str
    options: dict[str, str]


def _combine(all_reduce: int, all_gather: int, reduce_scatter: int) -> dict[str, str]:
    """Thresholds in bytes, up to which collectives of one kind become one."""
    sizes = dict(all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter)
    return {f"xla_gpu_{kind}_combine_threshold_bytes": str(n) for kind, n in sizes.items()}


PRESETS = {
    "O1": Preset(
        "NVIDIA/JAX-Toolbox docs/GPU_performance.md: optimization level, FSDP's thresholds",
        {"optimization_level": "O1", **_combine(8 << 30, 8 << 30, 8 << 30)},
    ),
    "gpu-recipes": Preset(
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
    "collective matmul": Preset(
        "NVIDIA/JAX-Toolbox docs/GPU_performance.md: flags to enable collective matmul",
        {
            **_LATENCY_HIDING,
            "xla_gpu_threshold_for_windowed_einsum_mib": "0",
            "xla_gpu_multi_streamed_windowed_einsum": "False",
        },
    ),
}


@functools.cache
def accepted(preset: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """A preset's options beside those that all have, and the names that the XLA here refuses."""
    chip = chips()[0].name
    device = pod_mesh(f"{chip}:1x2", {"x": 2}).devices.flat[0]
    options = PRESETS[preset].options
    known = {n: v for n, v in options.items() if jits.accepts_option(n, v, device)}
    refused = tuple(n for n in options if n not in known)
    return {**known, **compiler_options()}, refused
