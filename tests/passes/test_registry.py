"""Every kind of edit has one pass, in the order in which edits are applied."""

from __future__ import annotations

import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.evaluated import Proposal
from jaxoverlap.passes.registry import PASSES
from jaxoverlap.plan.edits import ORDER, Edit, ShareViews
from tests.support.evaluated import evaluated_of


def test_every_kind_of_edit_has_one_pass():
    kinds = [kind for one in PASSES for kind in one.edits]
    assert len(kinds) == len({*kinds})
    assert {*kinds} == {*typing.get_args(Edit)}
    assert len({one.name for one in PASSES}) == len(PASSES)


def test_passes_are_in_the_order_of_their_edits():
    """A pass proposes for the step that earlier passes have left, whose matmuls it numbers."""
    first = {kind: place for place, kinds in reversed([*enumerate(ORDER)]) for kind in kinds}
    places = [first[one.edits[0]] for one in PASSES]
    assert places == sorted(places)
    assert ORDER[-1] == (ShareViews,)


def trained(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    return w - jax.grad(loss)(w)


@pytest.mark.parametrize("one", [p for p in PASSES if p.propose], ids=lambda one: one.name)
def test_what_a_pass_proposes_fits_the_step(one: Any):
    jaxpr = jax.make_jaxpr(trained)(jnp.zeros((2, 8, 8)), jnp.zeros((4, 8))).jaxpr
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    step = EditedStep(jaxpr, mesh, (((), ("a",), ()), (("a",), ())))
    for proposal in one.propose(evaluated_of(step)):
        assert isinstance(proposal, Proposal)
        assert all(isinstance(edit, one.edits) for edit in proposal.edits)
        assert proposal.edits or proposal.why_not
        one.run(step, proposal.edits)
