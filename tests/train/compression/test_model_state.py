"""The state of a model besides its parameters, in a step whose gradients are averaged compressed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxoverlap.train import compression
from jaxoverlap.train.compression import none, power_sgd, uniform
from tests.train.compression.problem import WORKERS, mesh_of

ROWS, WIDTH, RATE = 8, 32, 0.1


def loss(params, model, batch):
    """Return the loss of a layer behind a norm with a running mean, and noise; and the state."""
    mean = 0.5 * model["mean"] + 0.5 * batch.mean(0)
    noise = jax.random.uniform(model["key"])
    value = jnp.mean(((batch - mean) @ params["w"] - 1) ** 2) + noise
    return value, dict(model, mean=mean, count=model["count"] + 1)


BOTH = jax.value_and_grad(loss, has_aux=True)


def start():
    w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype("f")
    model = dict(mean=jnp.zeros(WIDTH), count=jnp.int32(0), key=jax.random.key(1))
    return {"w": jnp.asarray(w)}, model


def batch_of(step):
    return np.random.default_rng((3, step)).normal(1, size=(WORKERS * ROWS, WIDTH)).astype("f")


def make(sync, workers=WORKERS, both=BOTH):
    return compression.data_parallel(
        both, optax.sgd(RATE), mesh_of(workers), sync=sync, stateful=True
    )


def plain(model):
    return dict(model, key=jax.random.key_data(model["key"]))


def test_floats_are_averaged_keys_are_each_worker_s_own_and_integers_stay():
    """Against each worker alone in a Python loop: its part of the batch, its state, its key."""
    step, (params, model) = make(uniform(none())), start()
    state = step.init(params, model)
    for number in range(3):
        state, value = step(state, batch_of(number))
        parts = np.split(batch_of(number), WORKERS)
        keys = [jax.random.fold_in(model["key"], worker) for worker in range(WORKERS)]
        alone = [
            BOTH(params, dict(model, key=key), part) for key, part in zip(keys, parts, strict=True)
        ]
        values = [value for (value, _), _ in alone]
        gradient = np.mean([g["w"] for _, g in alone], axis=0)
        params = {"w": params["w"] - RATE * gradient}
        mean = jnp.asarray(np.mean([seen["mean"] for (_, seen), _ in alone], axis=0))
        model = dict(
            mean=mean, count=model["count"] + 1, key=jax.random.fold_in(model["key"], WORKERS)
        )
        np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state.model["mean"], model["mean"], rtol=1e-5)
    assert int(state.model["count"]) == 3
    assert plain(state.model)["key"].tolist() == plain(model)["key"].tolist()
    floats = step.sent_bytes(state) - step.sent_bytes(replace(state, model=None))
    assert floats == pytest.approx(2 * 3 / 4 * 4 * WIDTH)
    step.check()


def test_it_goes_on_with_other_workers_and_what_is_not_finite_changes_nothing():
    step, (params, model) = make(uniform(power_sgd(2))), start()
    state, _ = step(step.init(params, model), batch_of(0))
    two = make(uniform(power_sgd(2)), workers=2)
    shapes = two.abstract(params, model)
    state = two.spread(step.consolidate(state))
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (np.shape(leaf), leaf.dtype) == (like.shape, like.dtype)
    before = jax.tree.map(np.asarray, plain(state.model))
    bad = batch_of(1)
    bad[3] = np.nan
    state, _ = two(state, bad)
    jax.tree.map(np.testing.assert_array_equal, before, plain(state.model))
    with pytest.raises(compression.NonFiniteGradientError):
        two.check()
    state, _ = two(state, batch_of(2))
    assert int(state.model["count"]) == 2


def test_the_state_of_an_nnx_model():
    net = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def of_net(params, rest, batch):
        net = nnx.merge(graph, params, rest, copy=True)
        return jnp.mean(net(batch) ** 2), nnx.state(net, nnx.Not(nnx.Param))

    step = make(uniform(none()), both=jax.value_and_grad(of_net, has_aux=True))
    state, _ = step(step.init(params, rest), batch_of(0))
    mean = jax.tree.leaves(state.model)[0]
    np.testing.assert_allclose(mean, 0.5 * batch_of(0).mean(0), rtol=1e-5)


def test_a_state_without_stateful_and_the_other_way_are_refused():
    params, model = start()
    plain_step = compression.data_parallel(BOTH, optax.sgd(0.1), mesh_of(), sync=uniform(none()))
    with pytest.raises(ValueError, match="stateful=True"):
        plain_step.init(params, model)
    step = make(uniform(none()))
    with pytest.raises(ValueError, match=r"init\(params, model\)"):
        step.init(params)
    bad = make(uniform(none()), both=lambda p, m, b: ((jnp.zeros(()), {}), p))
    with pytest.raises(ValueError, match="a model state of"):
        bad(bad.init(params, model), batch_of(0))
    worse = make(uniform(none()), both=lambda p, m, b: (jnp.zeros(()), p))
    with pytest.raises(ValueError, match="the model's state"):
        worse(worse.init(params, model), batch_of(0))
