"""`overlap()` around a step that holds operations with rules of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.flatten import flatten


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def make_step(mesh: Mesh, einsum: Any) -> tuple[Any, tuple[Any, ...]]:
    """A gated MLP's step, and its arguments."""

    def at(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    pin = jax.lax.with_sharding_constraint

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        gate = pin(einsum("bsd,df->bsf", x, weights["gate"]), at("data", None, "model"))
        up = pin(einsum("bsd,df->bsf", x, weights["up"]), at("data", None, "model"))
        y = einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, weights["down"])
        return jnp.mean(pin(y, at("data", "model", None)) ** 2)

    def step(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        value, gradients = jax.value_and_grad(jax.checkpoint(loss))(weights, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    random = np.random.default_rng(0)

    def array(sharding: NamedSharding, *shape: int) -> jax.Array:
        return jax.device_put(random.standard_normal(shape).astype(np.float32), sharding)

    column, row = at("data", "model"), at("model", "data")
    weights = {
        "gate": array(column, 64, 256),
        "up": array(column, 64, 256),
        "down": array(row, 256, 64),
    }
    return jax.jit(step), (weights, array(at("data", "model", None), 4, 64, 64))


def close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * float(np.abs(y).max()))


def test_takes_operations_over(mesh: Mesh):
    step, args = make_step(mesh, jaxoverlap.einsum)
    usual, _ = make_step(mesh, jnp.einsum)
    overlapped, theirs = jaxoverlap.overlap(step), jaxoverlap.overlap(usual)
    plan = overlapped.explain(*args)
    compiled = overlapped.lower(*args).compile()
    assert jaxoverlap.decisions(compiled) == ()  # none is left to partition itself
    assert len(plan.decisions) >= len(theirs.explain(*args).decisions)
    assert all("test_overlap.py" in entry.source for entry in plan.entries)
    close(compiled(*args), usual(*args))


def test_leaves_operations(mesh: Mesh):
    step, args = make_step(mesh, jaxoverlap.einsum)
    usual, _ = make_step(mesh, jnp.einsum)
    overlapped = jaxoverlap.overlap(step, operations="leave")
    with pytest.warns(UserWarning, match="rewrites nothing"):
        compiled = overlapped.lower(*args).compile()
    decided = jaxoverlap.decisions(compiled)
    assert [d for d in decided if isinstance(d, jaxoverlap.Decision)]
    assert all("test_overlap.py" in entry.source for entry in decided)
    assert not overlapped.explain(*args).decisions  # nothing is ringed twice
    close(compiled(*args), usual(*args))


def test_refuses_another_word():
    with pytest.raises(ValueError, match="expected 'take over' or 'leave'"):
        jaxoverlap.overlap(jax.jit(lambda x: x), operations="keep")  # type: ignore[call-overload]


def test_opened_groups_have_the_line_that_wrote_them(mesh: Mesh):
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jaxoverlap.matmul(x, w)
        return jaxoverlap.matmul(y, w)

    jaxpr = flatten(jax.jit(f).trace(jnp.ones((4, 4)), jnp.ones((4, 4))).jaxpr)
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    (file, first, _), (other, second, _) = map(compat.source_line, dots)
    assert file == other == __file__
    assert second == first + 1
