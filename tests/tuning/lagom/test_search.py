"""The search meets problems small enough to know the best: any, Lagom's, and broken ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.tuning.lagom.search import ModelledStep, search


@dataclass(frozen=True)
class Table:
    """Communications with seconds, and costs to computation, that are written down by setting."""

    each: tuple[tuple[float, ...], ...]
    costs: tuple[tuple[float, ...], ...]
    start: tuple[int, ...]
    computation_s: float = 10.0

    @property
    def axes(self):
        return tuple((len(seconds),) for seconds in self.each)

    @property
    def default(self):
        return tuple((p,) for p in self.start)

    def measure(self, config):
        each = tuple(seconds[p] for seconds, (p,) in zip(self.each, config, strict=True))
        lost = sum(costs[p] for costs, (p,) in zip(self.costs, config, strict=True))
        x, y = sum(each), self.computation_s + lost
        return ModelledStep(x, y, max(x, y), each)


seconds = st.floats(0.1, 20, allow_nan=False)


@st.composite
def tables(draw, most=4):
    """Draw any problem: nothing need fall or rise along an axis."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=most))
    each = tuple(tuple(draw(seconds) for _ in range(n)) for n in sizes)
    costs = tuple(tuple(draw(seconds) for _ in range(n)) for n in sizes)
    return Table(each, costs, tuple(draw(st.integers(0, n - 1)) for n in sizes))


@settings(max_examples=100, deadline=None)
@given(tables(), st.integers(0, 3))
def test_it_is_never_worse_than_its_starts_nor_better_than_the_best(problem, passes):
    solution = search(problem, passes=passes)
    least = problem.measure(tuple((0,) for _ in problem.axes))
    assert solution.outcome == problem.measure(solution.config)
    assert solution.outcome.step_s <= min(least.step_s, problem.measure(problem.default).step_s)
    every = itertools.product(*([(p,) for p in range(n)] for (n,) in problem.axes))
    assert solution.outcome.step_s >= min(problem.measure(config).step_s for config in every)


@settings(max_examples=100, deadline=None)
@given(tables(most=8), st.integers(0, 3))
def test_its_measurements_are_few_and_none_is_made_twice(problem, passes):
    solution = search(problem, passes=passes)
    configs = [tried.config for tried in solution.trace]
    assert len(set(configs)) == len(configs) == solution.evaluations
    n, most = len(problem.axes), max(n for (n,) in problem.axes)
    assert solution.evaluations <= 2 + n * (2 + 2 * most + passes * (most - 1))
    assert search(problem, passes=passes) == solution


def test_the_cheapest_second_is_bought_first():
    """Both save four seconds; the second costs less computation, and is enough."""
    problem = Table(((8.0, 4.0), (8.0, 4.0)), ((0.0, 3.0), (0.0, 1.0)), (0, 0), 11.9)
    solution = search(problem, passes=0)
    assert solution.config == ((0,), (1,))
    assert solution.outcome.step_s == pytest.approx(12.9)
    assert [t.config for t in solution.trace] == [
        ((0,), (0,)),
        ((1,), (0,)),  # what each would cost
        ((0,), (1,)),
    ]


def test_it_stops_where_communication_is_hidden():
    problem = Table(((20.0, 8.0, 1.0),), ((0.0, 0.5, 0.0),), (0,))
    assert search(problem, passes=0).config == ((1,),)


def test_from_a_compute_bound_default_it_walks_down():
    """The least is too slow to climb from past the bump; the default's side is better."""
    problem = Table(((30.0, 29.0, 31.0, 9.0, 8.0),), ((0.0, 0.0, 0.0, 1.0, 2.0),), (4,))
    solution = search(problem, passes=0)
    assert solution.config == ((3,),)
    assert solution.outcome.step_s == 11.0


def test_a_pass_sees_past_a_step_that_does_not_pay():
    """A channel less makes the window longer, and two less save a wave."""
    problem = Table(((9.0, 8.0, 7.0, 6.0, 5.0),), ((3.0, 3.6, 1.0, 3.5, 3.0),), (4,))
    assert search(problem, passes=0).outcome.step_s == 13.0
    assert search(problem, passes=1).config == ((2,),)


def test_of_equal_steps_the_one_that_slows_computation_less():
    problem = Table(((12.0, 12.0),), ((0.0, 1.0),), (1,))
    assert search(problem).config == ((0,),)


@settings(max_examples=50, deadline=None)
@given(tables(), st.integers(0, 20))
def test_whoever_stops_it_has_the_best_so_far(problem, most):
    budget = iter(range(most))
    solution = search(problem, stop=lambda: next(budget, None) is None)
    whole = search(problem)
    assert solution.trace == whole.trace[: most + 1]
    assert solution.trace[0].config == problem.default
    assert solution.outcome.step_s == min(t.outcome.step_s for t in solution.trace)


def test_bad_problems_are_named():
    with pytest.raises(ValueError, match="at least one setting"):
        search(Table(((),), ((),), (0,)))
    with pytest.raises(ValueError, match="does not lie"):
        search(Table(((1.0,),), ((1.0,),), (1,)))
