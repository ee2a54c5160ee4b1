"""Leaves, losses and seeds of any kind: what a user would expect, or a sentence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo
from jaxoverlap.train.compression import qsgd, uniform
from tests.train.zeroth_order import problem

TRANSFORM = zo.mezo(eps=1e-3, lr=1e-2)
BATCH = np.ones(2, np.float32)


def total(params, batch):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("decay", (0.0, 0.1))
def test_doubles_stay_doubles_in_parameters_losses_and_updates(decay):
    transform = zo.mezo(
        eps=1e-3, lr=1e-2, directions=2, weight_decay=decay, decays=lambda path, leaf: True
    )
    with jax.enable_x64(True):
        begin = np.array([1e8 + 1, 2.0])
        step = zo.step(lambda p, b: jnp.sum(p) * b[0], transform)
        state, metrics = step(step.init(jnp.asarray(begin)), np.ones(2))
        assert state.params.dtype == metrics["losses"].dtype == np.float64
        updates = transform.updates(
            zo.Pending(metrics["scalars"], metrics["rate"], jnp.int32(0)), state.key, begin
        )
        np.testing.assert_allclose(state.params, begin + np.asarray(updates), rtol=1e-15)
        # The difference of two losses of 1e8, which float32 rounds to multiples of 8.
        losses = np.asarray(metrics["losses"])
        np.testing.assert_allclose(losses.mean(), begin.sum(), rtol=1e-12)
        along = (losses[:, 0] - losses[:, 1]) / 2e-3
        np.testing.assert_allclose(metrics["scalars"], along, rtol=1e-3)
        huge = jnp.full(2, 1e200)  # float32 has no such numbers
        assert np.isfinite(step(step.init(huge), np.zeros(2))[0].params).all()


def test_directions_do_not_depend_on_the_width_of_jax_s_own_floats():
    step = zo.step(total, TRANSFORM)
    params = np.ones((3, 2), np.float32)
    narrow = np.asarray(step(step.init(params), BATCH)[0].params)
    with jax.enable_x64(True):
        wide = zo.step(total, TRANSFORM)
        found = wide(wide.init(jnp.asarray(params)), BATCH)[0].params
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, narrow, rtol=1e-6)


def test_python_s_floats_are_parameters(tmp_path):
    params = dict(a=1.5, b=1.5, w=jnp.asarray(0.5))  # one object, and a weak type
    step, arrays = zo.step(total, TRANSFORM), jax.tree.map(np.float32, params)
    state, other = step.init(params), step.init(arrays)
    like = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, step.abstract(params)))
    assert like[0] == like[1]
    with zo.Log(tmp_path / "log", zo.header_of(params, TRANSFORM, seed=0)) as log:
        for _ in range(2):
            state, metrics = step(state, BATCH)
            other, _ = step(other, BATCH)
            log.add(metrics)
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state.params))
    again = zo.replay(log.records, TRANSFORM, params, seed=0)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


@pytest.mark.parametrize(
    ("leaf", "says"),
    (
        (1, r"parameter \['a'\] is of int32: expected floats"),
        (True, r"parameter \['a'\] is of bool: expected floats"),
        (1j, r"parameter \['a'\] is of complex64: expected floats"),
        (jax.random.key(0), r"parameter \['a'\] is of key<fry>: expected floats"),
        (jnp.ones(3, jnp.float8_e4m3fn), "is of float8_e4m3fn: expected floats of 16 bits"),
        (jnp.ones(3, jnp.float4_e2m1fn), "is of float4_e2m1fn: expected floats of 16 bits"),
    ),
)
def test_leaves_that_cannot_be_perturbed_are_refused(leaf, says):
    with pytest.raises(ValueError, match=says):
        zo.step(total, TRANSFORM).init(dict(a=leaf, b=jnp.ones(2)))


@pytest.mark.parametrize("leaf", (jnp.ones((4, 4), jnp.int8), jnp.ones((4, 4), jnp.float8_e5m2)))
def test_adapters_of_what_cannot_be_trained_are_refused(leaf):
    with pytest.raises(ValueError, match=r"parameter \['w'\] is of .*: expected floats"):
        zo.lora(dict(w=leaf), rank=2, where=lambda path: True)


@pytest.mark.parametrize(
    "loss",
    (
        lambda p, b: jnp.int32(3),
        lambda p, b: jnp.sum(p) > 0,
        lambda p, b: jnp.sum(p) + 1j,
        lambda p, b: zo.Weighted(jnp.int32(3), jnp.float32(1)),
    ),
)
def test_a_loss_that_has_no_small_differences_is_refused(loss):
    step = zo.step(loss, TRANSFORM)
    with pytest.raises(ValueError, match=r"the loss is of (int32|bool|complex64): expected real"):
        step(step.init(jnp.ones(3)), BATCH)


def test_the_weight_of_a_loss_may_be_a_count():
    step = zo.step(lambda p, b: zo.Weighted(jnp.sum(p), jnp.int32(2)), TRANSFORM)
    _, metrics = step(step.init(jnp.ones(3)), BATCH)
    np.testing.assert_allclose(metrics["loss"], 1.5, rtol=1e-4)


@pytest.mark.parametrize("seed", (2**32, 2**63, 2**64))
def test_a_seed_of_which_jax_would_drop_bits_is_refused(seed):
    says = f"seed={seed}: expected a whole number, 0 to 4294967295"
    for make in (
        lambda: zo.step(total, TRANSFORM).init(jnp.ones(3), seed=seed),
        lambda: zo.replay(np.ones((1, 2)), TRANSFORM, jnp.ones(3), seed=seed),
        lambda: zo.lora(problem.params(), rank=2, where=lambda path: "up" in path, seed=seed),
        lambda: uniform(qsgd(4), seed=seed),
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_seeds_of_32_bits_have_runs_of_their_own():
    step = zo.step(total, TRANSFORM)
    runs = [
        np.asarray(step(step.init(jnp.ones(9), seed=seed), BATCH)[0].params)
        for seed in (0, 1, 2**31, 2**32 - 1)
    ]
    assert len({run.tobytes() for run in runs}) == len(runs)
