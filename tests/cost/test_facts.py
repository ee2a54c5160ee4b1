"""A chip without rows is priced by its data sheet, by the same formulas as all others."""

import pytest

from jaxoverlap.cost.facts import MATMUL_SHARE
from jaxoverlap.cost.find import cost_model, cost_or_data_sheet
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.kernels import KernelWork, MatmulKernel
from jaxoverlap.hardware.cluster import parse_cluster

FRONTIER = parse_cluster("mi250x-gcd:2x8")
COST = cost_or_data_sheet(FRONTIER)


def test_matmuls_and_bytes_go_at_a_share_of_the_peak():
    chip, flops = FRONTIER.chip, 2 * 8192**3
    compute_s = flops / (MATMUL_SHARE * chip.bf16_flops_per_s)
    assert COST.matmul_s(8192, 8192, 8192) == pytest.approx(compute_s, rel=0.05)
    assert cost_model(FRONTIER, matmul_share=0.25).matmul_s(8192, 8192, 8192) == pytest.approx(
        2 * compute_s, rel=0.05
    )
    assert COST.memory_s(1 << 34) == pytest.approx(
        (1 << 34) / (0.8 * chip.memory_bandwidth_bytes_per_s), rel=0.01
    )
    causal, full = (COST.attention_s(4096, 4096, 32, 128, causal=c) for c in (True, False))
    assert full == pytest.approx(2 * causal, rel=0.05)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("moved", [1 << 10, 1 << 21, 3 << 24, 1 << 31])
def test_a_collective_is_a_ring(size, moved):
    link = FRONTIER.chip.nvlink
    steps_s, bytes_s = (size - 1) * link.latency_s, moved / (0.8 * link.bandwidth_bytes_per_s)
    got = COST.collective_s("all-gather", moved, Group(size))
    assert max(steps_s, bytes_s) <= got <= 1.15 * (steps_s + bytes_s)


def test_a_simulation_can_ask_for_all_that_it_needs():
    kernel = KernelWork((MatmulKernel(512, 512, 512),), 1 << 20)
    for kind in ("all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        for group in (Group(2), Group(2, 2), Group(16, 2)):
            beside = COST.share(kind, 1 << 20, group)
            assert COST.kernel_s(kernel, beside) >= COST.kernel_s(kernel) > 0


def test_a_data_sheet_is_asked_for_by_name():
    with pytest.raises(ValueError, match=r"no tables of mi250x-gcd.*matmul_share="):
        cost_model(FRONTIER)
    with pytest.raises(ValueError, match="share above 0"):
        cost_model(FRONTIER, matmul_share=1.5)
    with pytest.raises(ValueError, match="give one of these"):
        cost_model(FRONTIER, matmul_share=0.5, table="some.json")
    measured = cost_or_data_sheet(parse_cluster("h100-sxm:1x8"))
    assert measured == cost_model("h100-sxm:1x8")


def test_matmuls_of_a_step_are_slower_than_those_of_a_loop_but_for_launches_and_bytes():
    step, loop = cost_model("h100-sxm:1x8"), cost_model("h100-sxm:1x8", loops=True)
    large, small = (
        step.matmul_s(n, n, n) / loop.matmul_s(n, n, n) for n in (8192, 256)
    )  # fmt: skip
    assert large == pytest.approx(1.10, abs=0.01)
    assert 1 < small < 1.02
    a100 = "a100-sxm-80:1x8"
    assert cost_model(a100) == cost_model(a100, loops=True)


def test_a_step_s_narrow_matmuls_have_the_data_sheet_s_rate():
    """Not the rows': those have casts in them, by which short contractions are slower than bf16."""
    n, gb200 = 16384, cost_model("gb200:1x4")
    bf16, fp8, fp4 = (gb200.matmul_s(n, n, n, dtype=dtype) for dtype in ("bf16", "fp8", "nvfp4"))
    assert bf16 / fp8 == pytest.approx(2, abs=0.05)
    assert bf16 / fp4 == pytest.approx(4, abs=0.3)  # results have 16 bits
    assert gb200.matmul_s(n, n, n, dtype="mxfp8") == pytest.approx(fp8, rel=0.01)
    for chip in (cost_model("h100-sxm:1x8"), gb200):
        short, fp8 = (chip.matmul_s(n, 2048, 768, batch=16, dtype=d) for d in ("bf16", "fp8"))
        assert fp8 < short
    with pytest.raises(ValueError, match=r"nvfp4 were measured on h100-sxm: known are bf16, fp8"):
        cost_model("h100-sxm:1x8").matmul_s(n, n, n, dtype="nvfp4")


def test_blackwell_ultra_is_priced_as_blackwell_with_more_power_and_memory():
    for ultra, chip in (("b300", "b200"), ("gb300", "gb200")):
        one, other = cost_model(f"{ultra}:2x4"), cost_model(f"{chip}:2x4")
        # The factors of matmuls in a step: 1.10 on B200s, 1.20 on GB200s, none on Ultra.
        assert 1.05 < other.matmul_s(8192, 8192, 8192) / one.matmul_s(8192, 8192, 8192) < 1.21
        assert one.cluster.chip.memory_bytes > 1.4 * other.cluster.chip.memory_bytes
    assert parse_cluster("gb300:18x4").gpus_per_nvlink_domain == 72
