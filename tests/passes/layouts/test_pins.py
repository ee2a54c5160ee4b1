"""Pins constrain the results of matmuls, and leave alone what the user constrains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.passes.layouts.pins import pinnable, pinned


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def at(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def traced(fn, *shapes):
    return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def layers(x, ws):
    def layer(x, w):
        return jnp.tanh(x @ w[0]) @ w[1], None

    return jax.lax.scan(jax.checkpoint(layer), x, ws)[0]


def test_all_matmuls_of_a_differentiated_scan_can_be_pinned():
    def loss(x, up, down):
        return layers(x, (up, down)).sum()

    jaxpr = traced(jax.grad(loss, (1, 2)), (8, 8), (3, 8, 16), (3, 16, 8)).jaxpr
    # Two forward; in the backward pass one is computed again, and there are two gradients of each.
    assert len(list(pinnable(jaxpr))) == 7


def test_pinned_results_have_their_constraints_and_their_values(mesh):
    closed = traced(lambda x, up, down: layers(x, (up, down)), (8, 8), (3, 8, 16), (3, 16, 8))
    jaxpr = closed.jaxpr
    up, down = (dot.index for dot in pinnable(jaxpr))
    new = pinned(jaxpr, {up: ((), ("data", "model")), down: (("data",), ())}, mesh)
    text = str(new)
    assert text.count("sharding_constraint") == 2
    assert "('data', 'model')" in text
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(v.aval.shape, np.float32) for v in jaxpr.invars]
    ours = jax.core.eval_jaxpr(new, closed.consts, *values)
    plain = jax.core.eval_jaxpr(jaxpr, closed.consts, *values)
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-4, atol=1e-4)


def test_without_pins_the_step_stays_the_same_object(mesh):
    jaxpr = traced(lambda x, w: x @ w, (8, 8), (8, 8)).jaxpr
    assert pinned(jaxpr, {}, mesh) is jaxpr


def test_what_the_user_constrains_stays_as_he_said(mesh):
    def step(x, w, v):
        h = jax.lax.with_sharding_constraint(x @ w, at(mesh, "data", "model"))
        transposed = jax.lax.with_sharding_constraint((h @ v).T, at(mesh, None, "data"))
        return transposed @ h

    (free,) = pinnable(traced(step, (8, 8), (8, 8), (8, 8)).jaxpr)
    assert free.index == 2


def test_matmuls_of_manual_code_are_not_pinned(mesh):
    def local(x, w):
        return x @ w

    manual = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert list(pinnable(traced(manual, (8, 8), (8, 8)).jaxpr)) == []
