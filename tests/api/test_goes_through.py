"""Steps that overlap() once refused, or changed, and that users write all the same."""

from __future__ import annotations

import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def at(*spec, mesh: Mesh = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def array(shape, *spec, dtype="f", mesh: Mesh = MESH, seed: int = 0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(jnp.asarray(values, dtype), at(*spec, mesh=mesh))


X = array((16, 32), "data", "model")
W = array((32, 64), "model", None, seed=1)


@pytest.mark.parametrize("callback", [jax.pure_callback, io_callback])
def test_a_matmul_reads_the_result_of_a_callback(callback):
    """A callback's result is on one device: its sharding has no dims."""

    def step(x, w):
        y = callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y @ w, x @ w

    overlapped = jaxoverlap.overlap(jax.jit(step))
    for got, wanted in zip(overlapped(X, W), jax.jit(step)(X, W), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    first, second = overlapped.explain(X, W).entries
    assert isinstance(first, jaxoverlap.Skip)
    assert isinstance(second, jaxoverlap.Decision)


def test_halves_of_a_boolean_matmul_are_joined_by_or():
    def step(seen, wanted, w):
        both = lax.dot_general(seen, wanted, (((0,), (0,)), ((), ())))
        return both, (jnp.where(seen, 1.0, 0.0) @ w).sum()

    seen, wanted = (array((16, 32), "data", None, seed=s) > 0.5 for s in (2, 3))
    w = array((32, 64), None, "model")
    overlapped = jaxoverlap.overlap(jax.jit(step), halves=2)
    assert overlapped.explain(seen, wanted, w).split
    np.testing.assert_array_equal(overlapped(seen, wanted, w)[0], jax.jit(step)(seen, wanted, w)[0])


def test_a_step_with_rings_is_exported():
    def step(x, w):
        return lax.with_sharding_constraint(x @ w, at("data", "model"))

    w = array((32, 64), None, "model")
    overlapped = jaxoverlap.overlap(jax.jit(step))
    assert overlapped.explain(X, w).decisions
    written = jax.export.export(overlapped)(X, w).serialize()
    read = jax.export.deserialize(written)
    np.testing.assert_allclose(read.call(X, w), step(X, w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("errors", [checkify.float_checks | checkify.index_checks])
def test_under_checkify_a_step_runs_as_it_is_and_says_why(errors):
    def step(x, w):
        return jnp.log(x @ w)

    overlapped = jaxoverlap.overlap(jax.jit(step))
    with pytest.warns(UserWarning, match="step runs without overlap: checkify"):
        error, got = checkify.checkify(overlapped, errors=errors)(X, W)
    plain_error, wanted = checkify.checkify(jax.jit(step), errors=errors)(X, W)
    assert error.get() == plain_error.get() is not None
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert overlapped(X, W).shape == (16, 64)  # elsewhere it has its rings


def test_checks_of_the_users_own_go_through_checkify():
    def step(x, w):
        checkify.check(jnp.all(x < 0), "{largest} is above 0", largest=x.max())
        return x @ w

    with pytest.warns(UserWarning, match="checkify"):
        error, _ = checkify.checkify(jaxoverlap.overlap(jax.jit(step)))(X, W)
    assert "is above 0" in error.get()


def test_a_step_around_checkify_has_rings():
    checked = checkify.checkify(lambda x, w: jnp.log(x @ w), errors=checkify.float_checks)
    overlapped = jaxoverlap.overlap(jax.jit(checked))
    assert overlapped.explain(X, W).decisions
    assert "nan" in overlapped(X, W)[0].get()


def test_a_step_is_copied_deeply():
    step = jaxoverlap.overlap(jax.jit(lambda x, w: x @ w))
    state = {"step": step, "learning rate": [1e-3]}
    again = copy.deepcopy(state)
    assert again["step"] is not step
    np.testing.assert_allclose(again["step"](X, W), step(X, W))


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("variant", ["one_way", "two_way", "direct"])
def test_sums_of_a_ring_are_about_as_exact_as_a_whole_matmul(sizes, dtype, variant):
    """Sums travel in 16 bits, as XLA's own do; each hop rounds once, and nothing else does."""
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w = (array((512, 64), "data", None, dtype=dtype, mesh=mesh, seed=s) for s in (4, 5))

    def step(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x * 1.1).T @ w, at("data", None, mesh=mesh))

    exact = np.tanh(np.asarray(x, float) * 1.1).T @ np.asarray(w, float)

    def off(y) -> float:
        return float(np.linalg.norm(np.asarray(y, float) - exact) / np.linalg.norm(exact))

    overlapped = jaxoverlap.overlap(jax.jit(step), granularity=variant)
    (ring,) = overlapped.explain(x, w).decisions
    assert (ring.kind, ring.axis) == ("matmul_reduce_scatter", "data")
    assert off(overlapped(x, w)) < 2 * off(jax.jit(step)(x, w))


def test_what_jnp_traces_by_itself_is_named_by_the_users_line():
    def step(x, w):
        y = jnp.cumsum(x, 0)
        return (y @ w).sum() + (x @ w).sum()

    x, w = array((16, 32), "data", None), array((32, 64), None, "model")
    notes = jaxoverlap.overlap(jax.jit(step), halves=2).explain(x, w).notes
    line = step.__code__.co_firstlineno + 1
    assert f"  Parts are joined for cumsum (api/test_goes_through.py:{line})." in notes


def test_a_wrong_sharding_is_refused_by_the_arguments_name():
    compiled = jaxoverlap.overlap(jax.jit(lambda x, w: x @ w)).lower(X, W).compile()
    with pytest.raises(ValueError, match=r"Argument x with shape float32\[16,32\]"):
        compiled(jax.device_put(X, at("model", None)), W)
