"""Floats of 8 bits: refused where they are averaged, and kept where they are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import LocalUpdates, co2
from jaxoverlap.train.compression import data_parallel, none, uniform
from jaxoverlap.train.local_updates.transforms import norm
from jaxoverlap.train.placement import mean_of_workers
from tests.train.compression.problem import mesh_of

NARROW = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn)


def local_updates(step, **options):
    return LocalUpdates(step, mesh_of(2), outer=co2(every=2), overlap=False, **options)


@pytest.mark.parametrize("dtype", NARROW)
def test_parameters_of_8_bits_are_refused(dtype):
    params = dict(params=dict(w=jnp.ones(3, dtype)))
    says = rf"a parameter of dtype {jnp.dtype(dtype)} at \['w'\]: expected floats of 16 bits"
    updates = local_updates(lambda s, b: (s, b.mean()))
    step = data_parallel(lambda p, b: (0.0, p), optax.sgd(0.1), mesh_of(2), sync=uniform(none()))
    for make in (
        lambda: updates.init(params),
        lambda: updates.abstract(params),
        lambda: step.init(params["params"]),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(ValueError, match=r"outer_dtype=.*: expected a dtype of floats of 16 bits"):
        local_updates(lambda s, b: (s, b.mean()), outer_dtype=dtype)


def test_a_train_state_may_have_8_bits_beside_its_parameters():
    def step(state, batch):
        params = state["params"] - 0.1 * batch.mean()
        return dict(params=params, low=params.astype(jnp.float8_e4m3fn)), batch.mean()

    updates = local_updates(step)
    state = updates.init(dict(params=jnp.ones(3), low=jnp.ones(3, jnp.float8_e4m3fn)))
    rows = np.repeat(np.float32([1, 3]), 2)[:, None] * np.ones((2, 4, 1), np.float32)
    state, _ = updates.round(state, rows)
    low = np.asarray(state.worker["low"], np.float32)
    whole = updates.consolidate(state)
    assert whole.worker["low"].dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(np.float32(whole.worker["low"]), low.mean(0), rtol=0.07)
    updates.round(updates.spread(whole), rows)


def test_a_model_s_state_of_8_bits_is_averaged_in_more():
    def gradients(params, model, batch):
        low = (batch.mean() * jnp.ones(2)).astype(jnp.float8_e4m3fn)
        return (batch.mean(), low), params * 0

    step = data_parallel(gradients, optax.sgd(0.1), mesh_of(4), sync=uniform(none()), stateful=True)
    state = step.init(jnp.ones(3), jnp.ones(2, jnp.float8_e4m3fn))
    state, _ = step(state, np.float32([[240], [240], [208], [240]]))  # the sum is beyond 8 bits
    np.testing.assert_array_equal(np.float32(state.model), 224)
    assert state.model.dtype == jnp.float8_e4m3fn


def test_means_and_norms_of_narrow_wide_and_complex_numbers():
    low = jnp.asarray([[1.0], [3.0]], jnp.float8_e4m3fn)
    assert float(mean_of_workers(low)[0]) == 2
    np.testing.assert_allclose(norm([jnp.asarray([3 + 4j])]), 5)
    with jax.enable_x64(True):
        np.testing.assert_allclose(norm([jnp.asarray([1e30, 0.0])]), 1e30, rtol=1e-6)


@pytest.mark.parametrize("sync", (None, uniform(none())))
@pytest.mark.filterwarnings("ignore:.*compresses 0 of 0")
def test_states_are_alike_with_and_without_doubles(sync):
    """Flags are float32 in both, so that a round's state is the next round's."""
    with jax.enable_x64(True):
        updates = local_updates(lambda s, b: (s - b.mean(), b.mean()), params=None, sync=sync)
        state = updates.init(jnp.ones(3, jnp.float64))
        first = jax.tree.map(lambda leaf: leaf.dtype, state)
        state, _ = updates.round(state, np.ones((2, 4, 1)))
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == first
        updates.round(updates.spread(updates.consolidate(state)), np.ones((2, 4, 1)))
        np.testing.assert_array_equal(updates.params(state), 0.0)  # 1, less 2 clipped to 1
