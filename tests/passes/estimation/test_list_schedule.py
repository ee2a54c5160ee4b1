"""Tasks of any kind get an order, under the ceiling, with collectives over what hides them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.passes.estimation.list_schedule import (
    OrderOutcome,
    Rule,
    Turn,
    list_schedule,
    live_bytes,
    most_unarrived,
    move_start_earlier,
    order_outcome,
)
from jaxoverlap.passes.estimation.synchronous import ahead, as_compiled, synchronous
from jaxoverlap.passes.estimation.tasks import Flight, Problem, Task
from jaxoverlap.passes.scheduling.reorder import best

UNBOUND = 10**12
TURNS: tuple[Turn, ...] = get_args(Turn)
RULES = [
    Rule({"wire": lead, "network": lead}, turn, in_flight, UNBOUND)
    for lead, turn, in_flight in itertools.product((1.0, float("inf")), TURNS, (1, 8))
]


def start(seconds: float, *needs: int, lane: str = "wire") -> Task:
    return Task(needs, flight=Flight(lane, seconds))


def done(of: int) -> Task:
    return Task((of,), awaits=of)


def compute(seconds: float, *needs: int) -> Task:
    return Task(needs, seconds, is_matmul=True)


def of(*tasks: Task) -> Problem:
    return Problem(tasks)


def is_order(problem: Problem, order: Sequence[int]) -> bool:
    position = {index: at for at, index in enumerate(order)}
    return sorted(order) == list(range(len(problem.tasks))) and all(
        position[need] < position[index]
        for index, task in enumerate(problem.tasks)
        for need in task.needs
    )


@st.composite
def problems(draw) -> Problem:
    tasks: list[Task] = []
    for index in range(draw(st.integers(1, 20))):
        needs = tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else ()
        kind = draw(st.sampled_from(["compute", "free", "start", "done"]))
        waiting = [
            i
            for i, task in enumerate(tasks)
            if task.flight and not any(t.awaits == i for t in tasks)
        ]
        holds = tuple(draw(st.sets(st.integers(0, 5), max_size=2)))
        seconds = draw(st.integers(1, 5))
        if kind == "start":
            lane = draw(st.sampled_from(["wire", "network"]))
            stream = draw(st.sampled_from([None, 0, 3]))
            tasks.append(Task(needs, flight=Flight(lane, seconds, stream), holds=holds))
        elif kind == "done" and waiting:
            tasks.append(Task((*needs, waiting[0]), awaits=waiting[0], holds=holds))
        elif kind == "compute":
            tasks.append(Task(needs, seconds, holds=holds, is_matmul=draw(st.booleans())))
        else:
            tasks.append(Task(needs, holds=holds))
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=6, max_size=6)))
    kept = frozenset(draw(st.sets(st.integers(0, 5), max_size=2)))
    starts = [i for i, task in enumerate(tasks) if task.flight]
    pairs = draw(st.sets(st.tuples(*[st.sampled_from(starts)] * 2), max_size=3)) if starts else ()
    apart: dict[int, frozenset[int]] = {}
    for a, b in pairs:
        for one, other in ((a, b), (b, a)) if a != b else ():
            apart[one] = apart.get(one, frozenset()) | {other}
    return Problem(tuple(tasks), sizes, kept, apart)


@given(problems(), st.sampled_from(RULES), st.sampled_from([0, 5, 12, UNBOUND]))
@settings(max_examples=300, deadline=None)
def test_every_rule_gives_an_order(problem: Problem, rule: Rule, ceiling: int):
    rule = Rule(rule.leads, rule.turn, rule.in_flight, ceiling)
    order = list_schedule(problem, rule)
    assert is_order(problem, order)
    outcome = order_outcome(problem, order)
    compute_s = sum(task.seconds for task in problem.tasks)
    assert outcome.seconds >= compute_s
    assert outcome.seconds <= compute_s + sum(t.flight.seconds for t in problem.tasks if t.flight)
    assert all(
        is_order(problem, move_start_earlier(problem, order, start)) for start in outcome.unhidden
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_collectives_that_must_not_meet_never_do(kinds: list[tuple[int, bool]], data):
    """Those over all devices, on one stream, and those over NVLink, on another."""
    tasks: list[Task] = []
    over_all, near = set[int](), set[int]()
    for seconds, everywhere in kinds:
        (over_all if everywhere else near).add(len(tasks))
        flight = Flight("network", seconds, 0) if everywhere else Flight("wire", seconds, 3)
        tasks += [Task(flight=flight), Task((len(tasks),), awaits=len(tasks))]
        tasks.append(Task((len(tasks) - 1,) if data.draw(st.booleans()) else (), 2))
    apart = {i: frozenset(near if i in over_all else over_all) for i in over_all | near}
    problem = Problem(tuple(tasks), apart=apart)
    for rule in RULES:
        order = list_schedule(problem, rule)
        assert is_order(problem, order)
        assert order_outcome(problem, order).clashes == 0
    together = Problem(tuple(tasks))
    assert order_outcome(together, order).clashes == 0


def test_a_start_waits_on_its_link_and_on_its_stream():
    def seconds(near: int, far: int) -> float:
        flights = Task(flight=Flight("wire", 4, near)), Task(flight=Flight("network", 6, far))
        tasks = of(*flights, compute(1), done(0), compute(1, 3), done(1), compute(1, 5))
        return order_outcome(tasks, range(7)).seconds

    assert seconds(0, 0) == 11
    assert seconds(3, 0) == 7


def test_a_start_comes_before_the_matmul_that_can_hide_it():
    xla = of(compute(5), start(5), done(1), compute(1, 2))
    assert order_outcome(xla, range(4)) == OrderOutcome(11, 0, (1,))
    order = list_schedule(xla, RULES[0])
    assert order == [1, 0, 2, 3]
    assert order_outcome(xla, order) == OrderOutcome(6, 0, ())


def test_what_only_other_kernels_hide_starts_before_a_matmul_where_that_costs_nothing():
    """Started as early as it could be, the gather takes the link from the hop."""
    made, kernel = Task((), 1), Task((2,), 3)
    late = (start(20), *(compute(5, 6) for _ in range(10)), done(7), compute(1, *range(8, 19)))
    xla = of(made, start(2, 0), compute(5), kernel, done(1), Task((3, 4), 1), compute(1, 5), *late)
    leads = [list_schedule(xla, Rule({"wire": lead}, "first", 8, UNBOUND)) for lead in (2.0, 1e9)]
    held, eager = (order_outcome(xla, order) for order in leads)
    compute_s = sum(task.seconds for task in xla.tasks)
    assert held == OrderOutcome(compute_s, 0, (1,)) and eager.seconds > compute_s
    assert move_start_earlier(xla, leads[0], 1)[:3] == [0, 1, 2]
    assert best(xla, UNBOUND, 8)[1] == OrderOutcome(compute_s, 0, ())


def test_a_start_is_not_put_earlier_where_too_many_would_be_on_their_way():
    """The hop can hide under the first matmul, but then another one is still on the other link."""
    other, kernel = start(5, lane="slow"), Task((1, 2), 5)
    problem = of(other, compute(5), done(0), start(2), kernel, done(3), Task((4, 5), 1))
    order = range(7)
    assert order_outcome(problem, order).unhidden == (3,) and most_unarrived(problem, order) == 1
    assert most_unarrived(problem, move_start_earlier(problem, order, 3)) == 2
    alone, both = best(problem, UNBOUND, 1), best(problem, UNBOUND, 2)
    assert most_unarrived(problem, alone[0]) == 1 and len(alone[1].unhidden) == 1
    assert both[1] == OrderOutcome(alone[1].seconds, 0, ())


def test_what_is_ready_runs_while_xla_would_wait_if_the_rule_says_so():
    xla = of(start(5), done(0), compute(1, 1), compute(5))
    first, ready = (list_schedule(xla, Rule({"wire": 1.0}, turn, 8, UNBOUND)) for turn in TURNS[:2])
    assert order_outcome(xla, first).seconds == 11
    assert (ready, order_outcome(xla, ready).seconds) == ([0, 3, 1, 2], 6)


def test_what_nothing_waits_for_is_kept_for_a_wait_by_the_longest_path():
    """XLA puts a weight's gradient first, and then there is nothing left to hide the hop."""
    xla = of(compute(5), compute(1), start(5, 1), done(2), compute(1, 3))
    turns: tuple[Turn, ...] = ("ready", "path")
    ready, path = (list_schedule(xla, Rule({"wire": 1.0}, turn, 8, UNBOUND)) for turn in turns)
    assert order_outcome(xla, ready).seconds == 12
    assert (path, order_outcome(xla, path).seconds) == ([1, 2, 0, 3, 4], 7)


def test_one_of_two_parts_runs_ahead_to_its_next_collective():
    """In lockstep both collectives come last, and only one has something to hide behind."""
    halves = [
        *(compute(2), compute(2), compute(2, 0), compute(2, 1)),
        *(start(4, 2), start(4, 3), done(4), done(5)),
        *(compute(4, 6), compute(4, 7)),
    ]
    turns: tuple[Turn, ...] = ("path", "feed")
    seconds = {
        turn: order_outcome(
            of(*halves), list_schedule(of(*halves), Rule({"wire": 1e9}, turn, 8, UNBOUND))
        ).seconds
        for turn in turns
    }
    assert seconds == {"path": 18, "feed": 16}


def test_a_task_feeds_the_starts_that_it_leads_to_first():
    problem = of(compute(1), compute(2, 0), start(1, 1), done(2), compute(3, 3), start(1, 4, 0))
    assert [fed.tolist() for fed in problem.feeds.positions] == [[0, 1], [0], [], [1], [1], []]
    assert problem.feeds.masks == [0b11, 0b1, 0, 0b10, 0b10, 0]


def test_it_waits_a_little_for_a_collective_that_sets_off_the_next_one_sooner():
    """The small sum of one part's norm is nearly there; the other part's matmul can wait for it."""
    norm, matmul = start(1), compute(10)
    problem = of(norm, matmul, start(5, 1), done(0), compute(1, 3), start(9, 4, lane="network"),
                 done(2), done(5), compute(1, 6), compute(9, 7))  # fmt: skip
    feed, wait = (list_schedule(problem, replace(RULES[-1], turn=turn)) for turn in TURNS[-2:])
    assert feed.index(1) < feed.index(3) and wait.index(3) < wait.index(1)
    assert order_outcome(problem, feed).seconds == 29
    assert order_outcome(problem, wait).seconds == 22


def test_an_early_start_does_not_take_the_link_from_an_urgent_one():
    """The gather for the end is ready first; the hop after it is what the next matmul waits for."""
    late, hop = start(4), start(1, 2)
    xla = of(late, compute(1), compute(1, 1), hop, done(3), *(compute(1, 4 + i) for i in range(6)),
             done(0), compute(1, 11))  # fmt: skip
    held = list_schedule(xla, Rule({"wire": 1.0}, "first", 8, UNBOUND))
    assert held.index(3) < held.index(0)
    eager = list_schedule(xla, Rule({"wire": float("inf")}, "first", 8, UNBOUND))
    assert eager.index(0) < eager.index(3)
    assert order_outcome(xla, held).seconds < order_outcome(xla, eager).seconds


def test_one_link_may_lead_while_another_holds_back():
    """Two that end together on the slow link must start early; on the other one a hop is urgent."""
    tasks = (start(4), compute(1), start(1, 1), done(2), start(3, 1, lane="slow"),
             start(3, 1, lane="slow"), *(compute(1, 3) for _ in range(6)), done(0), done(4), done(5),
             compute(1, *range(6, 15)))  # fmt: skip
    problem = of(*tasks)

    def seconds(wire: float, slow: float) -> float:
        order = list_schedule(problem, Rule({"wire": wire, "slow": slow}, "ready", 8, UNBOUND))
        return order_outcome(problem, order).seconds

    assert seconds(1.0, 2.0) < min(seconds(1.0, 1.0), seconds(2.0, 2.0))


def test_no_more_are_on_their_way_than_allowed():
    tasks = [
        start(5),
        start(5),
        start(5),
        compute(20),
        done(0),
        done(1),
        done(2),
        compute(1, 4, 5, 6),
    ]
    order = list_schedule(of(*tasks), Rule({"wire": float("inf")}, "ready", 2, UNBOUND))
    assert sorted(order[:2]) == [0, 1] and order.index(3) < order.index(2)


def test_memory_that_does_not_fit_waits():
    """Two independent pairs of a large value and its reader: out of order both are live at once."""
    tasks = (
        start(5),
        Task((0,), awaits=0),
        Task((1,), 1, holds=(0,)),
        Task((2,), 1, holds=(0,)),
        Task((), 1, holds=(1,)),
        Task((3, 4), 1, holds=(1,)),
    )
    problem = Problem(tasks, (10, 10))
    assert order_outcome(problem, range(6)).peak_bytes == 10
    filled = list_schedule(problem, Rule({"wire": 1.0}, "ready", 8, UNBOUND))
    assert order_outcome(problem, filled).peak_bytes == 20
    bound = list_schedule(problem, Rule({"wire": 1.0}, "ready", 8, 10))
    assert order_outcome(problem, bound).peak_bytes <= 20 and is_order(problem, bound)


def two_large_values(sum_s: float, *summed: int) -> Problem:
    """Two large values, each with a kernel that reads it, and a sum that one or both set off."""
    tasks = (
        Task((), 1, holds=(0,)),
        Task((), 1, holds=(1,)),
        Task((0,), 1, holds=(0,)),
        Task((1,), 1, holds=(1,)),
        start(sum_s, *summed),
        done(4),
        Task((5,), 1),
    )
    return Problem(tasks, (10, 10))


def test_of_equally_fast_orders_one_that_needs_less_memory_is_found():
    order, outcome = best(two_large_values(0.5, 1), 22, 8)
    assert outcome.seconds == 5 and outcome.peak_bytes == 10
    assert order.index(2) < order.index(1) or order.index(3) < order.index(0)


def test_less_memory_is_not_worth_a_wait():
    """The sum hides behind the kernels that read both values, if both are made before."""
    order, outcome = best(two_large_values(2, 0, 1), 22, 8)
    assert outcome.seconds == 5 and outcome.peak_bytes == 20
    assert order.index(4) < min(order.index(2), order.index(3))


@pytest.mark.parametrize("lanes, seconds", [(("a", "a"), 10), (("a", "b"), 5)])
def test_a_lane_carries_one_collective_at_a_time(lanes: tuple[str, str], seconds: float):
    problem = of(*(start(5, lane=lane) for lane in lanes), done(0), done(1))
    assert order_outcome(problem, range(4)).seconds == seconds


def test_live_bytes_are_counted_from_the_first_holder_to_the_last():
    tasks = (
        Task((), 1, holds=(0,)),
        Task((0,), 1, holds=(0, 1)),
        Task((1,), 1, holds=(1,), extra_bytes=7),
        Task((2,), 1, holds=(2,)),
    )
    assert [*live_bytes(Problem(tasks, (1, 10, 3)), range(4))] == [1, 11, 17, 3]
    assert order_outcome(Problem(tasks, (1, 10, 3)), range(4)).peak_bytes == 17
    assert order_outcome(Problem(tasks, (1, 10, 3), frozenset({0, 1})), range(4)).peak_bytes == 18


def test_a_synchronous_permute_is_not_sent_behind_weights_that_nobody_waits_for():
    """Seen in Gemma 3 on 64 GPUs: 10 ms of weights went before the permute that the step needs."""
    permute, weights = start(1), start(9)
    problem = of(permute, weights, done(0), compute(20, 2), done(1), compute(1, 3, 4))
    order = list(range(6))
    assert order_outcome(problem, order).seconds == 22
    assert as_compiled(problem, order) == [1, 0, 2, 3, 4, 5]
    assert order_outcome(problem, as_compiled(problem, order)).seconds == 31
    assert ahead(problem, order) == [0, 2, 1, 3, 4, 5]
    assert order_outcome(problem, ahead(problem, order)).seconds == 22
    assert best(problem, UNBOUND, 8)[1].seconds == 22


def test_a_synchronous_collective_goes_beside_another_link_and_before_a_wait():
    other, own = start(9, lane="network"), start(4)
    beside = of(own, other, done(0), compute(9, 2), done(1), compute(1, 3, 4))
    assert ahead(beside, range(6)) == [1, 0, 2, 3, 4, 5]
    waiting = of(other, compute(1), own, done(0), done(2), compute(1, 3, 4))
    assert as_compiled(waiting, range(6)) == [0, 1, 3, 2, 4, 5]
    assert ahead(waiting, range(6)) == [0, 1, 2, 4, 3, 5]
    late, early = (f(waiting, range(6)) for f in (as_compiled, ahead))
    assert order_outcome(waiting, late).seconds == order_outcome(waiting, early).seconds + 4


@given(problems(), st.sampled_from(RULES))
@settings(max_examples=300, deadline=None)
def test_what_xla_makes_synchronous_stands_where_xla_puts_it(problem: Problem, rule: Rule):
    listed = list_schedule(problem, rule)
    for order in (as_compiled(problem, listed), ahead(problem, listed)):
        assert is_order(problem, order)
        assert synchronous(problem, listed).items() <= synchronous(problem, order).items()
    assert as_compiled(problem, order) == as_compiled(problem, as_compiled(problem, order))
