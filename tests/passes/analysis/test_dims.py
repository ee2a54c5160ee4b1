"""Dims of values that are one and the same get one name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dims import DimNames


def named(fn: Callable, *shapes: tuple[int, ...], dtype=jnp.float32) -> tuple[list, list]:
    """Return the names of the dims of a function's arguments, and of its results."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    jaxpr = jax.make_jaxpr(fn)(*arguments).jaxpr
    names = DimNames(jaxpr)
    return [names.of(v) for v in jaxpr.invars], [names.of(v) for v in jaxpr.outvars]


def test_a_matmul_joins_what_it_contracts_and_what_it_keeps():
    ((b, s, d), (again, f)), ((b2, s2, f2),) = named(
        lambda x, w: jnp.einsum("bsd,df->bsf", x, w), (2, 4, 8), (8, 16)
    )
    assert (again, b2, s2, f2) == (d, b, s, f)
    assert len({b, s, d, f}) == 4


def test_a_batched_matmul_joins_its_batch():
    ((b, q, n, h), (b2, k, n2, h2)), (out,) = named(
        lambda q, k: jnp.einsum("bqnh,bknh->bnqk", q, k), (2, 4, 8, 16), (2, 4, 8, 16)
    )
    assert (b2, n2, h2) == (b, n, h)
    assert out == (b, n, q, k)


@pytest.mark.parametrize(
    ("fn", "shape", "kept"),
    [
        (lambda x: jnp.tanh(x) * 2 + 1, (2, 4), (0, 1)),
        (lambda x: x.T, (2, 4), (1, 0)),
        (lambda x: x[None], (2, 4), (None, 0, 1)),
        (lambda x: x[:, 0], (2, 4), (0,)),
        (lambda x: x.sum(0), (2, 4), (1,)),
        (lambda x: jnp.argmax(x, axis=1), (2, 4), (0,)),
        (lambda x: x - x.mean(-1, keepdims=True), (2, 4), (0, 1)),
        (lambda x: jax.nn.softmax(x), (2, 4), (0, 1)),
        (lambda x: x.reshape(2, 2, 2, 8), (2, 4, 8), (0, 1, None, 2)),
        (lambda x: x.reshape(2, 32), (2, 4, 8), (0, 1)),
        (lambda x: x.reshape(8, 8), (2, 4, 8), (0, 2)),
        (lambda x: x.reshape(1, 2, 4, 1), (2, 4), (None, 0, 1, None)),
        (lambda x: jnp.concatenate([x, x], 1), (2, 4), (0, None)),
        (lambda x: jnp.pad(x, ((0, 0), (1, 0))), (2, 4), (0, None)),
        (lambda x: jnp.broadcast_to(x, (3, 2, 4)), (2, 4), (None, 0, 1)),
        (lambda x: jnp.cumsum(x, 1), (2, 4), (0, 1)),
        (lambda x: lax.optimization_barrier(x), (2, 4), (0, 1)),
        (lambda x: jnp.sort(x, axis=1), (2, 4), (0, None)),
        (lambda x: jnp.flip(x, 0), (2, 4), (None, 1)),
        (lambda x: jnp.fft.fft(x, axis=-1), (2, 4), (0, None)),
        (lambda x: jax.jit(jnp.tanh)(x), (2, 4), (0, 1)),
        (lambda x: jax.checkpoint(jnp.tanh)(x), (2, 4), (0, 1)),
        (lambda x: jax.nn.gelu(x), (2, 4), (0, 1)),
        (lambda x: jax.nn.relu(x), (2, 4), (0, 1)),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (2, 4), (0, 1)),
        (lambda x: lax.fori_loop(0, 3, lambda i, v: v * i, x), (2, 4), (0, 1)),
        (lambda x: lax.while_loop(lambda v: v[0, 0] < x[0, 0], lambda v: v + x, x), (2, 4), (0, 1)),
        (lambda x: lax.scan(lambda c, row: (c + row, row), x[0], x)[1], (2, 4), (0, 1)),
        (lambda x: lax.scan(lambda c, row: (c + row, None), x[0], x)[0], (2, 4), (1,)),
        (lambda x: jnp.zeros((3, 4)).at[jnp.array([1, 2])].add(x), (2, 4), (None, 1)),
    ],
)
def test_dims_keep_their_names(fn: Callable, shape: tuple[int, ...], kept: tuple):
    (given,), (result,) = named(fn, shape)
    assert len(result) == len(kept)
    for name, dim in zip(result, kept, strict=True):
        assert name == given[dim] if dim is not None else name not in given


def test_a_lookup_has_the_rows_of_its_indices_and_the_columns_of_its_table():
    def looked_up(table, tokens):
        return table[tokens]

    jaxpr = jax.make_jaxpr(looked_up)(jnp.zeros((16, 8)), jnp.zeros((2, 4), int)).jaxpr
    names = DimNames(jaxpr)
    (_, columns), rows = map(names.of, jaxpr.invars)
    assert names.of(jaxpr.outvars[0]) == (*rows, columns)


def test_weights_of_a_scan_over_layers_have_the_names_of_one_layer():
    def layers(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, ws)[0]

    ((b, d), (n, d2, f), (n2, f2, d3)), ((b2, d4),) = named(
        lambda x, up, down: layers(x, (up, down)), (2, 4), (3, 4, 8), (3, 8, 4)
    )
    assert {d2, d3, d4} == {d}
    assert (f2, b2, n2) == (f, b, n)


def test_the_backward_pass_has_the_names_of_the_forward_pass():
    def loss(x, up, down):
        return (jnp.tanh(x @ up) @ down).sum()

    (_, up, down), gradients = named(jax.grad(loss, (1, 2)), (2, 4), (4, 8), (8, 4))
    assert gradients == [up, down]


def test_an_equation_that_is_not_understood_names_nothing():
    def local(x):
        return lax.psum(x, "a")

    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    (given,), (result,) = named(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), (2, 4)
    )
    assert not set(given) & set(result)


@pytest.mark.parametrize(
    ("groups", "channels", "features"),
    [(1, 8, 16), (8, 8, 8), (2, 8, 16)],
    ids=["dense", "depthwise", "grouped"],
)
def test_a_convolution_keeps_its_batch_and_depthwise_its_features(groups, channels, features):
    def convolved(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )  # fmt: skip

    ((b, w, c), (taps, i, o)), ((b2, w2, o2),) = named(
        convolved, (4, 10, channels), (3, channels // groups, features)
    )
    assert (b2, o2) == (b, o)
    assert w2 not in (b, w, c, taps)
    assert (i == c) == (groups == 1)
    assert (o == c) == (groups == 8)


def test_the_gradient_of_a_depthwise_kernel_has_the_kernels_dims():
    def loss(kernel, x):
        return lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
        ).sum()

    ((_, _, o), (_, _, c)), ((_, _, made),) = named(jax.grad(loss), (3, 1, 8), (4, 10, 8))
    assert made == o == c


def test_a_grouped_matmul_keeps_its_rows_and_its_groups():
    def multiplied(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 4), (2, 4, 8))]
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)

    def gradients(x, w, sizes):
        return jax.grad(lambda x, w: jnp.sin(multiplied(x, w, sizes)).sum(), (0, 1))(x, w)

    jaxpr = jax.make_jaxpr(gradients)(*arguments, sizes).jaxpr
    names = DimNames(jaxpr)
    (m, k), (g, k2, _) = (names.of(v) for v in jaxpr.invars[:2])
    assert k2 == k and names.of(jaxpr.invars[2]) == (g,)
    assert [names.of(v) for v in jaxpr.outvars] == [(m, k), names.of(jaxpr.invars[1])]
    assert not names.unnamed


def test_an_equation_in_a_jit_of_jaxs_own_is_named_by_the_users_line():
    jaxpr = jax.make_jaxpr(lambda x: jnp.linalg.inv(x) @ x)(jnp.ones((4, 4))).jaxpr
    unnamed = DimNames(jaxpr).unnamed
    assert unnamed and all(compat.source_line(eqn)[0] == __file__ for eqn in unnamed)
