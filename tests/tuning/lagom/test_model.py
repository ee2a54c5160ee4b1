"""The unified model keeps its bounds, its arithmetic, and the directions of Lagom's patterns."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import lagom
from benchmarks.search import BALANCES, SPACES, exhaustive, problem, whole_step
from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.cost.kernels import KernelWork, MatmulKernel
from jaxoverlap.cost.model import Channels
from jaxoverlap.tuning.lagom.model import (
    Communication,
    Computation,
    Makespan,
    SettingSpace,
    memory_traffic,
    places,
)
from jaxoverlap.tuning.lagom.search import search

H100 = cost_model("h100-sxm:1x8")
GATHER = Communication("all-gather", 100 << 20, Group(8))
MATMUL = Computation(KernelWork((MatmulKernel(8192, 8192, 4096),)))
problems = st.builds(
    problem,
    st.sampled_from(["h100-sxm:1x8", "a100-sxm-80:1x8", "h200:2x8"]),
    st.sampled_from(sorted(SPACES)),
    st.sampled_from(sorted(BALANCES)),
    st.integers(1, 2),
    seed=st.integers(0, 99),
)


def test_what_runs_beside_nothing_takes_what_the_cost_model_says():
    outcome = Makespan(H100, (), (MATMUL,)).measure(())
    assert outcome.step_s == outcome.computation_s == H100.matmul_s(8192, 8192, 4096)
    alone = Makespan(H100, (GATHER,), ()).measure(((5, 3, 0, 0),))
    channels = Channels(24, 2 << 20)
    assert alone.step_s == H100.collective_s("all-gather", 100 << 20, Group(8), channels)


def test_computation_is_slowed_inside_the_window_and_not_after_it():
    short = Makespan(H100, (GATHER,), (Computation(MATMUL.work, runs=4),))
    place = short.default[0]
    slowed_s, alone_s, window_s = (
        short.slowed_s(0, 0, place),
        short.alone_s(0),
        short.seconds(0, place),
    )
    assert window_s < 4 * slowed_s
    left = 4 - window_s / slowed_s
    assert short.measure((place,)).computation_s == pytest.approx(window_s + left * alone_s)
    long = Makespan(H100, (GATHER, GATHER, GATHER, GATHER), (MATMUL,))
    assert long.measure((place,) * 4).computation_s == pytest.approx(slowed_s)


@settings(max_examples=20, deadline=None)
@given(problems)
def test_more_channels_never_slow_their_communication_nor_speed_what_is_beside(p):
    space = p.communications[0].space
    for place in places(p.axes[0]):
        if place[0] + 1 == len(space.counts):
            continue
        more = (place[0] + 1, *place[1:])
        assert p.seconds(0, more) <= p.seconds(0, place)
        for i in range(len(p.computations)):
            assert p.alone_s(i) <= p.slowed_s(i, 0, place) * (1 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(problems)
def test_the_yardstick_knows_the_best_of_all(p):
    """Arrays of all combinations give the same best as one by one."""
    every = itertools.product(*map(places, p.axes))
    best_s = min(p.measure(config).step_s for config in every)
    assert exhaustive(p) == pytest.approx(best_s)
    solution = search(p)
    assert best_s * (1 - 1e-9) <= solution.outcome.step_s <= p.measure(p.default).step_s
    assert search(p) == solution
    descended, tried = whole_step(p)
    assert best_s * (1 - 1e-9) <= p.measure(descended).step_s
    assert tried <= math.prod(math.prod(axes) for axes in p.axes)


def test_pieces_show_less_and_cost_launches():
    """By hand: one piece of each is bare, the rest hides; cut in eight the gather takes longer."""
    space = SettingSpace((24,), (2 << 20,), pieces=(1, 4, 8))
    gather = Communication("all-gather", 40 << 20, Group(8), site=0, space=space)
    p = Makespan(H100, (gather,), (MATMUL,))
    whole, four, eight = (p.measure(((0, 0, 0, n),)) for n in range(3))
    assert whole.step_s == pytest.approx(whole.each_s[0] + p.alone_s(0))
    assert whole.each_s[0] < four.each_s[0] < eight.each_s[0]
    assert four.step_s < whole.step_s
    beside_s = 0.75 * four.each_s[0]
    slowed = p.slowed_s(0, 0, (0, 0, 0, 1)) / p.alone_s(0)
    matmul_s = p.alone_s(0) * p.in_pieces(0, (0, 0, 0, 1))
    computation_s = beside_s + matmul_s - beside_s / slowed
    assert four.step_s == pytest.approx(four.each_s[0] / 4 + computation_s)
    assert four.exposed


def test_a_matmul_with_less_cache_reads_more():
    m = MatmulKernel(8192, 10240, 2560)
    assert memory_traffic(m, 1 << 40) == m.memory_bytes
    # 2 m n k / sqrt(S) elements of 2 bytes, S of a 6 MiB cache
    assert memory_traffic(m, 6 << 20) == pytest.approx(4 * 8192 * 10240 * 2560 / 1773.6, rel=1e-4)
    assert memory_traffic(m, 6 << 18) == pytest.approx(2 * memory_traffic(m, 6 << 20))


def test_fewer_threads_and_smaller_chunks_are_slower_alone():
    rate = {n: Channels(4, 2 << 20, n).bytes_per_s((8, 0)) for n in (96, 192, 512)}
    assert rate[96] < rate[192] == rate[512]
    assert Channels(4, 64 << 10).bytes_per_s((8, 0)) < rate[512]


@pytest.mark.parametrize("tokens", lagom.BATCHES)
def test_lagoms_patterns_have_their_directions(tokens):
    """From NCCL's default fewer channels and smaller chunks win, and 61 channels lose."""
    gather, both = lagom.first(tokens), lagom.second(tokens)
    most = (lagom.SPACE.near(Channels(61, 2 << 20)),)
    assert lagom.SPACE.setting(gather.default[0])[0] == lagom.DEFAULT
    assert lagom.speedup(gather, most) < 0.95
    for p in (gather, both):
        assert not p.measure(p.default).exposed
        best = search(p).config
        assert lagom.speedup(p, best) > 1.05
        for place in best:
            channels, _ = lagom.SPACE.setting(place)
            assert channels.count < 8 and channels.chunk_bytes < 2 << 20


def test_the_fitted_slowdown_is_lagoms():
    assert 1.30 < lagom.slowdown(lagom.first(8192)) < 1.35


def test_bad_problems_are_named():
    with pytest.raises(ValueError, match="that rise"):
        SettingSpace((4, 2))
    with pytest.raises(ValueError, match="above zero"):
        SettingSpace((0, 2))
    with pytest.raises(ValueError, match="no computation twice"):
        Makespan(H100, (Communication("all-gather", 1, Group(8), site=1),), (MATMUL,))
    with pytest.raises(ValueError, match="one thread"):
        Channels(1, threads=0)
