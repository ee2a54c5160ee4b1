"""A batch split of a step without constraints pins the shardings that its matmuls have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.halves.propose import propose_parts, propose_unrolled
from jaxoverlap.plan.edits import Pin, SplitBatch, in_order
from tests.support.evaluated import evaluated_of

B, S, D, F, LAYERS = 16, 5, 12, 32, 2


def evaluated(*, constrains: bool) -> Any:
    """Return an MLP's training step whose batch is sharded over one axis, its columns over one."""
    devices = np.asarray(jax.devices()[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "tp"), axis_types=(AxisType.Auto,) * 2)

    def layer(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w[0])
        if constrains:
            h = lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None, "tp")))
        return x + h @ w[1], None

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.mean(lax.scan(layer, x, w)[0] ** 2))(w)

    args = (np.ones((LAYERS, D, F), "f"), np.ones((LAYERS, F, D), "f")), np.ones((B, S, D), "f")
    jaxpr = flatten(jax.make_jaxpr(step)(*args).jaxpr)
    edited = EditedStep(jaxpr, mesh, (None,) * 3)

    def sharded(var: Any) -> Any:
        on = {B: ("data",), F: ("tp",)}
        return tuple(on.get(size, ()) for size in var.aval.shape)

    known = {
        dot.index: Shardings(*map(sharded, (*dot.eqn.invars, *dot.eqn.outvars)))
        for dot in edited.matmuls
    }
    return evaluated_of(edited, shardings=known)


@pytest.mark.parametrize("constrains", [False, True])
def test_parts_keep_shardings_that_nothing_states(constrains):
    step = evaluated(constrains=constrains)
    (proposal,) = propose_parts(2, step)
    split, *pins = proposal.edits
    assert isinstance(split, SplitBatch)
    if constrains:
        assert not pins
        return
    cut = apply(step.step, [split])
    dots = {dot.index: dot for dot in cut.matmuls}
    assert len(pins) == len(dots) == 2 * len(step.step.matmuls)
    for pin in pins:
        shape = dots[pin.site].eqn.outvars[0].aval.shape
        assert pin.spec == tuple({B // 2: ("data",), F: ("tp",)}.get(n, ()) for n in shape)
    assert apply(step.step, proposal.edits).has(Pin)


def test_unrolled_scans_keep_the_pins_of_the_parts():
    step = evaluated(constrains=False)
    (proposal,) = propose_parts(2, step)
    cut = apply(step.step, proposal.edits)
    (unrolled,) = propose_unrolled(2, evaluated_of(cut))
    stay = [edit for edit in cut.edits if not (unrolled.without and unrolled.without(edit))]
    edits = in_order([*stay, *unrolled.edits])
    pins = [edit for edit in proposal.edits if isinstance(edit, Pin)]
    assert [edit for edit in edits if isinstance(edit, Pin)] == pins
    split = next(edit for edit in edits if isinstance(edit, SplitBatch))
    assert split.unroll == 2 and edits.index(split) < edits.index(pins[0])
    assert compat.is_jaxpr(apply(step.step, edits).jaxpr)
