"""A loop hides the collectives around it, where memory allows what is then alive beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.passes.estimation.list_schedule import Rule, Turn, list_schedule, order_outcome
from jaxoverlap.passes.estimation.tasks import Flight, Problem, Task
from jaxoverlap.passes.scheduling.reorder import best

AVERAGE, LOOP = 10, 40  # bytes


def a_round(averages: Sequence[float], loop_s: float) -> Problem:
    """Return XLA's order of a round: averages, what reads them, the loop, and what reads both."""
    tasks, buffers, readers = [], [], []
    for seconds in averages:
        start = len(tasks)
        buffers.append(AVERAGE)
        tasks += [
            Task(flight=Flight("network", seconds), holds=(len(buffers) - 1,)),
            Task(needs=(start,), awaits=start, holds=(len(buffers) - 1,)),
            Task(needs=(start + 1,), seconds=0.1, holds=(len(buffers) - 1,)),
        ]
        readers.append(start + 2)
    loop = Task(seconds=loop_s, extra_bytes=LOOP)
    last = Task(needs=(*readers, len(tasks)), seconds=0.1)
    return Problem((*tasks, loop, last), tuple(buffers))


def outcome(problem: Problem, ceiling_bytes: int) -> float:
    return best(problem, ceiling_bytes, 8)[1].seconds


@pytest.mark.parametrize("averages", ((12.0,), (12.0, 12.0), (12.0, 3.0, 9.0)))
def test_all_averages_go_under_the_loop(averages: Sequence[float]):
    problem = a_round(averages, loop_s=320.0)
    roomy = LOOP + AVERAGE * len(averages)
    exposed = outcome(problem, roomy) - 320.0 - 0.1 * (len(averages) + 1)
    assert exposed == pytest.approx(0.0, abs=1e-9)


def test_without_the_room_for_it_the_average_comes_first():
    problem = a_round((12.0,), loop_s=320.0)
    xla_s = order_outcome(problem, range(len(problem.tasks))).seconds
    assert outcome(problem, LOOP) == xla_s == pytest.approx(332.2)


@given(
    st.lists(st.floats(0.01, 30.0), min_size=1, max_size=4),
    st.floats(0.01, 50.0),
    st.sampled_from(get_args(Turn)),
    st.sampled_from((1.0, 2.0, math.inf)),
    st.booleans(),
)
def test_orders_are_whole_and_never_break_what_needs_what(averages, loop_s, turn, lead, roomy):
    problem = a_round(averages, loop_s)
    ceiling = LOOP + AVERAGE * len(averages) * roomy
    order = list_schedule(problem, Rule({"network": lead}, turn, 8, ceiling))
    position = {index: at for at, index in enumerate(order)}
    assert sorted(order) == list(range(len(problem.tasks)))
    for index, task in enumerate(problem.tasks):
        assert all(position[need] < position[index] for need in task.needs)


@given(st.lists(st.floats(0.01, 30.0), min_size=1, max_size=4), st.floats(0.01, 50.0))
def test_a_round_takes_what_is_longer_and_no_more_than_xla_s_order(averages, loop_s):
    problem = a_round(averages, loop_s)
    found = outcome(problem, LOOP + AVERAGE * len(averages))
    small = 0.1 * (len(averages) + 1)
    assert found <= order_outcome(problem, range(len(problem.tasks))).seconds + 1e-9
    least = max(loop_s, sum(averages))
    assert least <= found <= (least + small) * 1.01  # an order in less memory may be 1% slower
