"""A step that keeps more computes the same, with the same random bits, and computes less again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

import jaxoverlap
from jaxoverlap._jax import compat, explicit
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import dots, equations
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.keep import keep
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.remats import remats_of
from jaxoverlap.passes.keep.values import Recomputed, recomputed
from jaxoverlap.plan.edits import Keep
from tests.passes.keep.drawn import STEPS, B, D, Drawn, L
from tests.support.seeds import some


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def traced(drawn: Drawn, *args):
    return flatten(drawn.step.trace(*args).jaxpr)


def values_of(jaxpr) -> list[Recomputed]:
    return recomputed(remats_of(opened(jaxpr)))


def kept(jaxpr, values):
    step = EditedStep(jaxpr, mesh_of(), (None,) * len(jaxpr.invars))
    return keep.run(step, [one.edit() for one in values]).jaxpr


def evaluated(jaxpr, args):
    flat = jax.jit(lambda *flat: compat.evaluate(jaxpr, flat))(*args)
    return [np.asarray(v) for v in flat]


def agree(results, wanted) -> None:
    """Compare numbers; what stands in two loops may be fused otherwise, so a few last bits."""
    for one, other in zip(results, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def compare(drawn: Drawn, chosen) -> None:
    args = drawn.arguments()
    jaxpr = traced(drawn, *args)
    values = values_of(jaxpr)
    some = [one for n, one in enumerate(values) if chosen(n)]
    if not some:
        return
    after = kept(jaxpr, some)
    assert [v.aval for v in after.outvars] == [v.aval for v in jaxpr.outvars]
    agree(evaluated(after, args), evaluated(jaxpr, args))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(STEPS, st.randoms(use_true_random=False))
def test_random_steps_compute_the_same(drawn, random):
    compare(drawn, lambda n: random.random() < 0.5)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.randoms(use_true_random=False))
def test_many_random_steps_compute_the_same(drawn, random):
    compare(drawn, lambda n: random.random() < 0.5)


@pytest.mark.parametrize("way", ["scan", "unrolled", "micro-batches", "nested"])
def test_all_that_is_kept_is_computed_once(way):
    drawn = Drawn(("twice", "dropped", "named"), way, "none", reverse=False, seed=0)
    args = drawn.arguments()
    jaxpr = traced(drawn, *args)
    values = values_of(jaxpr)
    if way != "nested":  # of which the outer remat computes all of a scan again
        after = kept(jaxpr, values)
        per_layer = len(dots(jaxpr)) - len(dots(after))
        assert per_layer == 3 * (L if way == "unrolled" else 1)
        random = [e for e, _ in equations(after) if e.primitive.name == "random_bits"]
        assert len(random) == (L if way == "unrolled" else 1), "a mask is drawn once"
    if way == "unrolled":  # the first layer needs no gradient of its input
        assert {len(one.places) for one in values} <= {1, L - 1, L}
    compare(drawn, lambda n: True)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("way", some(2, ["scan", "unrolled", "nested", "micro-batches"]))
def test_shardings_and_donation_are_the_plain_steps(way, kind):
    if kind == AxisType.Explicit and way == "micro-batches":
        pytest.skip("JAX reshapes no sharded rows on an explicit mesh")  # nor does this step
    drawn = Drawn(("twice", "dropped", "gelu"), way, "none", reverse=True, seed=3)
    step = drawn.step
    mine, theirs = (drawn.arguments(mesh_of(kind)) for _ in range(2))
    if kind == AxisType.Explicit:  # a gathered weight, as JAX gathers none of itself
        mine, theirs = (
            (jax.device_put(w, jax.NamedSharding(x.sharding.mesh, jax.P())), x, key)
            for w, x, key in (mine, theirs)
        )
    overlapped = jaxoverlap.overlap(step, keep=("drawn.py:*",))
    plan = overlapped.explain(*mine)
    assert any(isinstance(edit, Keep) for edit in plan.edits)
    assert "Kept by keep=: keep float32[" in str(plan)
    for one, other in zip(overlapped(*mine), step(*theirs), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-4, atol=1e-5)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert mine[0].is_deleted() and theirs[0].is_deleted()


def test_slices_of_an_outer_scan_are_not_taken_for_those_of_an_inner_one():
    """Both scans have as many steps and slice the same array, of which each has its own row."""

    def step(w, x):
        def outer(x, row):
            def f(x, inner):
                return jnp.tanh(x @ inner) @ inner, None

            def loss(x):
                y = jnp.tanh(x @ row) @ row  # of the outer row
                return (jax.lax.scan(jax.checkpoint(f), x, w)[0] + y).sum()

            return x - jax.grad(loss)(x), None

        return jax.lax.scan(outer, x, w)[0]

    rng = np.random.default_rng(0)
    args = rng.standard_normal((L, D, D)) / 3, rng.standard_normal((B, D))
    jaxpr = flatten(jax.jit(step).trace(*args).jaxpr)
    values = values_of(jaxpr)
    assert values
    for one, other in zip(
        evaluated(jaxpr, args), evaluated(kept(jaxpr, values), args), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_callbacks_are_not_taken_for_each_other():
    def called(name):
        def function(x):
            return np.float32({"a": 1.0, "b": 2.0}[name]) * x

        return lambda x: jax.pure_callback(function, jax.typeof(x), x)

    def loss(w, x):
        def f(x):
            return jnp.sin(called("b")(jax.lax.stop_gradient(x @ w)) * (x @ w))

        y = called("a")(jax.lax.stop_gradient(x @ w))
        return (jax.checkpoint(f)(x) + y).sum()

    args = np.eye(D, dtype="f"), np.ones((B, D), "f")
    jaxpr = flatten(jax.jit(jax.grad(loss)).trace(*args).jaxpr)
    after = kept(jaxpr, values_of(jaxpr))
    np.testing.assert_allclose(evaluated(jaxpr, args)[0], evaluated(after, args)[0], rtol=1e-5)


def named_step():
    def layer(x, w):
        y = checkpoint_name(x @ w, "inner")
        return jnp.tanh(y) @ w.T, None

    def loss(w, x):
        return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()

    return jax.jit(jax.grad(loss))


def test_the_edit_in_words():
    args = jnp.ones((L, D, D)), jnp.ones((B, D))
    one = next(v for v in values_of(flatten(named_step().trace(*args).jaxpr)) if v.name)
    line = named_step.__code__.co_firstlineno + 2
    source = f"keep/test_keep.py:{line}"
    assert str(one.edit()) == f"keep float32[{B},{D}] of {source} (inner)"
    more = Keep(source=source, value=one.value, places=one.places * 2, bytes_kept=2_000_000)
    assert str(more) == f"keep float32[{B},{D}] of {source} of 2 remats, 2.0 MB"


def test_the_program_before_and_after():
    args = jnp.ones((L, D, D)), jnp.ones((B, D))
    jaxpr = flatten(named_step().trace(*args).jaxpr)
    values = [v for v in values_of(jaxpr) if v.name]
    before, after = (
        [e for e in j.eqns if e.primitive.name == "scan"] for j in (jaxpr, kept(jaxpr, values))
    )
    assert [len(scan.outvars) for scan in before] == [2, 2]
    assert [len(scan.outvars) for scan in after] == [3, 2], "the forward one stacks a value more"
    assert [len(scan.invars) for scan in after] == [
        len(before[0].invars),
        len(before[1].invars) + 1,
    ]
    stacked = after[0].outvars[-1]
    assert stacked in after[1].invars and stacked.aval.shape == (L, B, D)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ((7, 0, 0), "the step has 1 remats, counted from 0"),
        ((0, 99, 0), "remat 0 has no result 0 of equation 99"),
        ((0, 0, 5), "remat 0 has no result 5 of equation 0"),
        ((0, -1, 0), "remat 0 has no result 0 of equation -1"),
    ],
)
def test_what_does_not_fit_is_refused(place, said):
    jaxpr = flatten(named_step().trace(jnp.ones((L, D, D)), jnp.ones((B, D))).jaxpr)
    step = EditedStep(jaxpr, mesh_of(), (None,) * 2)
    with pytest.raises(ValueError, match=said):
        keep.run(step, [Keep(source="a.py:1", value="x", places=(place,))])


def test_what_the_backward_pass_alone_computes_is_refused():
    jaxpr = flatten(named_step().trace(jnp.ones((L, D, D)), jnp.ones((B, D))).jaxpr)
    (remat,) = remats_of(opened(jaxpr))
    last = len(remat.body.eqns) - 1
    step = EditedStep(jaxpr, mesh_of(), (None,) * 2)
    with pytest.raises(ValueError, match="the forward pass does not compute that value"):
        keep.run(step, [Keep(source="a.py:1", value="x", places=((0, last, 0),))])


def test_the_constraints_of_an_explicit_mesh_hide_no_values():
    """There JAX's types become constraints, one of them on what is stacked between the scans."""

    def values_on(kind: AxisType) -> list[str]:
        mesh = mesh_of(kind)
        at = jax.NamedSharding(mesh, jax.P("data"))

        def loss(weights, x):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
            return jnp.sum(jax.lax.scan(layer, x, weights)[0])

        with jax.set_mesh(mesh):
            x = jax.ShapeDtypeStruct((B, D), jnp.float32, sharding=at)
            weights = jax.ShapeDtypeStruct((L, D, D), jnp.float32)
            jaxpr = flatten(jax.jit(jax.grad(loss)).trace(weights, x).jaxpr)
        if kind == AxisType.Explicit:
            jaxpr = explicit.automatic(jaxpr, mesh, inferred=True)
        return [one.value for one in values_of(jaxpr)]

    assert values_on(AxisType.Auto) == values_on(AxisType.Explicit) != []


class NnxLayer(nnx.Module):
    """A layer with dropout, which the model runs as it stands or recomputes."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.gelu(self.up(x))))


@pytest.mark.parametrize("scanned", [False, True])
def test_layers_of_nnx_remat_keep_values(scanned: bool):
    """Numbers, random ones too, and what a second step starts from are those of the plain step."""

    def model_of():
        if scanned:
            return nnx.vmap(NnxLayer, in_axes=0)(nnx.Rngs(0).split(L))
        return nnx.List([NnxLayer(nnx.Rngs(n)) for n in range(L)])

    def loss(model, x):
        if scanned:
            remat = nnx.remat(lambda x, layer: layer(x))
            x = nnx.scan(remat, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)
        else:
            for layer in model:
                x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return jnp.mean(x**2)

    def step(model, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        nnx.update(
            model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads)
        )
        return value

    mesh = mesh_of()
    x = jax.device_put(jnp.ones((B, D)), jax.NamedSharding(mesh, jax.P("data")))
    plain, mine = model_of(), model_of()
    overlapped = jaxoverlap.overlap(nnx.jit(step), keep=("test_keep.py:*",))
    plan = overlapped.explain(mine, x)
    assert any(isinstance(edit, Keep) for edit in plan.edits)
    jitted = nnx.jit(step)
    for _ in range(2):
        np.testing.assert_allclose(overlapped(mine, x), jitted(plain, x), rtol=2e-5)
    for one, other in zip(
        jax.tree.leaves(nnx.state(mine, nnx.Param)),
        jax.tree.leaves(nnx.state(plain, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
