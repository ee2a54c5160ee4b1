"""Schedules as tables: every pass once and in time, bubbles and memory by their closed forms."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.parallelism.pipeline.timetable import one_f_one_b, zb_h1

STAGES = st.integers(1, 6)


def in_time(table, micro_batches, chunks=1):
    """Each pass runs once, after what it needs, and a stage runs one at a time."""
    p = table.stages
    at = {(one.kind, one.micro_batch, one.chunk * p + one.stage): one for one in table.passes}
    split = any(one.kind == "W" for one in table.passes)
    assert len(at) == len(table.passes) == micro_batches * p * chunks * (3 if split else 2)
    for (kind, m, virtual), one in at.items():
        needs = {"F": ("F", m, virtual - 1), "B": ("B", m, virtual + 1), "W": ("B", m, virtual)}
        if needs[kind] in at:
            assert at[needs[kind]].end <= one.start + 1e-9
        if kind == "B":
            assert at["F", m, virtual].end <= one.start + 1e-9
    for stage in range(p):
        mine = [one for one in table.passes if one.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))


@given(STAGES, st.integers(1, 16))
def test_1f1b(p, m):
    table = one_f_one_b(p, m)
    in_time(table, m)
    assert table.step_s == pytest.approx(3 * (m + p - 1))
    assert [table.live(stage) for stage in range(p)] == [min(p - s, m) for s in range(p)]


@given(STAGES.filter(lambda p: p > 1), st.integers(1, 3), st.integers(2, 4))
def test_interleaving_divides_the_bubble(p, rounds, v):
    m = rounds * p
    table = one_f_one_b(p, m, chunks=v)
    in_time(table, m, v)
    assert table.step_s == pytest.approx(3 * (m + (p - 1) / v))
    live = [min(2 * (p - s - 1) + (v - 1) * p + 1, m * v) for s in range(p)]
    assert [table.live(stage) for stage in range(p)] == live


@given(STAGES, st.integers(0, 10), st.sampled_from([(1, 1, 1), (2, 2, 1), (1.2, 1.5, 1.0)]))
def test_zb_h1(p, more, seconds):
    """The bubble is (p - 1) (f + b - w), a third of 1F1B's where they are equal; p are live."""
    f, b, w = seconds
    m = 2 * p - 1 + more
    table = zb_h1(p, m, f=f, b=b, w=w)
    in_time(table, m)
    assert table.step_s == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))
    assert table.bubble_s == pytest.approx((p - 1) * (f + b - w))
    assert max(table.live(stage) for stage in range(p)) == p
    assert table.step_s <= one_f_one_b(p, m, f=f, b=b + w).step_s + 1e-9


@given(STAGES, st.integers(1, 8))
def test_zb_h1_of_few_micro_batches_is_in_time_too(p, m):
    in_time(zb_h1(p, m), m)


def test_a_table_prints():
    assert zb_h1(2, 3).text() == "\n".join(
        ["F0 F1 .  B0 W0 F2 B1 W1 B2 W2", ".  F0 B0 F1 B1 W0 F2 B2 W1 W2"]
    )


def test_a_table_is_drawn(tmp_path):
    path = tmp_path / "schedule.svg"
    zb_h1(4, 8).draw(path)
    assert path.read_text().count("</g>") > 4 * 8 * 3


def test_interleaving_wants_rounds():
    with pytest.raises(ValueError, match="in rounds of 4 stages"):
        one_f_one_b(4, 6, chunks=2)
