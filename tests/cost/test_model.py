"""The cost model keeps its bounds whatever the tables say, and does its arithmetic."""

import dataclasses
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.cost import nccl
from jaxoverlap.cost import tables as measured
from jaxoverlap.cost.collective_tables import LAUNCH_S
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import ALONE, Group, Share, legs_of
from jaxoverlap.cost.interpolation import Curve
from jaxoverlap.cost.model import Channels
from jaxoverlap.hardware.cluster import Link, chips, parse_cluster

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
MODELS = {chip.name: cost_model(f"{chip.name}:8x4") for chip in chips()}
H100 = cost_model("h100-sxm:8x8")
names = st.sampled_from(sorted(MODELS))
dims = st.integers(1, 1 << 17)
sizes = st.integers(0, 1 << 34)
groups = st.sampled_from([Group(2), Group(4), Group(8), Group(2, 2), Group(8, 8), Group(32, 8)])


@settings(max_examples=40, deadline=None)
@given(names, dims, dims, dims, st.integers(1, 64))
def test_a_matmul_takes_no_less_than_the_data_sheet_allows(name, m, n, k, batch):
    chip = MODELS[name].cluster.chip
    seconds = MODELS[name].matmul_s(m, n, k, batch=batch)
    assert math.isfinite(seconds)
    # The sheet's peak is at a clock that a short matmul may exceed.
    assert seconds > 2 * batch * m * n * k / (1.2 * chip.bf16_flops_per_s)


@settings(max_examples=40, deadline=None)
@given(names, dims, dims, dims, st.floats(0, 40), st.floats(0, 1e12))
def test_what_runs_beside_never_makes_a_matmul_faster(name, m, n, k, sms, rate):
    model = MODELS[name]
    assert model.matmul_s(m, n, k, beside=Share(sms, rate)) >= model.matmul_s(m, n, k) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(names, sizes, st.floats(0, 1e12))
def test_what_runs_beside_never_makes_a_memory_bound_kernel_faster(name, num_bytes, rate):
    model = MODELS[name]
    alone = model.memory_s(num_bytes)
    assert alone <= model.memory_s(num_bytes, beside=Share(0, rate))
    assert alone >= num_bytes / model.cluster.chip.memory_bandwidth_bytes_per_s


@settings(max_examples=40, deadline=None)
@given(names, st.sampled_from(KINDS), sizes, groups)
def test_a_collective_takes_no_less_than_its_links_allow(name, kind, num_bytes, group):
    model = MODELS[name]
    seconds = model.collective_s(kind, num_bytes, group)
    assert math.isfinite(seconds) and seconds > 0
    if group.domains > 1:
        here = group.size // group.domains
        far = {"all-to-all": (group.size - here) / (group.size - 1)}.get(kind, 1 / here)
        if kind == "collective-permute":
            far = 1.0
        assert seconds > num_bytes * far / model.cluster.network.bandwidth_bytes_per_s
    elif kind != "all-reduce":  # the switch adds up, so that each sends less than by a ring
        assert seconds > num_bytes / model.cluster.nvlink.bandwidth_bytes_per_s


@settings(max_examples=40, deadline=None)
@given(names, st.sampled_from(KINDS), st.integers(1, 1 << 33), groups)
def test_a_share_is_a_part_of_the_chip(name, kind, num_bytes, group):
    model = MODELS[name]
    share = model.share(kind, num_bytes, group)
    assert 1 <= share.sms <= 32 < model.cluster.chip.num_sms
    assert 0 < share.memory_bytes_per_s < model.cluster.chip.memory_bandwidth_bytes_per_s


def test_shares_add_up():
    assert Share(2, 1e9) + Share(3, 2e9) == Share(5, 3e9)
    assert Share(2, 1e9) + ALONE == Share(2, 1e9)


def test_waves_are_counted_over_the_sms_that_are_left():
    # 132 tiles of 128 x 128 fill the chip once; tiles twice as large half of it.
    alone, beside = (H100.matmul_s(128 * 132, 128, 8192, beside=b) for b in (ALONE, Share(1)))
    launch = H100.tables.matmuls["bf16"].launch_s
    assert (beside - launch) / (alone - launch) == pytest.approx((2 + 2 + 1) / 3)


def test_a_matmul_bound_by_memory_waits_for_the_bandwidth_that_is_left():
    peak = H100.cluster.chip.memory_bandwidth_bytes_per_s
    table = H100.tables.matmuls["bf16"]
    seconds = H100.matmul_s(1, 65536, 65536, beside=Share(0, 0.9 * peak))
    moved = table.bytes_touched(1, 65536, 65536)
    assert seconds == pytest.approx(table.launch_s + moved / (0.1 * peak))


def test_eight_chunks_cost_more_than_the_whole():
    for n, k in ((4096, 4096), (8192, 8192), (1024, 8192)):
        assert 8 * H100.matmul_s(1024, n, k) > H100.matmul_s(8192, n, k)


def test_float32_takes_twice_bfloat16_over_the_launch():
    launch = H100.tables.matmuls["bf16"].launch_s
    bf16, f32 = (H100.matmul_s(4096, 4096, 4096, dtype=d) - launch for d in ("bf16", "f32"))
    assert f32 == pytest.approx(2 * bf16)
    assert H100.matmul_s(512, 512, 512, dtype="f16") == H100.matmul_s(512, 512, 512)


def test_published_points_of_the_jax_documentation():
    """The model meets NCCL's gather and cuBLAS on an H100 host, which had no part in any fit.

    The documentation's profiler adds up the kernels, so that no launch is in its times.
    """
    loops = cost_model("h100-sxm:1x8", loops=True)
    for devices, published_us in ((2, 147), (4, 290), (8, 565)):
        shard = 1024 * 4096 * 2
        gather_s = H100.collective_s("all-gather", shard * (devices - 1), Group(devices))
        kernels_s = gather_s - LAUNCH_S + loops.matmul_s(1024 * devices, 4096, 4096)
        total_us = 1e6 * kernels_s
        assert total_us == pytest.approx(published_us, rel=0.05)


def test_permutes_run_on_a_part_of_the_channels():
    """XLA's authors measured so on eight H100s: 128 µs for 8 MiB, 929 µs for 128 MiB."""
    seconds = [H100.collective_s("collective-permute", b << 20, Group(2)) for b in (8, 128)]
    assert seconds == pytest.approx([128.5e-6, 929e-6], rel=0.1)
    assert [nccl.permute_channels(b << 20, 8) for b in (1, 64, 65, 512, 4096)] == [4, 4, 8, 32, 32]
    assert nccl.permute_channels(1 << 20, 72) == 1
    free = dataclasses.replace(H100, permute_channels=32)
    assert free.collective_s("collective-permute", 8 << 20, Group(2)) < seconds[0] / 2


def test_a_slower_link_slows_the_bytes_and_not_the_start():
    slow = dataclasses.replace(H100.cluster, nvlink=Link("half", 225e9, 12e-6))
    prompt = dataclasses.replace(H100.cluster, nvlink=Link("prompt", 450e9, 1e-6))
    model = cost_model(slow)
    for kind in KINDS:
        start, whole = (H100.collective_s(kind, b, Group(8)) for b in (0, 1 << 30))
        assert model.collective_s(kind, 0, Group(8)) == pytest.approx(start)
        assert cost_model(prompt).collective_s(kind, 0, Group(8)) == pytest.approx(start / 12)
        assert model.collective_s(kind, 1 << 30, Group(8)) == pytest.approx(2 * whole - start)


def test_across_domains_more_nics_carry_more():
    moved = 1 << 30
    one, eight = (H100.collective_s("all-gather", moved, g) for g in (Group(8, 8), Group(64, 8)))
    assert 4 < one / eight < 8
    assert one == pytest.approx(moved / 48e9, rel=0.05)


def test_launches_are_what_nccl_tests_measured():
    """All-reduces on eight H200s (stas00/ml-engineering), which had no part in the launch."""
    model = cost_model("h200:1x8")
    for size, bus_gb_per_s in ((1, 39.93), (2, 64.53), (4, 107.16), (16, 219.89), (64, 346.51)):
        moved = 2 * (size << 20) * 7 // 8
        seconds = model.collective_s("all-reduce", moved, Group(8))
        assert seconds == pytest.approx(moved / bus_gb_per_s / 1e9, rel=0.10)


def test_a_network_slows_what_nccl_chose_without_knowing_it():
    """A cloud's latency is paid in the protocol that NCCL takes by its own constants."""
    moved, group = (1 << 20) * 15 // 16, Group(16, 2)
    near, far = (cost_model(f"h100-sxm:2x8{at}") for at in ("", "@tcpx"))
    assert far.collective_s("all-gather", moved, group) > 0.5e-3  # published: 0.997 ms
    assert near.collective_s("all-gather", moved, group) < 0.1e-3
    link = dataclasses.replace(far.cluster.network, simple_only=False)
    free = cost_model(dataclasses.replace(far.cluster, network=link))
    assert free.collective_s("all-gather", moved, group) < 0.5e-3


def test_all_reduces_through_racks_of_nvlink():
    """CoreWeave's GB200s: 144 GPUs had no part in the fit, 1440 gave both numbers of it."""
    for cluster, gib, published_us in (
        ("gb200:36x4", 1, 3574.4),
        ("gb200:36x4", 16, 42067),
        ("gb200:360x4", 2, 14980),
    ):
        model = cost_model(cluster)
        devices = model.cluster.num_devices
        moved = 2 * (gib << 30) * (devices - 1) // devices
        seconds = model.collective_s("all-reduce", moved, Group(devices, devices // 72))
        assert seconds == pytest.approx(published_us / 1e6, rel=0.12)


def test_given_channels_bound_the_rate():
    moved, group = 1 << 28, Group(8)
    default = H100.collective_s("all-gather", moved, group)
    two = H100.collective_s("all-gather", moved, group, Channels(2, 2 << 20))
    assert two > 2 * default
    assert H100.collective_s("all-gather", moved, group, Channels(64, 2 << 20)) == default
    smaller = H100.collective_s("all-gather", moved, group, Channels(2, 16 << 10))
    assert smaller > two
    assert H100.share("all-gather", moved, group, Channels(2)).sms == 2


def test_a_group_between_measured_sizes_lies_between():
    three = H100.collective_s("all-gather", 1 << 26, Group(3))
    two, four = (H100.collective_s("all-gather", 1 << 26, Group(n)) for n in (2, 4))
    assert min(two, four) <= three <= max(two, four)


def test_one_device_sends_nothing():
    assert H100.collective_s("all-reduce", 0, Group(1)) == H100.tables.memory.launch_s
    assert H100.share("all-reduce", 0, Group(1)) == ALONE


def test_both_a100s_have_one_table_and_memories_of_their_own():
    small, large = (MODELS[f"a100-sxm-{gb}"] for gb in (40, 80))
    assert small.collective_s("all-gather", 1 << 20, Group(4)) == large.collective_s(
        "all-gather", 1 << 20, Group(4)
    )
    assert small.memory_s(1 << 30) > 1.2 * large.memory_s(1 << 30)
    assert small.matmul_s(1, 16384, 16384) > 1.2 * large.matmul_s(1, 16384, 16384)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="above zero"):
        H100.matmul_s(0, 1, 1)
    with pytest.raises(ValueError, match=r"c64.*bf16, fp8, f16, f32"):
        H100.matmul_s(1, 1, 1, dtype="c64")
    with pytest.raises(ValueError, match=r"fp8 were measured on a100.*bf16"):
        MODELS["a100-sxm-80"].matmul_s(1, 1, 1, dtype="fp8")
    with pytest.raises(ValueError, match=r"'all-scatter'.*all-gather"):
        H100.collective_s("all-scatter", 1, Group(8))
    with pytest.raises(ValueError, match="-1 bytes"):
        H100.share("all-gather", -1, Group(8))
    with pytest.raises(ValueError, match="domains than devices"):
        Group(2, 4)
    with pytest.raises(ValueError, match="one channel"):
        Channels(0)
    other = dataclasses.replace(parse_cluster("h100-sxm:1x8").chip, name="mi300x")
    cluster = dataclasses.replace(parse_cluster("h100-sxm:1x8"), chip=other)
    with pytest.raises(ValueError, match=r"no tables of mi300x: known are a100-sxm-40"):
        cost_model(cluster)
    with pytest.raises(ValueError, match="no cluster"):
        cost_model()


def test_a_permute_by_copy_has_the_link_and_takes_no_sms():
    moved, copy = 25_165_824, Group(2, by_copy=True)
    assert H100.collective_s("collective-permute", moved, copy) == pytest.approx(100e-6, rel=0.01)
    assert H100.collective_s("collective-permute", moved, Group(2)) > 300e-6
    assert H100.share("collective-permute", moved, copy).sms == 0
    alone = Group(2, communicator=4)
    assert H100.collective_s("collective-permute", moved, alone) < H100.collective_s(
        "collective-permute", moved, Group(2)
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_attention_grows_with_what_it_computes(name):
    model, sizes = MODELS[name], (4096, 4096, 32, 128)
    causal = model.attention_s(*sizes, causal=True)
    assert 1.5 < model.attention_s(*sizes) / causal < 2
    assert 2 < model.attention_s(*sizes, causal=True, backward=True) / causal < 2.5
    assert model.attention_s(8192, 4096, 32, 128) > model.attention_s(*sizes)
    assert model.attention_s(*sizes, causal=True, dtype="f16") == causal
    flops = 2 * 32 * 4096**2 * 128
    assert 0.2 < flops / causal / model.cluster.chip.bf16_flops_per_s < 1
    assert model.attention_s(*sizes, beside=Share(sms=model.cluster.chip.num_sms / 2)) > 1.5 * (
        model.attention_s(*sizes)
    )


def test_attention_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match=r"no attention of f32.*bf16 and f16"):
        H100.attention_s(128, 128, 1, 64, dtype="f32")
    with pytest.raises(ValueError, match="dims above 0"):
        H100.attention_s(0, 128, 1, 64)


def test_transcendentals_and_transposes_hide_behind_the_bytes_on_a_gpu():
    hard = H100.memory_s(1 << 20, transcendentals=1 << 18, transposed_bytes=1 << 20)
    assert hard == H100.memory_s(1 << 20)
    assert H100.skew_s(1.0, "all-gather", Group(8)) == 0


def test_a_curve_takes_the_place_of_launch_and_rate():
    curve = Curve((1e3, 1e6), (1e-5, 1e-3))
    memory = measured.MemoryTable(1e-5, 1e9, "", curve, transcendental_s=1e-9, transposed_s=2e-9)
    tables = msgspec.structs.replace(H100.tables, memory=memory)
    model = dataclasses.replace(H100, tables=tables)
    assert model.memory_s(1e6) == pytest.approx(1e-3)
    assert model.memory_s(1e6, transcendentals=10**6) == pytest.approx(2e-3)
    assert model.memory_s(1e6, transposed_bytes=10**6) == pytest.approx(3e-3)


@settings(max_examples=40, deadline=None)
@given(names, sizes, groups)
def test_a_ragged_exchange_across_hosts_is_gathered_there_and_sent_on_within_each(
    name, sent, group
):
    model, legs = MODELS[name], legs_of("ragged-all-to-all", sent, group)
    seconds = model.collective_s("ragged-all-to-all", sent, group)
    assert seconds == pytest.approx(sum(model.collective_s(*leg) for leg in legs))
    if not 1 < group.domains < group.size:
        assert legs == [("ragged-all-to-all", sent, group)]
        return
    (_, across, between), (_, _, within) = legs
    assert between.size * within.size == group.size and within.domains == 1
    assert across >= sent * (group.domains - 1) / group.domains, "what leaves the host, at least"
