"""The search takes the fastest layout that it may, within its questions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.passes.layouts.search import LayoutCandidate, LayoutSearch, PricedLayout

PLAIN = PricedLayout(10.0, 1000)
ROWS, COLUMNS = (("a",), ()), ((), ("a",))


class Machine:
    """A machine with an answer for each layout of the one matmul `x @ w`.

    Attributes:
        asked: the layouts that it was asked about.
    """

    def __init__(self, **answers: PricedLayout):
        self.asked: list = []
        self._answers = dict(answers)

    def __call__(self, pins):
        (spec,) = pins.values() or ((),)
        self.asked.append(spec)
        name = {ROWS: "rows", COLUMNS: "columns"}.get(spec, "other")
        return self._answers.get(name, PricedLayout(20.0, 1000))


def search_on(machine: Machine, *, most: int = 20, thorough: bool = True) -> LayoutSearch:
    """Search for the layout of one matmul, from that in which its rows are split."""
    jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.zeros((8, 4)), jnp.zeros((4, 8))).jaxpr
    dims = DimNames(jaxpr)
    search = LayoutSearch(
        tuple(pinnable(jaxpr)), dims, {"a": 2}, machine, PLAIN, most, thorough=thorough
    )
    rows, _ = dims.of(jaxpr.outvars[0])
    search.run([{"a": (rows,)}])
    return search


def searched(machine: Machine, **settings) -> LayoutCandidate:
    return search_on(machine, **settings).best


def test_the_fastest_layout_is_taken():
    best = searched(Machine(rows=PricedLayout(9.0, 900), columns=PricedLayout(8.0, 900)))
    assert best.pins == {0: COLUMNS}
    assert best.answer == PricedLayout(8.0, 900)


def test_no_layout_is_asked_about_twice():
    machine = Machine(rows=PricedLayout(9.0, 900), columns=PricedLayout(8.0, 900))
    search = search_on(machine)
    assert len(machine.asked) == len(set(machine.asked)) == search.asked


@pytest.mark.parametrize(
    "answer",
    [
        PricedLayout(9.95, 900),  # too little to tell the two apart
        PricedLayout(11.0, 900),
        PricedLayout(5.0, 1051),  # more memory
        PricedLayout(5.0, 900, "XLA would give result 0 another sharding"),
    ],
)
def test_nothing_is_pinned_where_nothing_is_better(answer: PricedLayout):
    assert searched(Machine(rows=answer)) == LayoutCandidate({}, PLAIN)


def test_questions_are_limited():
    machine = Machine(rows=PricedLayout(9.0, 900), columns=PricedLayout(8.0, 900))
    assert searched(machine, most=1).pins == {0: ROWS}
    assert machine.asked == [ROWS]
    assert searched(machine, most=0).pins == {}


def test_repair_stops_where_no_first_layout_is_faster():
    machine = Machine(columns=PricedLayout(8.0, 900))
    assert searched(machine, thorough=False).pins == {}
    assert machine.asked == [ROWS]


def test_what_xla_does_unasked_is_not_pinned():
    """Two matmuls are pinned; XLA gives one of them this layout by itself."""
    jaxpr = jax.make_jaxpr(lambda x, w: (x @ w, w @ x))(*[jnp.zeros((8, 8))] * 2).jaxpr
    dims = DimNames(jaxpr)
    search = LayoutSearch(
        tuple(pinnable(jaxpr)), dims, {"a": 2}, lambda pins: PricedLayout(9.0, 900), PLAIN, 20
    )
    rows, _ = dims.of(jaxpr.invars[0])
    search.run([{"a": (rows,)}])
    assert set(search.best.pins) == {0, 1}
    search.leave_out({0: search.best.pins[0]})
    assert set(search.best.pins) == {1}


def test_pins_that_are_not_needed_are_left_out_and_the_others_have_their_gain():
    """Two of five pins are needed: without one a step takes 3 s more, without the other 2."""
    jaxpr = jax.make_jaxpr(lambda x, w: [x @ w] * 1 + [w @ x, x @ x, w @ w, (x + w) @ w])(
        *[jnp.zeros((8, 8))] * 2
    ).jaxpr

    def ask(pins):
        return PricedLayout(10.0 - 3 * (1 in pins) - 2 * (4 in pins), 900)

    dims = DimNames(jaxpr)
    search = LayoutSearch(tuple(pinnable(jaxpr)), dims, {"a": 2}, ask, PLAIN, 20)
    search.run([{"a": dims.of(jaxpr.invars[0])[:1]}])
    search.thin_out(20)
    assert set(search.best.pins) == {1, 4}
    assert [search.gain_s(site) for site in (1, 4)] == [3.0, 2.0]


def test_rivals_are_the_first_layouts_that_are_not_much_slower():
    machine = Machine(rows=PricedLayout(8.5, 900), columns=PricedLayout(8.0, 900))
    assert [c.pins[0] for c in search_on(machine).rivals(3)] == [COLUMNS, ROWS]
    assert [c.pins[0] for c in search_on(machine).rivals(1)] == [COLUMNS]
    slow = Machine(rows=PricedLayout(9.3, 900), columns=PricedLayout(8.0, 900))
    assert [c.pins[0] for c in search_on(slow).rivals(3)] == [COLUMNS]
    assert search_on(Machine()).rivals(3) == [LayoutCandidate({}, PLAIN)]


def test_the_step_without_pins_is_a_rival_and_nothing_slower_than_it_is():
    machine = Machine(rows=PricedLayout(10.2, 900), columns=PricedLayout(9.0, 900))
    best, plain = search_on(machine).rivals(3)
    assert best.pins == {0: COLUMNS}
    assert plain == LayoutCandidate({}, PLAIN)


def test_a_source_line_may_lie_in_another_way_than_the_rest():
    """Rows are best for the first matmul, columns for the second; no one layout has both."""

    def step(x, w):
        first = x @ w
        return first, x @ (w + 1)

    jaxpr = jax.make_jaxpr(step)(jnp.zeros((8, 4)), jnp.zeros((4, 8))).jaxpr
    dims = DimNames(jaxpr)

    def ask(pins):
        return PricedLayout(10.0 - 3 * (pins[0] == ROWS) - 2 * (pins[1] == COLUMNS), 900)

    search = LayoutSearch(tuple(pinnable(jaxpr)), dims, {"a": 2}, ask, PLAIN, 20)
    rows, columns = dims.of(jaxpr.outvars[0])
    search.run([{"a": (rows, columns)}, {"a": (columns, rows)}])
    assert search.best.pins == {0: ROWS, 1: COLUMNS}
