"""Complex parameters are averaged and clipped as the numbers that they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train.local_updates.algorithms import diloco
from jaxoverlap.train.local_updates.co2 import co2
from jaxoverlap.train.local_updates.local_updates import LocalUpdates
from jaxoverlap.train.local_updates.transforms import clipped_momentum
from jaxoverlap.train.placement import mean_of_workers
from tests.train.compression.problem import mesh_of

START = np.array([1 + 2j, -3j, 0.5], np.complex64)
BATCHES = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)


def step(params, batch):
    """Each worker goes its own way, also in the imaginary part."""
    value = jnp.mean(batch)
    return params - (0.1 + 0.2j) * value, value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float16", "int32"])
def test_workers_are_averaged_by_value(dtype):
    values = jnp.asarray([[1, 4], [2, 8]], dtype) * (1 + 1j if dtype == "complex64" else 1)
    mean = mean_of_workers(values)
    wanted = values[0] if dtype == "int32" else np.asarray(values, np.complex64).mean(0)
    assert mean.dtype == values.dtype
    np.testing.assert_allclose(np.asarray(mean, np.complex64), wanted, rtol=1e-2)


def test_double_precision_is_not_averaged_in_single():
    with jax.enable_x64(True):
        mean = mean_of_workers(jnp.asarray([1e8, 1e8 + 2], jnp.float64))
        assert mean.dtype == np.float64 and float(mean) == 1e8 + 1


def test_a_clip_keeps_the_phase():
    transform = clipped_momentum(0.5, clip=1.0)
    state = transform.init(START)
    updates, _ = transform.update(jnp.asarray(START), state)
    np.testing.assert_allclose(updates, START / np.maximum(np.abs(START), 1), rtol=1e-6)


@pytest.mark.parametrize("outer", [co2(every=2), diloco(every=2)], ids=["co2", "diloco"])
def test_a_change_of_workers_keeps_what_all_learnt(outer):
    rounds = LocalUpdates(step, mesh_of(), outer=outer, params=None, overlap=False)
    state = rounds.init(START)
    for batches in BATCHES:
        state, _ = rounds.round(state, batches)
    params = np.asarray(rounds.params(state))
    assert np.abs(params - START).max() > 1e-3 and np.abs((params - START).imag).max() > 1e-3
    fewer = LocalUpdates(step, mesh_of(2), outer=outer, params=None, overlap=False)
    again = fewer.init(params)
    np.testing.assert_allclose(fewer.params(again), params, rtol=1e-5)
