"""The search takes the fastest layout that it may, within its questions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.passes.layouts.search import Answer, LayoutSearch

PLAIN = Answer(10.0, 1000)
ROWS, COLUMNS = (("a",), ()), ((), ("a",))


class Machine:
    """A machine with an answer for each layout of the one matmul `x @ w`.

    Attributes:
        asked: the layouts that it was asked about.
    """

    def __init__(self, **answers: Answer):
        self.asked: list = []
        self._answers = dict(answers)

    def __call__(self, pins):
        (spec,) = pins.values() or ((),)
        self.asked.append(spec)
        name = {ROWS: "rows", COLUMNS: "columns"}.get(spec, "other")
        return self._answers.get(name, Answer(20.0, 1000))


def searched(machine: Machine, *, most: int = 20, thorough: bool = True, unasked=None):
    jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.zeros((8, 4)), jnp.zeros((4, 8))).jaxpr
    dims = DimNames(jaxpr)
    search = LayoutSearch(
        tuple(pinnable(jaxpr)), dims, {"a": 2}, machine, PLAIN, most, thorough=thorough
    )
    rows, _ = dims.of(jaxpr.outvars[0])
    search.run([{"a": (rows,)}], unasked or {})
    return search


def test_the_fastest_layout_is_taken():
    search = searched(Machine(rows=Answer(9.0, 900), columns=Answer(8.0, 900)))
    assert search.pins == {0: COLUMNS}
    assert search.best == Answer(8.0, 900)


def test_no_layout_is_asked_about_twice():
    machine = Machine(rows=Answer(9.0, 900), columns=Answer(8.0, 900))
    search = searched(machine)
    assert len(machine.asked) == len(set(machine.asked)) == search.asked


@pytest.mark.parametrize(
    "answer",
    [
        Answer(9.95, 900),  # too little to tell the two apart
        Answer(11.0, 900),
        Answer(5.0, 1051),  # more memory
        Answer(5.0, 900, "XLA would give result 0 another sharding"),
    ],
)
def test_nothing_is_pinned_where_nothing_is_better(answer: Answer):
    search = searched(Machine(rows=answer))
    assert search.pins == {}
    assert search.best == PLAIN


def test_questions_are_limited():
    machine = Machine(rows=Answer(9.0, 900), columns=Answer(8.0, 900))
    search = searched(machine, most=1)
    assert machine.asked == [ROWS]
    assert search.pins == {0: ROWS}
    assert searched(machine, most=0).pins == {}


def test_repair_stops_where_no_first_layout_is_faster():
    machine = Machine(columns=Answer(8.0, 900))
    assert searched(machine, thorough=False).pins == {}
    assert machine.asked == [ROWS]


def test_what_xla_does_unasked_is_not_pinned():
    machine = Machine(rows=Answer(9.0, 900))
    machine._answers["other"] = Answer(9.0, 900)  # the answer without any pin
    assert searched(machine, unasked={0: ROWS}).pins == {}
    machine._answers["other"] = Answer(10.0, 900)
    assert searched(machine, unasked={0: ROWS}).pins == {0: ROWS}
