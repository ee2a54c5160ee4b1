"""A body's equations are put in order, some of them merged: integers only, no jaxprs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.passes.analysis.equation_order import EquationOrder


@dataclass
class Eqn:
    """An equation, as `EquationOrder` reads it: numbers are variables."""

    invars: list[int]
    outvars: list[int]
    effects: frozenset[str] = frozenset()


def chain(*needs: Sequence[int], effects: Sequence[int] = ()) -> list[Eqn]:
    """Return equations that each give the variable of their number, and read others'."""
    return [
        Eqn(list(reads), [position], frozenset({"print"}) if position in effects else frozenset())
        for position, reads in enumerate(needs)
    ]


def test_what_is_not_touched_stays_in_order():
    eqns = chain([], [0], [], [1, 2], [])
    assert EquationOrder(eqns).positions() == [0, 1, 2, 3, 4]
    assert EquationOrder([]).positions() == []


def test_operands_of_the_body_are_no_equations():
    assert EquationOrder([Eqn([100, 101], [0]), Eqn([100, 0], [1])]).positions() == [0, 1]


def test_merged_equations_stand_where_all_have_what_they_read():
    # 2 reads what 1 gives: the group of 0 and 2 comes after it.
    order = EquationOrder(chain([], [], [1], [0]))
    assert order.merge(0, 2)
    assert order.positions() == [1, 0, 3]
    assert [order.first(position) for position in range(4)] == [0, 1, 0, 3]


def test_a_group_grows():
    order = EquationOrder(chain([], [], [], [], [3]))
    assert order.merge(0, 2)
    assert order.merge(3, 2)  # any place names its group
    assert order.first(3) == 0
    assert order.positions() == [0, 1, 4]
    assert order.merge(0, 3), "they are one already"
    assert order.positions() == [0, 1, 4]


def test_several_are_merged_at_once_or_none():
    order = EquationOrder(chain([], [], [1], [2]))
    assert not order.merge(0, 1, 3), "3 reads of 2, which reads of 1"
    assert order.positions() == [0, 1, 2, 3]
    assert order.merge(0, 1)
    assert order.positions() == [0, 2, 3]


def test_an_equation_may_be_merged_with_the_one_it_reads():
    # An add is merged into the matmuls whose results it adds.
    order = EquationOrder(chain([], [], [0, 1], [2]))
    assert order.merge(0, 1, 2)
    assert order.positions() == [0, 3]


def test_one_that_reads_the_other_by_a_third_is_not():
    order = EquationOrder(chain([], [0], [1]))
    assert not order.merge(0, 2)
    assert [order.first(position) for position in range(3)] == [0, 1, 2]
    assert order.positions() == [0, 1, 2]


def test_two_groups_that_would_wait_for_each_other_are_not_both_made():
    # 2 reads of 1 and 3 of 0: with 0 + 2 and 1 + 3 each would come before the other.
    order = EquationOrder(chain([], [], [1], [0]))
    assert order.merge(0, 2)
    assert not order.merge(1, 3)
    assert order.positions() == [1, 0, 3]


def test_one_may_be_told_to_wait():
    order = EquationOrder(chain([], [], []))
    assert order.put_after(2, 0)
    assert order.positions() == [1, 2, 0]
    assert not order.put_after(0, 2), "that is a circle"
    assert order.put_after(2, 0), "it does already"
    assert order.positions() == [1, 2, 0]


def test_none_waits_for_what_waits_for_it():
    order = EquationOrder(chain([], [0], [1]))
    assert not order.put_after(2, 0)
    assert not order.put_after(0, 0)
    assert order.merge(1, 0)
    assert not order.put_after(0, 1), "they are one"
    assert order.positions() == [0, 2]


def test_a_merge_may_not_undo_a_wait():
    order = EquationOrder(chain([], [0], [], []))
    assert order.put_after(1, 2)
    assert not order.merge(0, 2)
    assert order.merge(0, 3)
    assert order.positions() == [0, 1, 2]


def test_what_was_refused_leaves_no_trace():
    order = EquationOrder(chain([], [0], [1], []))
    assert not order.put_after(2, 0)
    assert not order.merge(0, 2)
    assert order.put_after(0, 3)
    assert order.merge(0, 1)
    assert order.positions() == [0, 2, 3]


def test_effects_stay_in_the_order_they_were_written_in():
    order = EquationOrder(chain([], [], [], [], effects=[0, 1, 3]))
    assert not order.put_after(3, 1)
    assert order.put_after(2, 0)  # 2 has none
    assert order.positions() == [2, 0, 1, 3]


def test_a_group_does_not_take_an_effect_past_another():
    order = EquationOrder(chain([], [], [], effects=[0, 1, 2]))
    assert not order.merge(0, 2)
    assert order.merge(0, 1)


# -- whatever is asked for ------------------------------------------------------------------------


@st.composite
def bodies(draw) -> list[Eqn]:
    eqns = []
    for position in range(draw(st.integers(0, 9))):
        reads = draw(st.sets(st.integers(0, position - 1), max_size=3)) if position else set()
        effects = draw(st.sampled_from([(), (), (), ("print",)]))
        eqns.append(Eqn(sorted(reads), [position], frozenset(effects)))
    return eqns


_requests = st.lists(
    st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 8)), max_size=8
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(bodies(), _requests)
def test_the_order_respects_all_that_was_granted(eqns: list[Eqn], requests):
    order = EquationOrder(eqns)
    merged, waits = [], []
    for merge, one, other in requests:
        if max(one, other) >= len(eqns):
            continue
        before = order.positions()
        granted = order.merge(one, other) if merge else order.put_after(one, other)
        if granted:
            (merged if merge else waits).append((one, other))
        else:
            assert order.positions() == before
    placed = order.positions()
    groups = [order.first(position) for position in range(len(eqns))]
    assert sorted(placed) == sorted(set(groups))
    assert all(groups[g] == g == min(p for p, q in enumerate(groups) if q == g) for g in groups)
    assert all(groups[one] == groups[other] for one, other in merged)
    at = {position: placed.index(groups[position]) for position in range(len(eqns))}
    reads = [(need, position) for position, eqn in enumerate(eqns) for need in eqn.invars]
    for earlier, later in (*reads, *waits):
        assert at[earlier] < at[later] or groups[earlier] == groups[later]
    effects = [at[position] for position, eqn in enumerate(eqns) if eqn.effects]
    assert effects == sorted(effects)


class Sorted:
    """A slow `EquationOrder` that sorts the whole body for each request."""

    def __init__(self, eqns: list[Eqn]):
        effects = [position for position, eqn in enumerate(eqns) if eqn.effects]
        self.edges = {(need, position) for position, eqn in enumerate(eqns) for need in eqn.invars}
        self.edges |= set(itertools.pairwise(effects))
        self.group = list(range(len(eqns)))

    def positions(self) -> list[int] | None:
        placed, left = [], sorted(set(self.group))
        while left:
            waits = {
                self.group[b]
                for a, b in self.edges
                if self.group[a] in left and self.group[a] != self.group[b]
            }
            ready = [group for group in left if group not in waits]
            if not ready:
                return None
            placed.append(ready[0])
            left.remove(ready[0])
        return placed

    def merge(self, *positions: int) -> bool:
        groups = {self.group[position] for position in positions}
        before, self.group = self.group, [min(groups) if g in groups else g for g in self.group]
        if self.positions() is None:
            self.group = before
            return False
        return True

    def put_after(self, position: int, later: int) -> bool:
        if self.group[position] == self.group[later]:
            return False
        before, self.edges = self.edges, self.edges | {(position, later)}
        if self.positions() is None:
            self.edges = before
            return False
        return True


@st.composite
def bodies_and_requests(draw) -> tuple[list[Eqn], list[tuple[str, tuple[int, ...]]]]:
    length = draw(st.integers(1, 24))
    random = draw(st.randoms(use_true_random=False))
    reads = [
        sorted(random.sample(range(position), min(position, random.choice((0, 1, 1, 2)))))
        for position in range(length)
    ]
    eqns = chain(*reads, effects=random.sample(range(length), random.randrange(3) % length))
    requests = []
    for _ in range(random.randrange(24)):
        kind = random.choice(("merge", "merge", "put_after"))
        count = random.choice((1, 2, 2, 2, 3)) if kind == "merge" else 2
        requests.append((kind, tuple(random.choices(range(length), k=count))))
    return eqns, requests


@settings(max_examples=500, deadline=None)
@given(bodies_and_requests())
def test_every_answer_is_that_of_sorting_the_whole_body(drawn):
    eqns, requests = drawn
    order, oracle = EquationOrder(eqns), Sorted(eqns)
    for kind, positions in requests:
        assert getattr(order, kind)(*positions) == getattr(oracle, kind)(*positions)
        assert order.positions() == oracle.positions()
        assert [order.first(position) for position in range(len(eqns))] == oracle.group


@settings(max_examples=100, deadline=None)
@given(bodies())
def test_an_order_that_nobody_changed_is_the_one_written(eqns: list[Eqn]):
    assert EquationOrder(eqns).positions() == list(range(len(eqns)))


@settings(max_examples=100, deadline=None)
@given(bodies(), st.integers(0, 8), st.integers(0, 8))
def test_a_merge_is_refused_only_for_a_path_by_others(eqns: list[Eqn], one: int, other: int):
    if max(one, other) >= len(eqns):
        return
    one, other = sorted((one, other))
    after: set[int] = set()  # what waits for `one` by at least one equation in between
    last, seen = None, {one}
    for position, eqn in enumerate(eqns):
        needs = {*eqn.invars} | ({last} if eqn.effects and last is not None else set())
        last = position if eqn.effects else last
        if position > one and needs & seen:
            seen.add(position)
            if needs & (seen - {one}):
                after.add(position)
    assert EquationOrder(eqns).merge(one, other) == (one == other or other not in after)


def test_a_long_body_is_sorted_soon():
    order = EquationOrder(chain([], *([position] for position in range(299))))
    assert not order.merge(0, 299)
    assert order.positions() == list(range(300))


def looked_at(order: EquationOrder, request: Callable[[], bool]) -> int:
    """Count the groups that are looked at for a request."""
    calls, beside = [], order._beside
    order._beside = lambda *args: calls.append(None) or beside(*args)  # type: ignore[method-assign]
    assert request()
    del order._beside
    return len(calls)


@pytest.mark.parametrize("length", [30, 3000])
def test_what_is_near_is_merged_without_a_look_at_the_rest(length: int):
    """Each layer has two readers of one value, and an equation that waits for both."""
    needs: list[list[int]] = [[]]
    for _ in range(length):
        last = len(needs) - 1
        needs += [[last], [last], [last + 1, last + 2]]
    order = EquationOrder(chain(*needs))
    for layer in range(0, length, max(1, length // 10)):
        one, other = 3 * layer + 1, 3 * layer + 2
        assert looked_at(order, lambda: order.merge(one, other)) <= 4  # noqa: B023
        assert looked_at(order, lambda: order.put_after(one, len(needs) - 1)) == 0  # noqa: B023
    assert order.merge(1, 2)
