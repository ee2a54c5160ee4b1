"""An event is what its instruction does or, without one, what its name says."""

from __future__ import annotations

import pytest

from jaxoverlap.profiling.formats.events import (
    COPY_D2D,
    COPY_D2H,
    COPY_H2D,
    COPY_P2P,
    GRAPH,
    DeviceEvent,
)
from jaxoverlap.profiling.kinds import Classifier
from tests.profiling import synthetic

NAMES = {  # as real profiles have them
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all-gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce-scatter",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all-reduce",
    "ncclSymkDevKernel_AllReduce_AGxLLMC_R_sum_bf16": "all-reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send and receive",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "NCCL",
    "void deep_ep::intranode::dispatch<8>(int4*)": "all-to-all",
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)": "all-to-all",
    "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "void ck_tile::kentry<ck_tile::gfx950_t, 2, ck_tile::FmhaFwdKernel<1>>": "attention",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
    "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64": "matmul",
    "gemm_fusion_dot_6": "matmul",
    "loop_transpose_fusion": "memory",
    "triton_poi_fused_add_3": "memory",
    "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)": "unknown",
}


def _kind(classifier: Classifier, event: DeviceEvent) -> str:
    label = classifier.label(event)
    return label.collective.kind if label.collective else label.kind


@pytest.mark.parametrize("name", NAMES)
def test_by_name(name: str):
    event = DeviceEvent("Stream #1", name, 0, 1)
    assert _kind(Classifier({}, 1), event) == NAMES[name]


def test_copies_and_graphs():
    kinds = {
        COPY_P2P: "collective-permute",
        COPY_H2D: "from host",
        COPY_D2H: "to host",
        COPY_D2D: "memory",
        GRAPH: "graph",
    }
    for detail, kind in kinds.items():
        event = DeviceEvent("Stream #1", "x", 0, 1, detail=detail)
        assert _kind(Classifier({}, 1), event) == kind


OPS = {  # kernel, instruction: what it is
    ("ncclDevKernel_SendRecv()", "hop"): "collective-permute",
    ("ncclDevKernel_AllGather_RING_LL()", "gather"): "all-gather",
    ("whatever", "inner"): "matmul",
    ("gemm", "first"): "memory",  # the instruction knows better than the kernel's name
    ("while", "loop"): "container",
    ("x", "gathered"): "container",
}


@pytest.mark.parametrize("kernel, op", OPS)
def test_by_instruction(kernel: str, op: str):
    event = DeviceEvent("Stream #1", kernel, 0, 1, op=op, module="jit_step", program=3)
    classifier = Classifier(synthetic.MODULES, 2, nested=True)
    assert _kind(classifier, event) == OPS[kernel, op]


def test_what_a_loop_launches_on_a_gpu_is_work():
    """On a CPU device the loop's event wraps those of its body, and must not count beside them."""
    event = DeviceEvent("Stream #1", "loop_add_fusion", 0, 1, "loop", "jit_step", 3)
    assert _kind(Classifier(synthetic.MODULES, 2, nested=True), event) == "container"
    assert _kind(Classifier(synthetic.MODULES, 2), event) == "memory"


def test_a_collective_has_what_the_module_says():
    classifier = Classifier(synthetic.MODULES, 1)  # a profile of one of two GPUs
    hop = classifier.label(
        DeviceEvent("s", "k", 0, 1, op="hop", module="jit_step", program=3)
    ).collective
    assert hop and hop.ring == "all_gather_matmul.7"
    assert (hop.source, hop.bytes_moved) == ("model/mlp.py:12", 512 * 512 * 2)
    gather = classifier.label(
        DeviceEvent("s", "k", 0, 1, op="gather", module="jit_step", program=3)
    )
    assert gather.collective and gather.collective.group_size == 2


def test_a_custom_call_is_what_its_kernels_are():
    call = '%te = bf16[512,512] custom-call(%x, %x), custom_call_target="te_fused_attn_forward_ffi"'
    lines = synthetic.MODULE.replace("%matmul = bf16[512,512] dot(%first, %first)", f"{call}\n  %matmul = bf16[512,512] dot(%first, %first)")  # fmt: skip
    classifier = Classifier({("jit_step", 3): lines}, 2)

    def kind(kernel: str) -> str:
        event = DeviceEvent("s", kernel, 0, 1, op="te", module="jit_step", program=3)
        return _kind(classifier, event)

    assert kind("cudnn_generated_fort_native_sdpa_sm90_flash_fprop") == "attention"
    assert kind("ncclDevKernel_AllReduce_Sum_bf16_RING_LL()") == "all-reduce"
    assert kind("some_kernel") == "unknown"


def test_instructions_without_their_module_go_by_their_names():
    classifier = Classifier({}, 1, nested=True)
    for op, kind in {
        "reduce-scatter-start.12": "reduce-scatter",
        "while.3": "container",
        "all-gather-done.2": "container",
    }.items():
        assert _kind(classifier, DeviceEvent("s", "k", 0, 1, op=op)) == kind
