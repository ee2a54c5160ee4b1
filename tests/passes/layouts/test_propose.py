"""Layouts are proposed as the arguments suggest, then changed one axis or one line at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.layouts import propose
from jaxoverlap.plan.edits import Pin
from tests.support.evaluated import evaluated_of

ROWS, COLUMNS, NONE = (("a",), ()), ((), ("a",)), ((), ())


def step_of(fn: Any, *shapes: tuple[int, ...], arguments: Any) -> EditedStep:
    jaxpr = jax.make_jaxpr(fn)(*map(jnp.zeros, shapes)).jaxpr
    return EditedStep(jaxpr, Mesh(np.array(jax.devices()[:2]), ("a",)), arguments)


def product() -> EditedStep:
    return step_of(lambda x, w: x @ w, (8, 4), (4, 8), arguments=(ROWS, NONE))


def specs(proposals: Any) -> list[dict[int, Any]]:
    return [{edit.site: edit.spec for edit in one.edits} for one in proposals]


def taken(step: EditedStep, proposal: Proposal, **chosen: Any) -> Evaluated:
    """Return a step that has taken a proposal."""
    return evaluated_of(apply(step, proposal.edits), notes=proposal.notes, **chosen)


def test_the_first_layouts_are_those_of_the_arguments():
    assert specs(propose.propose_starts(evaluated_of(product()))) == [{0: ROWS}]


def test_neighbours_move_one_axis_and_replace_the_pins():
    (start,) = propose.propose_starts(evaluated_of(product()))
    assert not list(propose.propose_neighbours(evaluated_of(product())))
    near = list(propose.propose_neighbours(taken(product(), start)))
    assert {0: COLUMNS} in specs(near)
    assert all(one.without is not None and one.without(Pin(site=0, spec=ROWS)) for one in near)


def test_a_line_may_take_another_of_the_first_layouts():
    def step(x, w):
        first = x @ w
        return first, x @ (w + 1), w

    two = step_of(step, (16, 4), (4, 8), arguments=(ROWS, COLUMNS))
    first, *_ = propose.propose_starts(evaluated_of(two))
    mixes = list(propose.propose_mixes(taken(two, first)))
    assert mixes and all(len(one.edits) == 1 for one in mixes)
    (edit,) = mixes[0].edits
    assert isinstance(edit, Pin) and mixes[0].without
    assert [mixes[0].without(Pin(site=n, spec=ROWS)) for n in (0, 1)] == [
        edit.site == 0,
        edit.site == 1,
    ]


def test_what_xla_does_unasked_is_proposed_to_go():
    two = step_of(lambda x, w: (x @ w, w @ x), (8, 8), (8, 8), arguments=(ROWS, NONE))
    (start, *_) = propose.propose_starts(evaluated_of(two))
    own = {0: dict((e.site, e.spec) for e in start.edits)[0]}
    (proposal,) = propose.propose_without_own(taken(two, start, chosen=own))
    assert proposal.edits == () and proposal.without
    assert [proposal.without(edit) for edit in start.edits] == [True, False]
    both = {edit.site: edit.spec for edit in start.edits}
    assert not list(propose.propose_without_own(taken(two, start, chosen=both)))


def test_many_pins_go_together_and_then_one_by_one():
    def step(x, w):
        return [x @ w, w @ x, x @ x, w @ w]

    four = step_of(step, (8, 8), (8, 8), arguments=(ROWS, NONE))
    (start, *_) = propose.propose_starts(evaluated_of(four))
    sizes = [
        sum(one.without(edit) for edit in start.edits)
        for one in propose.propose_fewer(taken(four, start))
        if one.without
    ]
    assert sizes == [2, 2, 1, 1, 1, 1]
