"""Matmuls that read one operand with dims of size 1 read one view of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.rewriting.one_view import with_one_view
from tests.support.pods import needs_plugin

S, D, F = 16, 8, 32


def projected(x, wq, wk, heads):
    """Queries, keys and attention's scores of one sequence."""
    q, k = (jnp.tanh(jnp.einsum("bsd,df->bsf", x, w)) for w in (wq, wk))
    return jnp.einsum("bsf,btf->bst", q, k), jnp.einsum("bsd,dnf->bsnf", x, heads)


def given(batch: int = 1):
    rng = np.random.default_rng(0)
    shapes = (batch, S, D), (D, F), (D, F), (D, 1, F)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_three_matmuls_share_one_view():
    jaxpr = flatten(jax.jit(projected).trace(*given()).jaxpr)
    viewed = with_one_view(jaxpr)
    squeezed = [eqn.invars[0] for eqn in viewed.eqns if eqn.primitive.name == "squeeze"]
    assert squeezed.count(jaxpr.invars[0]) == 1
    assert names(viewed).count("dot_general") == names(jaxpr).count("dot_general") == 4
    for before, after in zip(
        compat.evaluate(jaxpr, given()), compat.evaluate(viewed, given()), strict=True
    ):
        np.testing.assert_allclose(before, after, rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (projected, given(batch=2)),
        (lambda x, w: x @ w, given()[:2]),  # nobody shares its operand
    ],
)
def test_others_stay_as_they_are(fn, args):
    jaxpr = flatten(jax.jit(fn).trace(*args).jaxpr)
    viewed = with_one_view(jaxpr)
    assert viewed is jaxpr


@needs_plugin
def test_xla_gathers_the_view_once():
    """XLA:GPU's partitioner gathers the operand for each matmul, or once for their view."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"model": 8})

    def layer(x, *weights):
        x = jnp.tanh(x)
        return [jnp.einsum("bsd,df->bsf", x, w) for w in weights]

    def shape(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = [shape(D, F, spec=P(None, "model"))] * 3
    out = NamedSharding(mesh, P(None, None, "model"))
    step = jax.jit(layer, out_shardings=[out] * 3)
    traced = step.trace(shape(1, S, D, spec=P(None, "model", None)), *weights)
    jaxpr = flatten(traced.jaxpr)

    def gathers(one):
        return partitioned(traced, one, mesh, ask=False).text.count(" all-gather(")

    assert gathers(with_one_view(jaxpr)) == 1
    assert gathers(jaxpr) == 3, "XLA shares the gather by itself now: the pass can go"


def turned(q, k, cos, sin):
    """Turn queries and keys by angles that all heads share, as rotary embeddings do."""

    def one(x):
        halves = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-halves[1], halves[0]], -1) * sin

    return one(q), one(k)


def test_what_is_repeated_for_all_heads_is_read_by_one_view():
    rng = np.random.default_rng(0)
    shapes = (2, S, 4, D), (2, S, 4, D), (2, S, 1, D), (2, S, 1, D)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def scores(*args):
        return jnp.einsum("bshd,bthd->bhst", *turned(*args))

    jaxpr = flatten(jax.jit(scores).trace(*args).jaxpr)
    viewed = with_one_view(jaxpr)
    assert names(viewed).count("squeeze") == 2
    assert names(viewed).count("broadcast_in_dim") == 4
    for before, after in zip(
        compat.evaluate(jaxpr, args), compat.evaluate(viewed, args), strict=True
    ):
        np.testing.assert_allclose(before, after, rtol=1e-6)


@needs_plugin
def test_xla_gathers_what_all_heads_share_once():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"model": 8})

    def at(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def layer(x, wq, wk, cos, sin):
        q, k = (at(jnp.einsum("bsd,dhe->bshe", at(x), w), None, None, "model") for w in (wq, wk))
        return [at(turn, None, None, "model") for turn in turned(q, k, cos, sin)]

    def shape(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    heads, positions = P(None, "model"), P(None, "model")
    weights = [shape(D, 8, 128, spec=heads)] * 2
    angles = [shape(2, S, 1, 128, spec=positions)] * 2
    traced = jax.jit(layer).trace(shape(2, S, D, spec=positions), *weights, *angles)
    jaxpr = flatten(traced.jaxpr)

    def gathers(one):
        return partitioned(traced, one, mesh, ask=False).text.count(" all-gather(")

    assert gathers(with_one_view(jaxpr)) == 3
    assert gathers(jaxpr) == 5, "XLA shares the gathers by itself now: the pass can go"
