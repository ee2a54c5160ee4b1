"""Optimizers, dtypes and meshes that users bring; and errors for what cannot be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxoverlap.train import compression
from jaxoverlap.train.compression import none, power_sgd, qsgd, uniform
from tests.train.compression.problem import mesh_of

PARAMS = {"up": np.ones((48, 64), np.float32), "bias": np.ones(64, np.float32)}
BATCH = np.random.default_rng(0).normal(size=(3, 8, 48)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["up"] / 50 + params["bias"]) ** 2)


def step_of(optimizer=None, sync=None, mesh=None, gradients=None):
    return compression.data_parallel(
        gradients or jax.value_and_grad(loss),
        optimizer or optax.sgd(1e-2),
        mesh or mesh_of(),
        axis="data",
        sync=sync or uniform(none()),
    )


LABELS = {"up": "matrix", "bias": "rest"}


@pytest.mark.parametrize(
    "optimizer",
    (
        optax.masked(optax.adam(1e-2), {"up": True, "bias": False}),
        optax.partition({"matrix": optax.adam(1e-2), "rest": optax.set_to_zero()}, LABELS),
        optax.MultiSteps(optax.adam(1e-2), 2),
    ),
    ids=("masked", "partition", "multi-steps"),
)
def test_optimizers_that_leave_parameters_out_do_what_they_do_alone(optimizer):
    step = step_of(optimizer)
    state = step.init(PARAMS)
    params, moments = PARAMS, optimizer.init(PARAMS)
    for batch in BATCH:
        state, value = step(state, batch)
        expected, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, params)


def test_an_optimizer_that_follows_the_loss_gets_it():
    """`reduce_on_plateau` and Polyak's step size are given the loss as `value=`."""
    optimizer = optax.chain(optax.sgd(1e-1), optax.contrib.reduce_on_plateau(0.5, patience=1))
    for one in (optimizer, optax.polyak_sgd(max_learning_rate=0.5)):
        step = step_of(one)
        state, params, inner = step.init(PARAMS), PARAMS, one.init(PARAMS)
        for batch in BATCH:
            state, _ = step(state, batch)
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, inner = one.update(gradients, inner, params, value=value, grad=gradients)
            params = optax.apply_updates(params, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, params)


def test_an_optimizer_with_extra_arguments_of_its_own_gets_no_others():
    """The update of `optax.contrib.sam` takes `grad_fn` and nothing else by name."""
    inner = optax.sgd(1e-2)

    def update(updates, state, params=None, *, grad_fn=None):
        return inner.update(updates, state, params)

    step = step_of(optax.GradientTransformationExtraArgs(inner.init, update))
    usual = step_of(inner)
    state, _ = step(step.init(PARAMS), BATCH[0])
    other, _ = usual(usual.init(PARAMS), BATCH[0])
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)


def test_the_loss_is_the_first_of_a_value_with_more():
    def with_more(params, batch):
        return loss(params, batch), {"more": jnp.float32(7)}

    step = step_of(optax.polyak_sgd(0.5), gradients=jax.value_and_grad(with_more, has_aux=True))
    usual = step_of(optax.polyak_sgd(0.5))
    state, value = step(step.init(PARAMS), BATCH[0])
    other, wanted = usual(usual.init(PARAMS), BATCH[0])
    np.testing.assert_allclose(value[0], wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b), state.params, other.params)


def test_an_optimizer_that_needs_more_is_refused_in_a_sentence():
    def update(updates, state, params=None, *, value_fn, **others):
        return updates, state

    step = step_of(optax.GradientTransformationExtraArgs(lambda params: (), update))
    with pytest.raises(ValueError, match=r"needs 'value_fn', and gets .* value=, grad="):
        step(step.init(PARAMS), BATCH[0])
    search = step_of(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)))
    with pytest.raises(ValueError, match="as of a line search: take another optimizer"):
        search.init(PARAMS)


def test_a_mean_too_large_for_16_bits_is_left_out_and_named():
    """Each worker's gradient is finite, and their sum is not."""
    params = {"a": jnp.ones(3, jnp.float16)}
    large = {"a": jnp.full(3, 4e4, jnp.float16)}
    step = step_of(gradients=lambda params, batch: (jnp.float32(1), large))
    state, _ = step(step.init(params), np.ones((8, 1), np.float32))
    np.testing.assert_array_equal(state.params["a"], params["a"])
    with pytest.raises(compression.NonFiniteGradientError, match="raw leaves, or its average"):
        step.check()


@pytest.mark.parametrize("workers", (1, 2))
def test_16_bits_and_a_single_worker_beside_an_automatic_axis(workers):
    """XLA:CPU aborts on an all-reduce of 16 bits there, and fails on one worker's."""
    kinds, devices = (AxisType.Auto,) * 2, jax.devices()[: 2 * workers]
    mesh = jax.make_mesh((workers, 2), ("data", "model"), kinds, devices=devices)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)
    step = step_of(sync=uniform(power_sgd(2)), mesh=mesh)
    state, value = step(step.init(params), BATCH[0])
    np.testing.assert_allclose(value, loss(params, BATCH[0]), rtol=1e-2)
    assert state.params["up"].dtype == jnp.bfloat16


def test_states_and_gradients_that_do_not_fit_are_refused():
    step, params = step_of(sync=uniform(power_sgd(2))), dict(PARAMS, scale=1.5)
    state = step.init(params)  # a number of Python's is a parameter too
    fewer = step_of(sync=uniform(power_sgd(2)), mesh=mesh_of(2))
    with pytest.raises(ValueError, match="of 4 workers, and the mesh has 2"):
        fewer(state, BATCH[0])
    with pytest.raises(ValueError, match="inside"):
        jax.jit(step)(state, BATCH[0])
    with pytest.raises(ValueError, match=r"restore a checkpoint to what abstract"):
        step(jax.tree.map(np.asarray, state), BATCH[0])
    alone = step_of(gradients=loss)
    with pytest.raises(ValueError, match="returned a"):
        alone(alone.init(PARAMS), BATCH[0])
    partial = step_of(gradients=lambda params, batch: (0.0, {"up": params["up"]}))
    with pytest.raises(ValueError, match="expected a tree like the parameters"):
        partial(partial.init(PARAMS), BATCH[0])


def test_one_bit_with_error_feedback_would_never_settle():
    with pytest.raises(ValueError, match="grow without end"):
        qsgd(1, error_feedback=True)
    assert qsgd(1).bits == 1


def test_an_update_that_is_not_finite_is_left_out_and_named():
    """Gradients are finite here; a schedule's rate is not, in the second step."""
    step = step_of(optax.adam(lambda count: jnp.where(count == 1, jnp.nan, 1e-2)))
    state, _ = step(step.init(PARAMS), BATCH[0])
    before = jax.device_get((state.params, state.optimizer))
    state, _ = step(state, BATCH[1])
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get((state.params, state.optimizer)), before
    )
    with pytest.raises(compression.NonFiniteGradientError, match="step 1: the optimizer's update"):
        step.check()
