"""A train step whose rows can be cut, and what its parts are held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.batch import BatchSplit
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.halves.halve import Halved

B, S, D, V, L = 8, 4, 6, 10, 4
CUT = BatchSplit(2, 2)
OFFLOADS_INNER = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["inner"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x, weights):
    up, down = weights
    h = x - x.mean(-1, keepdims=True)
    scores = jnp.einsum("bqd,bkd->bqk", h, h)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), h)
    return x + jax.nn.gelu(x @ up) @ down


def loss_of(params, tokens, key):
    table, weights = params
    x = jnp.where(jax.random.bernoulli(key, 0.9, (*tokens.shape, D)), table[tokens], 0)
    x, _ = lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, weights)
    logits, following = x @ table.T, jnp.roll(tokens, -1, 1)
    picked = jnp.take_along_axis(logits, following[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


@jax.jit
def step(params, tokens, key):
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens, key)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments(batch: int = B) -> tuple[Any, ...]:
    weights = values(L, D, 2 * D, seed=2) / 4, values(L, 2 * D, D, seed=3) / 4
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, V, (batch, S)))
    return (values(V, D), weights), tokens, jax.random.key(0)


def halved(fn: Any, args: Any, like: tuple[int, ...], unroll: int = 1) -> tuple[Any, Any]:
    """Cut the first dim of the values that have the rows of a value of this shape."""
    jaxpr = flatten(fn.trace(*args).jaxpr)
    dims = DimNames(jaxpr)
    rows = next(dims.of(v)[0] for v in _values(jaxpr) if v.aval.shape == like)

    def rows_of(var: Any) -> int | None:
        names = dims.of(var)
        return names.index(rows) if rows in names else None

    return jaxpr, Halved(jaxpr, rows_of, CUT, unroll)


def _values(jaxpr: Any) -> Iterator[Any]:
    """Yield the operands of a jaxpr and of all its bodies."""
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        for body in compat.jaxprs_in(eqn):
            yield from _values(body)


def computed(jaxpr: Any, leaves: list[Any]) -> list[Any]:
    return jax.jit(lambda *leaves: compat.evaluate(jaxpr, leaves))(*leaves)


def assert_same(pairs: list[tuple[Any, Any]]) -> None:
    for ours, plain in pairs:
        assert ours.shape == plain.shape
        assert ours.dtype == plain.dtype
        np.testing.assert_allclose(ours, plain, rtol=2e-6, atol=2e-6)


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
