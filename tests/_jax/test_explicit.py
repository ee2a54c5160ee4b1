"""A step on an explicit mesh, without the shardings in its types, and with them again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import compat, explicit, jits
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from tests.support.pods import needs_plugin


@pytest.fixture(scope="module")
def mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def loss(w, x):
    def layer(x, _):
        h = jax.nn.gelu(jnp.einsum("bd,df->bf", x, w))
        return jnp.einsum("bf,df->bd", h, w, out_sharding=P("data", None)), x.sum()

    x, sums = jax.lax.scan(jax.checkpoint(layer), x, None, length=2)
    wide = P(None, "model")
    x = jax.lax.cond(sums[0] > 0, lambda a: reshard(a, wide), lambda a: reshard(2 * a, wide), x)
    return jnp.mean(x**2) + sums.mean()


def traced(mesh):
    rng = np.random.default_rng(0)
    w = jax.device_put(rng.standard_normal((16, 32)), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(rng.standard_normal((8, 16)), NamedSharding(mesh, P("data", None)))
    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, reshard(x, P("data", None)))))
    return step.trace(w, x), (w, x), step


def names(jaxpr):
    return [eqn.primitive.name for eqn, _ in equations(jaxpr)]


@pytest.mark.parametrize("inferred", [False, True])
def test_types_go_and_come_back(mesh, inferred):
    stage, args, step = traced(mesh)
    typed = jits.traced_params(stage)["jaxpr"]
    assert explicit.why_not_automatic(typed) is None
    free = explicit.automatic(typed, mesh, inferred=inferred)
    explicit.core.check_jaxpr(free)
    assert not any(
        v.aval.sharding.mesh._any_axis_explicit
        for eqn, _ in equations(free)
        for v in (*eqn.invars, *eqn.outvars)
        if not v.aval.sharding.mesh.empty
    )
    assert "reshard" not in names(free)
    assert compat.argument_names(free) == compat.argument_names(typed)
    back = explicit.typed_as(free, typed)
    assert compat.argument_names(back) == compat.argument_names(typed)
    explicit.core.check_jaxpr(back)
    assert [v.aval for v in (*back.invars, *back.outvars)] == [
        v.aval for v in (*typed.invars, *typed.outvars)
    ]
    params = jits.with_jaxpr(jits.traced_params(stage), back, {})
    ours = jits.traced_with(stage, params).lower().compile()(*args)
    for mine, plain in zip(jax.tree.leaves(ours), jax.tree.leaves(step(*args)), strict=True):
        assert jax.typeof(mine) == jax.typeof(plain)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


def test_what_is_stated_is_a_constraint_and_what_is_inferred_may_be(mesh):
    stage, _, _ = traced(mesh)
    typed = jits.traced_params(stage)["jaxpr"]
    counts = {
        inferred: names(explicit.automatic(typed, mesh, inferred=inferred)).count(
            "sharding_constraint"
        )
        for inferred in (False, True)
    }
    assert names(typed).count("reshard") <= counts[False] < counts[True]


def test_arguments_that_are_returned_stay_the_same_value(mesh):
    _, (w, x), _ = traced(mesh)
    typed = jits.traced_params(jax.jit(lambda w, x: (x, w)).trace(w, x))["jaxpr"]
    back = explicit.typed_as(explicit.automatic(typed, mesh, inferred=True), typed)
    assert back.outvars == [back.invars[1], back.invars[0]]


def test_an_automatic_step_stays_as_it_is():
    jaxpr = jax.make_jaxpr(lambda x: x * 2)(jnp.ones(3))
    assert explicit.typed_as(jaxpr, jaxpr) is jaxpr


def test_a_mesh_is_mixed_where_some_axes_are_explicit(mesh):
    mixed = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    assert explicit.is_mixed(mixed)
    assert not explicit.is_mixed(mesh) and not explicit.is_mixed(explicit.automatic_mesh(mixed))


def test_unreduced_types_stay(mesh):
    x = jax.device_put(np.ones((8, 16)), NamedSharding(mesh, P(None, "model")))
    y = jax.device_put(np.ones((16, 8)), NamedSharding(mesh, P("model", None)))
    out = P(None, None, unreduced=frozenset({"model"}))
    step = jax.jit(lambda x, y: reshard(jnp.dot(x, y, out_sharding=out), P(None, None)))
    jaxpr = jits.traced_params(step.trace(x, y))["jaxpr"]
    assert "unreduced" in (explicit.why_not_automatic(jaxpr) or "")


@needs_plugin
@pytest.mark.parametrize("stated", [False, True], ids=["by JAX", "by the user"])
@pytest.mark.parametrize("remat", [lambda fn: fn, jax.checkpoint], ids=["kept", "remat"])
def test_what_jax_states_of_attentions_gradient_is_inferred(stated, remat):
    """JAX takes what cuDNN's attention gives for replicated, and asks for its gradient so."""
    pod = jaxoverlap.pod_mesh("h100-sxm:1x8", {"data": 2, "model": 4})
    mesh = Mesh(pod.devices, pod.axis_names, axis_types=(AxisType.Explicit,) * 2)
    out = P() if stated else P("data", None, "model", None)

    @remat
    def loss(w, x):
        q = jnp.einsum("bsd,dhk->bshk", x, w, out_sharding=out)
        a = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
        return jnp.sum(jnp.einsum("bshk,dhk->bsd", a, w, out_sharding=P("data")))

    def shape(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    args = shape(P(None, "model"), 64, 4, 64), shape(P("data"), 4, 128, 64)
    with jax.set_mesh(mesh):
        jaxpr = flatten(jax.jit(jax.grad(loss)).trace(*args).jaxpr)

    def replicated(inferred: bool) -> list[tuple[int, ...]]:
        untyped = explicit.automatic(
            jaxpr, mesh, inferred=inferred, partitions_itself=partitions_itself
        )
        eqns = (e for e, _ in equations(untyped))
        constraints = [e for e in eqns if e.primitive.name == "sharding_constraint"]
        full = [e for e in constraints if not any(e.params["sharding"].spec)]
        return [e.outvars[0].aval.shape for e in full if e.outvars[0].aval.ndim == 4]

    assert replicated(inferred=True), "as JAX states it"
    assert bool(replicated(inferred=False)) == stated
