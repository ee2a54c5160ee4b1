"""Explicit meshes put shardings into the arrays' types, and collectives are asked for by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.layouts.pins import pinnable
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

B, S, D, F = 4, 16, 32, 64
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def layer(x, weights):
    """Apply FSDP and sequence parallelism, with each motion written out."""
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


@pytest.mark.parametrize("given", ["whole", "sharded by both"])
def test_types_are_enough_where_no_mesh_is_set(given: str):
    """`jax.set_mesh` is only for those who write specs without a mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(EXPLICIT, EXPLICIT))

    def lies(value, *spec):
        return reshard(value, NamedSharding(mesh, P(*spec)))

    def step(x, *weights):
        for w in weights:
            x = lies(lies(x, None, None) @ lies(w, None, "model"), "model", None)
        return x

    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal((D, D)).astype(np.float32) / 6 for _ in range(3))
    at = P(None, "model") if given == "whole" else P("data", "model")
    args = [lies(x, "model", None), *(jax.device_put(w, NamedSharding(mesh, at)) for w in weights)]
    overlapped = jaxoverlap.overlap(step)
    assert overlapped.explain(*args).decisions
    got, expected = overlapped(*args), jax.jit(step)(*args)
    assert jax.typeof(got) == jax.typeof(expected)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# -- parts of a step whose types differ from its mesh's -------------------------------------------


@pytest.fixture
def automatic():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO, AUTO))
    with jax.set_mesh(mesh):
        yield mesh


def part(y, table, v):
    """Apply a lookup and a matmul with their collectives, in types that state shardings."""
    y = y + table.at[jnp.arange(S) % 8].get(out_sharding=P("data", None))
    return jnp.tanh(jnp.dot(y, v, out_sharding=P("data", "model")))


def mixed(x, w, table, v):
    """Apply a ring, the part in explicit types, and a ring again."""
    y = jax.lax.with_sharding_constraint(x @ w, P(None, "model"))
    stated = (P("data", None), P(None, None), P(None, "model"))
    z = jax.sharding.explicit_axes(part, in_sharding=stated)(y, table, v)
    z = jax.lax.with_sharding_constraint(z, P("model", None))
    return jax.lax.with_sharding_constraint(z @ w, P(None, "model"))


def mixed_arguments(mesh):
    rng = np.random.default_rng(0)
    shapes = {"x": (S, D), "w": (D, F), "table": (8, F), "v": (F, D)}
    specs = {"x": P("model"), "w": P(None, "model"), "table": P(), "v": P(None, "model")}
    values = {k: rng.standard_normal(s).astype(np.float32) / 6 for k, s in shapes.items()}
    return [jax.device_put(values[k], NamedSharding(mesh, specs[k])) for k in shapes]


@pytest.mark.parametrize("on_error", ["raise", "plain"])
def test_explicit_axes_in_a_step_on_an_automatic_mesh_are_left_alone(automatic, on_error: str):
    args = mixed_arguments(automatic)
    step = jaxoverlap.overlap(mixed, on_error=on_error)
    plan = step.explain(*args)
    (skip,) = plan.skips
    assert "types state shardings over data, model" in skip.reason
    assert "over no axis" in skip.reason and "explicit_axes" in skip.reason
    assert [d.kind for d in plan.decisions] == ["all_gather_matmul"] * 2
    np.testing.assert_allclose(step(*args), jax.jit(mixed)(*args), rtol=1e-5, atol=1e-6)


def test_matmuls_in_explicit_axes_are_not_pinned(automatic):
    """No constraint may change what a type states."""

    def step(x, w, v):
        stated = (P("data", None), P(None, "model"))
        y = jax.sharding.explicit_axes(jnp.matmul, in_sharding=stated)(x @ w, v)
        return y.T @ y

    x, w, _, v = mixed_arguments(automatic)
    sites = [dot.index for dot in pinnable(flatten(jax.make_jaxpr(step)(x, w, v).jaxpr))]
    assert sites == [0, 2]


def test_gradients_through_explicit_axes(automatic):
    args = mixed_arguments(automatic)
    step = jax.jit(jax.grad(lambda *args: mixed(*args).sum(), (0, 1, 2, 3)))
    overlapped = jaxoverlap.overlap(step)
    plan = overlapped.explain(*args)
    assert len(plan.decisions) >= 4
    reasons = [s.reason for s in plan.skips if "types state" in s.reason]
    assert len(reasons) == 3, "the matmul and its two gradients"
    for mine, plain in zip(overlapped(*args), step(*args), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)
        assert mine.sharding.is_equivalent_to(plain.sharding, mine.ndim)


def test_auto_axes_and_a_shard_map_in_a_step_on_an_explicit_mesh(mesh):
    def inner(x, w):
        y = jax.lax.with_sharding_constraint(x, P(None, None)) @ w
        return jax.lax.with_sharding_constraint(y, P(None, "model"))

    def part(x, w):  # the rows stay explicit
        return jax.lax.with_sharding_constraint(x @ w, P(None, "model"))

    def step(x, w):
        y = jax.sharding.auto_axes(inner, out_sharding=P(None, "model"))(x, w)
        z = jnp.tanh(reshard(2 * x, P("data", None)))
        z = jax.sharding.auto_axes(part, axes="model", out_sharding=P("data", "model"))(z, w)
        total = jax.shard_map(
            lambda a: jax.lax.psum(a, "model"), in_specs=P("data", "model"), out_specs=P("data")
        )(z)
        return y, z, total, w.at[:, jnp.argmax(z, -1)].get(out_sharding=P(None, "data"))

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((S, D), (D, F)))
    x = jax.device_put(x, NamedSharding(mesh, P("model", None)))
    w = jax.device_put(w, NamedSharding(mesh, P(None, "model")))
    overlapped = jaxoverlap.overlap(step)
    assert len(overlapped.explain(x, w).decisions) == 1
    for mine, plain in zip(overlapped(x, w), jax.jit(step)(x, w), strict=True):
        assert jax.typeof(mine) == jax.typeof(plain)
        assert mine.sharding == plain.sharding
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)


def test_the_batch_is_split_on_an_explicit_mesh(mesh):
    step, arrays = jax.jit(jax.value_and_grad(loss)), arguments(mesh)
    overlapped = jaxoverlap.overlap(step, halves=2)
    plan = overlapped.explain(*arrays)
    assert plan.split and plan.split.parts == 2
    pairs = zip(*map(jax.tree.leaves, (overlapped(*arrays), step(*arrays))), strict=True)
    for mine, plain in pairs:
        assert jax.typeof(mine) == jax.typeof(plain)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)
    again = jaxoverlap.overlap(step, plan=plan)
    assert again.lower(*arrays).as_text() == overlapped.lower(*arrays).as_text()


def gpt_on(kind: AxisType):
    """Return two layers of a GPT for a pod, the same on either kind of mesh."""
    at = jaxoverlap.pod_mesh("h100-sxm:8x8", {"data": 8, "model": 8})
    pod = jax.sharding.Mesh(at.devices, at.axis_names, axis_types=(kind,) * 2)

    def einsum(letters, x, w, spec):
        if kind == EXPLICIT:
            return jnp.einsum(letters, x, w, out_sharding=spec)
        y = jnp.einsum(letters, x, w)
        return jax.lax.with_sharding_constraint(y, NamedSharding(pod, spec))

    def block(x, up, down):
        h = jax.nn.gelu(einsum("bsd,df->bsf", x, up, P("data", None, "model")))
        return x + einsum("bsf,fd->bsd", h, down, P("data", None, None))

    @jax.jit
    def step(weights, x):
        def loss(weights):
            y = x
            for up, down in weights:
                y = block(y, up, down)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(pod, spec))

    up, down = array(P(None, "model"), 4096, 16384), array(P("model"), 16384, 4096)
    return pod, step, ([(up, down)] * 2, array(P("data"), 64, 4096, 4096))


@marked(pods)
def test_an_explicit_mesh_gains_what_an_automatic_one_does():
    prices = {}
    for kind in (AUTO, EXPLICIT):
        pod, step, args = gpt_on(kind)
        with jax.set_mesh(pod):
            plan = jaxoverlap.overlap(step, cluster="h100-sxm:8x8").explain(*args)
        assert plan.split and plan.price
        prices[kind] = plan.price
    auto, explicit = prices[AUTO], prices[EXPLICIT]
    assert explicit.step_s <= 1.03 * auto.step_s
    assert explicit.plain_s == pytest.approx(auto.plain_s, rel=0.03)
    assert auto.step_s < 0.97 * auto.plain_s


def accumulated_in_parts(weights, x):
    """Sum gradients of two microbatches as partial sums over data, and reduce them once."""
    own = reshard(weights, P(None, "model", reduced={"data"}))
    grads = [jax.grad(lambda w, n=n: jnp.sum(jnp.tanh(n * x @ w) ** 2))(own) for n in (1.0, 2.0)]
    return reshard(grads[0] + grads[1], P(None, "model")), grads[0]


@pytest.mark.parametrize("options", [{}, {"halves": 2}, {"granularity": "two_way"}], ids=str)
@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_partial_sums_that_types_state_stay(mesh, options):
    rng = np.random.default_rng(0)
    up = jax.device_put(rng.standard_normal((D, F)).astype(np.float32), P(None, "model"))
    x = jax.device_put(rng.standard_normal((B, S, D)).astype(np.float32), P("data"))
    step = jax.jit(accumulated_in_parts)
    want, got = step(up, x), jaxoverlap.overlap(step, **options)(up, x)
    assert "U:data" in str(jax.typeof(want[1]))
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    again = jax.jit(lambda w, x: reshard(jnp.tanh(x @ w), P("data", None, "model")))
    own = jax.jit(lambda w: reshard(w, P(None, "model", reduced={"data"})))(up)
    np.testing.assert_allclose(jaxoverlap.overlap(again, **options)(own, x), again(own, x), 1e-5)
