"""The rows to cut are a dim of the batch that most matmuls have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.halves.start import batch_dims

SIZES = {"data": 4, "model": 2}


def step(up, down, x):
    def loss(weights):
        return jnp.sum((jax.nn.relu(x @ weights[0]) @ weights[1]) ** 2)

    return jax.tree.map(lambda w, g: w - g, (up, down), jax.grad(loss)((up, down)))


def rows(batch: int, sequence: int, spec=(("data",), ("model",), ())):
    shapes = (16, 32), (32, 16), (batch, sequence, 16)
    jaxpr = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    dims = DimNames(jaxpr)
    first = dots(jaxpr)[0]
    shardings = {first.index: Shardings(lhs=spec, rhs=((), ()), out=None)}
    ranked = list(batch_dims(jaxpr, dims, shardings, SIZES))
    return [(r.dim(dims, jaxpr.invars[2]), r.shards, r.held) for r in ranked]


def test_the_batch_comes_before_the_sequence_and_no_dim_of_weights_is_among_them():
    assert rows(16, 8) == [(0, 4, 4), (1, 2, 4)]


def test_rows_are_counted_by_device():
    assert rows(4, 8) == [(0, 4, 1), (1, 2, 4)]


def test_rows_that_a_device_has_not_whole_are_not_held():
    assert rows(6, 8)[0] == (0, 4, 0)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_have_to_divide_what_a_device_holds(parts):
    shapes = (16, 32), (32, 16), (24, 8, 16)
    jaxpr = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    dims = DimNames(jaxpr)
    (batch, sequence) = batch_dims(jaxpr, dims, {}, SIZES)
    assert batch.divides(parts)
    assert sequence.divides(parts) == (parts == 2)
    assert batch.shards == 1


@pytest.mark.parametrize("residual", [False, True])
def test_a_batch_that_looks_like_a_weight_is_cut_all_the_same(residual):
    def forward(weights, x):
        for up, down in weights:
            y = jax.nn.relu(x @ up) @ down
            x = x + y if residual else y
        return x

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    jaxpr = jax.make_jaxpr(forward)([(shape(16, 32), shape(32, 16))] * 3, shape(64, 16))
    dims = DimNames(jaxpr)
    ranked = list(batch_dims(jaxpr, dims, {}, SIZES))
    assert [(r.dim(dims, jaxpr.invars[-1]), r.held) for r in ranked] == [(0, 64)]
    assert all(r.dim(dims, weight) is None for r in ranked for weight in jaxpr.invars[:-1])


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def convolved(x, w, kernel):
    """Convolve images of 4 x 4 patches; [16, 8, 8, 3] become [16, 4, 32]."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (4, 4), "VALID", dimension_numbers=numbers)
    return x.reshape(x.shape[0], -1, x.shape[-1]) @ w


def grouped(x, w, sizes):
    """Multiply tokens in two groups, then all of them with one matrix."""
    return lax.ragged_dot(x, w, sizes) @ w[0].T


@pytest.mark.parametrize(
    ("forward", "arguments"),
    [
        (convolved, (shape(16, 8, 8, 3), shape(32, 8), shape(4, 4, 3, 32))),
        (grouped, (shape(16, 32), shape(2, 32, 8), shape(2, dtype=jnp.int32))),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_other_matmuls_than_dot_general_are_followed_too(forward, arguments, trains: bool):
    def step(x, w, other):
        if not trains:
            return forward(x, w, other)
        return w - jax.grad(lambda w: jnp.sin(forward(x, w, other)).sum())(w)

    jaxpr = jax.make_jaxpr(step)(*arguments)
    dims = DimNames(jaxpr)
    first = next(batch_dims(jaxpr, dims, {}, SIZES))
    assert (first.dim(dims, jaxpr.invars[0]), first.held) == (0, 16)


@pytest.mark.parametrize("sharded", [True, False])
def test_under_vmap_the_batch_follows_the_mapped_dim(sharded: bool):
    """All matmuls have the mapped dim; where a device has one replica, its batch is split."""
    shapes = shape(4, 16, 32), shape(4, 32, 16), shape(4, 16, 8, 16)
    jaxpr = jax.make_jaxpr(jax.vmap(step))(*shapes)
    dims = DimNames(jaxpr)
    spec = (("data",), (), (), ()) if sharded else ((), (), (), ())
    shardings = {dots(jaxpr)[0].index: Shardings(lhs=spec, rhs=((), (), ()), out=None)}
    ranked = list(batch_dims(jaxpr, dims, shardings, SIZES))
    found = [(r.dim(dims, jaxpr.invars[2]), r.held) for r in ranked]
    assert found == ([(0, 1), (1, 16), (2, 8)] if sharded else [(0, 4)])
