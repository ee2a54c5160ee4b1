"""What runs side by side takes as long as others published, and never less than alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import ALONE, Group, Share, together_s

H100 = cost_model("h100-sxm:1x8")
seconds = st.floats(1e-6, 1.0)


def _matmul_beside(moved, group, kind):
    """Return (in sequence, side by side): 8192^3 in fp16 beside a collective on eight H100s."""
    alone_s, beside_s = (
        H100.matmul_s(8192, 8192, 8192, dtype="f16", beside=share)
        for share in (ALONE, H100.share(kind, moved, group))
    )
    collective_s = H100.collective_s(kind, moved, group)
    return alone_s + collective_s, together_s(alone_s, beside_s, collective_s)


def test_a_matmul_beside_an_all_gather_by_sms_and_by_copy_engines():
    """pytorch pull 172714: 2.96 ms in sequence, 2.02 by NCCL on SMs, 1.77 by copy engines."""
    moved = 7 * (64 << 20)
    sequence_s, on_sms_s = _matmul_beside(moved, Group(8), "all-gather")
    _, by_copy_s = _matmul_beside(moved, Group(2, by_copy=True), "collective-permute")
    measured = (2.96e-3, 2.02e-3, 1.77e-3)
    assert (sequence_s, on_sms_s, by_copy_s) == pytest.approx(measured, rel=0.10)


def test_copies_beside_memory_bound_kernels_gain_nothing():
    """openxla/xla pull 45983: a copy on the device has all of the memory while it runs."""
    num_bytes, peak = 1 << 30, H100.cluster.chip.memory_bandwidth_bytes_per_s
    copy_s = H100.memory_s(2 * num_bytes)
    beside_s = H100.memory_s(num_bytes, beside=Share(0, peak))
    alone_s = H100.memory_s(num_bytes)
    both_s = together_s(alone_s, beside_s, copy_s)
    assert both_s == pytest.approx(alone_s + copy_s, rel=0.25)


@given(seconds, st.floats(1.0, 4.0), seconds)
def test_together_is_between_the_longer_and_the_slowed_sum(alone_s, slower, collective_s):
    both_s = together_s(alone_s, alone_s * slower, collective_s)
    assert both_s >= max(alone_s, collective_s) * (1 - 1e-9)
    assert both_s <= max(alone_s * slower, alone_s + collective_s) * (1 + 1e-9)
