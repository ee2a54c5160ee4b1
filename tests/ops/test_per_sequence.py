"""A function that computes each sequence alone: its value, gradient, and the batch split through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Plan, overlap, per_sequence
from models import ragged
from tests.support.ragged import arrays, mixture_step, on_cpu
from tests.support.seeds import some


def normed(x, scale):
    """Sort the tokens of each sequence by size: no rule says that sequences stay apart."""
    flat = x.reshape(-1, x.shape[-1])
    rows = jnp.repeat(jnp.arange(x.shape[0]), x.shape[1])
    order = jnp.lexsort((flat.sum(-1), rows))
    return jnp.tanh(flat[order].reshape(x.shape) @ scale)


X, W = (
    np.random.default_rng(i).normal(size=s).astype("f") for i, s in enumerate(((4, 6, 8), (8, 8)))
)


def loss(fn, x, w):
    return jnp.sum(fn(x, w) ** 2)


def test_value_and_gradient_are_the_functions_own():
    for around in (lambda f: f, jax.jit, jax.checkpoint):
        mine = jax.value_and_grad(around(lambda x, w: loss(per_sequence(normed), x, w)), (0, 1))
        theirs = jax.value_and_grad(lambda x, w: loss(normed, x, w), (0, 1))
        for one, other in zip(*map(jax.tree.leaves, (mine(X, W), theirs(X, W))), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_under_vmap_it_is_the_plain_function():
    w = np.stack([W, 2 * W])
    mine = jax.vmap(per_sequence(normed), in_axes=(None, 0))(X, w)
    np.testing.assert_allclose(mine, jax.vmap(normed, in_axes=(None, 0))(X, w), rtol=1e-6)


def test_pytrees_integers_and_other_dims():
    def fn(tree, ids, w):
        return {"a": tree["a"] @ w, "b": [tree["b"] + ids[None]]}

    tree, ids = {"a": X.swapaxes(0, 1), "b": np.ones((2, 4), "f")}, np.arange(4)

    def total(fn, tree, w):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(fn(tree, ids, w)))

    alone = per_sequence(fn, argnums=(0,), dim=1)
    mine, theirs = (
        jax.grad(lambda t, w, f=f: total(f, t, w), (0, 1))(tree, W) for f in (alone, fn)
    )
    for one, other in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: per_sequence(normed, argnums=2)(X, W), r"argnums \(2,\) of a call with 2"),
        (lambda: per_sequence(normed, argnums=())(X, W), r"argnums \(\) of a call with 2"),
        (lambda: per_sequence(normed, dim=3)(X, W), "is to be the batch of every array"),
        (lambda: per_sequence(normed, argnums=(0, 1))(X, W), "of one size, and shapes are"),
        (lambda: per_sequence(lambda x: x.sum(0))(X), "another batch size than its arguments, 4"),
        (lambda: per_sequence(lambda x: x @ jnp.asarray(W))(X), "reads arrays from outside"),
    ],
)
def test_bad_use_is_an_error_that_says_what_to_do(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.rotating
@pytest.mark.parametrize("factor", some(1, [0.1, 30.0]))
def test_a_mixture_of_experts_is_split_and_computes_what_it_did(factor):
    on_cpu()
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    sizes = dict(batch=16, attention=2)
    alone, shapes, x = mixture_step(mesh, alone=True, **sizes)
    plain, _, _ = mixture_step(mesh, **sizes)

    def args():
        p = arrays(shapes, scale=0.3)
        p["router"] = jax.device_put(p["router"] * factor, shapes["router"].sharding)
        return p, arrays(x)

    split = overlap(alone, halves=2, layouts=None)
    assert split.explain(*args()).split
    mine, theirs = args(), args()
    for one, other in zip(*map(jax.tree.leaves, (split(*mine), plain(*theirs))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert mine[0]["up"].is_deleted()


def sparse_step(mesh):
    """Return a step of matmuls and ragged experts that is legal on either kind of mesh."""
    mixed = ragged.experts(mesh, axis="expert", activation=jax.nn.gelu)

    def layer(x, p):
        x = x + jnp.einsum("bse,ed->bsd", jnp.tanh(jnp.einsum("bsd,de->bse", x, p["w"])), p["v"])
        likely = jax.nn.softmax(jnp.einsum("bsd,de->bse", x, p["router"]))
        return x + mixed(x, *lax.top_k(likely, 2), p["up"], p["down"]), None

    def loss(p, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)

    rng = np.random.default_rng(0)

    def array(spec, *shape):
        return jax.device_put(rng.normal(size=shape).astype("f") * 0.3, NamedSharding(mesh, spec))

    own = P(None, "expert")
    p = {
        "w": array(P(), 2, 16, 32),
        "v": array(P(), 2, 32, 16),
        "router": array(P(), 2, 16, 8),
        "up": array(own, 2, 8, 16, 24),
        "down": array(own, 2, 8, 24, 16),
    }
    return jax.jit(jax.value_and_grad(loss)), p, array(P(("data", "expert")), 16, 8, 16)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", some(1, [AxisType.Auto, AxisType.Explicit]))
def test_on_either_kind_of_mesh_a_plan_of_the_split_step_is_followed(kind):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        step, *args = sparse_step(mesh)
        split = overlap(step, halves=2)
        plan = split.explain(*args)
        assert plan.split
        again, _, _ = sparse_step(mesh)  # another function of the same text
        followed = overlap(again, plan=Plan.from_json(plan.to_json()))
        for other in (split, followed):
            pairs = zip(*map(jax.tree.leaves, (other(*args), step(*args))), strict=True)
            for one, expected in pairs:
                np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-6)
                assert one.sharding.is_equivalent_to(expected.sharding, one.ndim)


def test_a_function_that_does_otherwise_for_half_a_batch_runs_on_all_of_it():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @per_sequence
    def odd(x, w):
        return x @ w if x.shape[0] == 16 else (x @ w) @ jnp.eye(8)

    def step(x, w):
        def loss(w):
            return jnp.sum(odd(jnp.tanh(x @ w), w) @ w)

        return jax.grad(loss)(w)

    at = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    x, w = (jax.device_put(v, s) for v, s in zip((np.ones((16, 6, 8), "f"), W), at, strict=True))
    split = overlap(jax.jit(step), halves=2, layouts=None)
    np.testing.assert_allclose(split(x, w), jax.jit(step)(x, w), rtol=1e-5)


def test_explain_names_it_where_a_shard_map_joins_the_batch():
    on_cpu()
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    for alone in (False, True):
        step, shapes, x = mixture_step(mesh, alone=alone, batch=16, attention=2)
        plan = overlap(step, halves=2, layouts=None).explain(arrays(shapes, scale=0.3), arrays(x))
        assert any("jaxoverlap.per_sequence" in note for note in plan.notes) != alone, plan.notes


def test_it_is_public():
    assert jaxoverlap.per_sequence is per_sequence
