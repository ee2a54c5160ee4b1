"""Fewer channels for all collectives give SMs back to kernels, where the collectives have time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.simulation.channels import fewer_channels
from jaxoverlap.simulation.simulation import simulate
from tests.tuning.lagom.test_channels import EXPOSED, HIDDEN, HOST, MIB


def test_a_gather_with_time_to_spare_has_fewer_channels():
    found = fewer_channels(HIDDEN, HOST)
    assert found is not None
    assert found.max_ctas < HOST.share("all-gather", 56 * MIB, Group(8)).sms
    assert found.before.step_s == simulate(HIDDEN, HOST).step_s
    assert found.step.step_s == simulate(HIDDEN, HOST, max_ctas=found.max_ctas).step_s
    assert found.step.slowdown_s < found.before.slowdown_s
    assert f"NCCL_MAX_CTAS={found.max_ctas} " in str(found)


def test_a_gather_that_is_waited_for_keeps_nccls_own():
    assert fewer_channels(EXPOSED, HOST) is None


def test_a_cluster_may_be_named():
    assert fewer_channels(HIDDEN, "h100-sxm:1x8") == fewer_channels(HIDDEN, HOST)


@given(
    st.sampled_from(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]),
    st.sampled_from([("h100-sxm:1x8", 8, 1), ("a100-sxm-80:4x8", 32, 4), ("gb200:2x4", 8, 1)]),
    st.integers(0, 1 << 32),
    st.integers(1, 64),
)
def test_a_limit_never_speeds_a_collective_up_nor_gives_it_more_sms(kind, where, moved, most):
    pod, size, domains = where
    own, group = cost_model(pod), Group(size, domains)
    limited = replace(own, most_channels=most)
    assert limited.collective_s(kind, moved, group) >= own.collective_s(kind, moved, group)
    sms = limited.share(kind, moved, group).sms
    assert sms <= min(most, own.share(kind, moved, group).sms)
    if most >= own.share(kind, moved, group).sms:
        assert limited.collective_s(kind, moved, group) == own.collective_s(kind, moved, group)


def test_copies_take_no_channels_and_permutes_at_most_so_many():
    limited = replace(HOST, most_channels=1)
    copied = Group(2, by_copy=True)
    for ask in ("collective_s", "share"):
        own = getattr(HOST, ask)("collective-permute", 56 * MIB, copied)
        assert getattr(limited, ask)("collective-permute", 56 * MIB, copied) == own
    assert limited.share("collective-permute", 56 * MIB, Group(2)).sms == 1


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at most 0 channels: give 1 or more, or None"):
        simulate(HIDDEN, HOST, max_ctas=0)
