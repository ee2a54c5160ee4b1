"""Explicit meshes: shardings are part of the arrays' types, and collectives are asked for by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxoverlap

B, S, D, F = 4, 16, 32, 64
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def layer(x, weights):
    """Fully sharded data parallelism and sequence parallelism, each motion written out."""
    up, down = weights
    x_whole, up_whole = reshard(x, P("data", None, None)), reshard(up, P(None, "model"))
    h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x_whole, up_whole))
    y = jnp.einsum(
        "bsf,fd->bsd", h, reshard(down, P("model", None)), out_sharding=P("data", "model", None)
    )
    return x + y, None


def loss(weights, x):
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return jnp.mean(x**2)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        yield mesh


def arguments(mesh):
    rng = np.random.default_rng(0)

    def array(spec, *shape):
        values = rng.standard_normal(shape).astype(np.float32) / 6
        return jax.device_put(values, NamedSharding(mesh, spec))

    up, down = P(None, "data", "model"), P(None, "model", "data")
    weights = array(up, 2, D, F), array(down, 2, F, D)
    return weights, array(P("data", "model"), B, S, D)


def test_values_gradients_and_types(mesh):
    step, arrays = jax.jit(jax.value_and_grad(loss)), arguments(mesh)
    overlapped = jaxoverlap.overlap(step)
    assert not overlapped.explain(*arrays).skips
    pairs = zip(*map(jax.tree.leaves, (overlapped(*arrays), step(*arrays))), strict=True)
    for mine, plain in pairs:
        assert jax.typeof(mine) == jax.typeof(plain)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


def test_what_is_written_as_a_reshard_becomes_a_ring(mesh):
    plan = jaxoverlap.overlap(jax.jit(jax.value_and_grad(loss))).explain(*arguments(mesh))
    moved = [(d.axis, d.kind) for d in plan.decisions]
    assert moved[:2] == [("model", "all_gather_matmul"), ("model", "matmul_reduce_scatter")]
    # A weight's gradient is transposed before it is resharded; it is scattered all the same.
    sums = [d.kind for d in plan.decisions if d.axis == "data"]
    sums += [other.split(",")[0].split()[1] for d in plan.decisions for other in d.others]
    assert "all_reduce" not in sums and "matmul_all_reduce" not in sums
    large = [c for c in plan.remaining if c.kind == "all_reduce" and c.bytes_moved > 100]
    assert not large, large


def test_a_ring_that_keeps_what_it_gathered(mesh):
    def step(x, w):
        whole = reshard(x, P(None, None))
        y = jnp.sin(jnp.einsum("sd,df->sf", whole, w))
        return jnp.einsum("sd,sf->df", whole, y)

    rng = np.random.default_rng(0)
    x = jax.device_put(rng.standard_normal((S, D)), NamedSharding(mesh, P("model", None)))
    w = jax.device_put(rng.standard_normal((D, F)), NamedSharding(mesh, P(None, "model")))
    overlapped = jaxoverlap.overlap(jax.jit(step))
    whys = [d.why for d in overlapped.explain(x, w).decisions]
    assert whys == ["", "reads what ring 0 moved"]
    np.testing.assert_allclose(overlapped(x, w), step(x, w), rtol=1e-5, atol=1e-5)


def test_an_explicit_axis_beside_an_automatic_one():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P("data", "model", None))
        to = NamedSharding(mesh, P(None, "model"))

        def step(x, w):
            return jax.grad(lambda w: jnp.sum(jnp.sin(jnp.einsum("bsd,df->bsf", x, w))))(w)

        rng = np.random.default_rng(0)
        x = jax.device_put(rng.standard_normal((B, S, D)), spec)
        w = jax.device_put(rng.standard_normal((D, F)), to)
        overlapped = jaxoverlap.overlap(jax.jit(step))
        assert overlapped.explain(x, w).decisions
        got, plain = overlapped(x, w), jax.jit(step)(x, w)
        assert jax.typeof(got) == jax.typeof(plain)
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-5)
