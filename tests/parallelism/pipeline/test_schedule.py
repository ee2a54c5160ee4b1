"""Schedules are integers: each piece once, in time, in as few slots as the closed form says."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxoverlap.parallelism.pipeline.schedule import NONE, PipelineSchedule, stage_order


@st.composite
def schedules(draw):
    p, v = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    m = draw(st.integers(1, 4)) * p if v > 1 else draw(st.integers(1, 16))
    return PipelineSchedule(p, m, v)


@given(schedules())
def test_every_piece_runs_once_each_way(schedule):
    for stage in range(schedule.stages):
        for at in (schedule.forward, schedule.backward):
            ran = [at(stage, tick) for tick in range(schedule.ticks)]
            ran = [of for of in ran if of[0] != NONE]
            assert len(ran) == len(set(ran)) == schedule.micro_batches * schedule.pieces


@given(schedules())
def test_what_a_piece_needs_was_sent_one_tick_before(schedule):
    p, v = schedule.stages, schedule.pieces
    when = {}
    for stage in range(p):
        for tick in range(schedule.ticks):
            for way, at in (("f", schedule.forward), ("b", schedule.backward)):
                micro_batch, piece = at(stage, tick)
                if micro_batch != NONE:
                    when[way, micro_batch, piece * p + stage] = tick
    for (way, micro_batch, virtual), tick in when.items():
        if way == "f" and virtual > 0:
            assert tick == when["f", micro_batch, virtual - 1] + 1
        if way == "b" and virtual < p * v - 1:
            assert tick == when["b", micro_batch, virtual + 1] + 1
        if way == "b" and virtual == p * v - 1:
            assert tick == when["f", micro_batch, virtual]  # forward comes first in a tick


@given(schedules())
def test_ticks_bubble_and_sends_are_the_closed_forms(schedule):
    p, m, v = schedule.stages, schedule.micro_batches, schedule.pieces
    assert schedule.forward(0, 0) == (0, 0)  # the first stage starts at once
    last = max(t for t in range(schedule.ticks) if schedule.forward(p - 1, t)[0] != NONE)
    assert last + 1 == schedule.forward_ticks == m * v + p - 1
    first = min(t for t in range(schedule.ticks) if schedule.backward(p - 1, t)[0] != NONE)
    assert first == schedule.warm_up_ticks == v * p - 1
    assert schedule.backward(0, schedule.ticks - 1)[0] != NONE
    assert schedule.bubble_share == pytest.approx((p - 1) / (v * m))


@given(schedules())
def test_live_pieces_are_the_closed_form_and_slots_no_more(schedule):
    tables = schedule.tables()
    most = []
    for stage in range(schedule.stages):
        live, peak, held = 0, 0, {}
        for tick in range(schedule.ticks):
            if schedule.forward(stage, tick)[0] != NONE:
                live += 1
                slot = int(tables.rows[2, stage, tick])
                assert slot not in held.values()
                held[schedule.forward(stage, tick)] = slot
            peak = max(peak, live)
            if (of := schedule.backward(stage, tick))[0] != NONE:
                live -= 1
                assert held.pop(of) == tables.rows[5, stage, tick]
        assert live == 0
        assert peak == schedule.live_pieces(stage)
        most.append(peak)
    assert tables.slots == max(most)


@given(st.integers(1, 8), st.integers(1, 8))
def test_interleaving_divides_the_bubble(p, v):
    assume(v > 1)
    plain, pieces = PipelineSchedule(p, 4 * p), PipelineSchedule(p, 4 * p, v)
    assert pieces.bubble_share == pytest.approx(plain.bubble_share / v)


def test_interleaving_wants_rounds():
    with pytest.raises(ValueError, match="rounds of 4 stages"):
        PipelineSchedule(4, 6, 2)


def test_devices_hold_pieces_in_turn():
    assert stage_order(3, 2) == [0, 3, 1, 4, 2, 5]
