"""XLA_FLAGS as others publish them, verbatim."""

_AXLEARN = """
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false
--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true
--xla_gpu_enable_pipelined_all_reduce=true --xla_gpu_enable_while_loop_double_buffering=true
--xla_gpu_enable_all_gather_combine_by_dim=false
--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization
"""
_RECIPES = """
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false
--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true
--xla_gpu_enable_pipelined_all_reduce=true --xla_gpu_enable_all_gather_combine_by_dim=false
--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization
--xla_gpu_enable_while_loop_double_buffering=true
"""


def _thresholds(all_reduce: int, all_gather: int, reduce_scatter: int) -> str:
    return (
        f"--xla_gpu_all_reduce_combine_threshold_bytes={all_reduce} "
        f"--xla_gpu_all_gather_combine_threshold_bytes={all_gather} "
        f"--xla_gpu_reduce_scatter_combine_threshold_bytes={reduce_scatter}"
    )


# apple/axlearn@34aed43c axlearn/cloud/gcp/jobset_utils.py
# AI-Hypercomputer/gpu-recipes@2e1fd5e training/*/*/maxtext-pretraining-gke/values.yaml
# AI-Hypercomputer/maxtext@e591f30 docs/run_maxtext/run_maxtext_single_host_gpu.md
# NVIDIA/JAX-Toolbox@bcbbfa57 .github/container/test-maxtext.sh, docs/GPU_performance.md
# aws-samples/awsome-distributed-training@7217859 3.test_cases/jax/jax.sbatch
PUBLISHED = {
    "AxLearn a3-high": f"{_AXLEARN} --xla_gpu_all_reduce_contiguous {_thresholds(*[1 << 30] * 3)}",
    "AxLearn a3-mega": f"{_AXLEARN} --xla_gpu_enable_highest_priority_async_stream=true "
    f"{_thresholds(134217728, 1073741824, 33554432)}",
    "AxLearn a3-ultra": f"{_AXLEARN} --xla_gpu_graph_level=0 "
    f"{_thresholds(2147483648, 2147483648, 16777216)}",
    "AxLearn a4": f"{_AXLEARN} {_thresholds(*[1 << 31] * 3)} --xla_gpu_cudnn_gemm_fusion_level=3 "
    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
    "gpu-recipes a3-ultra 70B": f"{_RECIPES} --xla_gpu_graph_level=0 "
    f"{_thresholds(2147483648, 2147483648, 16777216)}",
    "gpu-recipes a3-ultra 405B": f'{_RECIPES} --xla_gpu_enable_command_buffer="" '
    "--xla_gpu_enable_highest_priority_async_stream=true "
    f"{_thresholds(*[1 << 31] * 3)} --xla_gpu_enable_triton_softmax_fusion=false",
    "gpu-recipes a4 70B": f"{_RECIPES} --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL "
    f"{_thresholds(2147483648, 2147483648, 16777216)}",
    "MaxText docs, 1 host": f"""
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false
--xla_gpu_enable_command_buffer='' --xla_gpu_enable_highest_priority_async_stream=true
{_thresholds(134217728, 134217728, 67108864)} --xla_gpu_pipeline_all_gather=on
--xla_gpu_pipeline_reduce_scatter=on --xla_gpu_pipeline_all_reduce=on
--xla_gpu_enable_while_loop_double_buffering=true --xla_gpu_enable_triton_softmax_fusion=false
--xla_gpu_enable_all_gather_combine_by_dim=false
--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization""",
    "JAX-Toolbox CI": f"""
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_command_buffer=
{_thresholds(1073741824, 1073741824, 134217728)} --xla_gpu_enable_pipelined_all_gather=true
--xla_gpu_enable_pipelined_reduce_scatter=true --xla_gpu_enable_pipelined_all_reduce=true
--xla_gpu_enable_while_loop_double_buffering=true --xla_gpu_enable_all_gather_combine_by_dim=false
--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization""",
    "JAX-Toolbox docs, all": """
--xla_gpu_use_memcpy_local_p2p=true --xla_gpu_enable_pipelined_p2p=true
--xla_gpu_collective_permute_decomposer_threshold=1024 --xla_gpu_lhs_enable_gpu_async_tracker=true
--xla_gpu_multi_streamed_windowed_einsum=true --xla_gpu_threshold_for_windowed_einsum_mib=0
--xla_gpu_enable_custom_fusions=true --xla_gpu_enable_address_computation_fusion=true
--xla_gpu_enable_nccl_user_buffers=true --xla_gpu_enable_nccl_comm_splitting=true
--xla_gpu_enable_nccl_per_stream_comms=false --xla_gpu_cudnn_gemm_fusion=true
--xla_gpu_enable_cudnn_fmha=false""",
    "AWS jax.sbatch": """
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false
--xla_gpu_simplify_all_fp_conversions --xla_gpu_enable_async_all_gather=true
--xla_gpu_enable_async_reduce_scatter=true --xla_gpu_enable_highest_priority_async_stream=true
--xla_gpu_enable_triton_softmax_fusion=false --xla_gpu_all_reduce_combine_threshold_bytes=33554432
--xla_gpu_graph_level=0 --xla_gpu_enable_async_all_reduce=true""",
}
