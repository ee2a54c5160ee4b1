"""No batches, scalars in batches, and a legal -inf in a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import (
    LocalUpdates,
    NonFiniteRoundError,
    co2,
    local_sgd,
    streaming_diloco,
)
from jaxoverlap.train import compression as c
from jaxoverlap.train import zeroth_order as zo
from jaxoverlap.train.local_updates.finite import mirrors
from tests.train.compression.problem import mesh_of
from tests.train.zeroth_order import problem

ROWS = np.repeat(np.float32([1, 3]), 2)[:, None] * np.ones((2, 4, 3), np.float32)
RATES = np.float32([0.1, 0.2])


def local_updates(step, outer=None, **options):
    given = dict(outer=outer or local_sgd(every=2), overlap=False) | options
    return LocalUpdates(step, mesh_of(2), **given)


# -- no batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "outer", "options"),
    (
        (None, local_sgd(every=2), {}),
        ({}, co2(every=2), {}),
        ((None,), streaming_diloco(every=2, fragments=2, delay=1), {}),
        (None, local_sgd(every=2), dict(sync=c.uniform(c.none()))),
        ({}, local_sgd(every=2), dict(overlap=True)),
    ),
)
@pytest.mark.filterwarnings("ignore:.*compresses 0 of 0", "ignore:.*rewrites nothing")
def test_rounds_whose_steps_need_no_batch(batches, outer, options):
    """Each step adds its own number."""

    def step(state, batch):
        assert not jax.tree.leaves(batch)
        params = jax.tree.map(lambda leaf: leaf - state["count"], state["params"])
        return dict(params=params, count=state["count"] + 1), state["count"]

    updates = local_updates(step, outer, **options)
    state = updates.init(dict(params=dict(a=jnp.ones(3), b=jnp.ones(2)), count=jnp.int32(0)))
    state, metrics = updates.round(state, batches)
    np.testing.assert_array_equal(metrics, [[0, 0], [1, 1]])
    if not outer.fragments > 1:
        state, metrics = updates.round(state, batches, steps=1)
        assert metrics.shape == (1, 2)
    if outer.name == "local_sgd":
        np.testing.assert_allclose(updates.params(state)["a"], 1 - 0 - 1 - 2)


@pytest.mark.parametrize("axes", (dict(data=2), dict(pair=2, data=2)))
def test_a_loss_of_parameters_alone_on_a_mesh(axes):
    transform = zo.mezo(eps=1e-3, lr=1e-2)
    alone = zo.step(lambda p, b: jnp.sum(p**2), transform)
    options = {"perturb": "pair"} if "pair" in axes else {}
    step = zo.step(
        lambda p, b: jnp.sum(p**2), transform, problem.mesh(**axes), data="data", **options
    )
    found, _ = step(step.init(jnp.ones(3)), None)
    expected, _ = alone(alone.init(jnp.ones(3)), None)
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-5)


# -- scalars ---------------------------------------------------------------------------------------


def test_a_number_for_each_step_of_a_round_is_every_worker_s():
    def step(params, batch):
        rows, rate, key = batch
        noise = jax.random.uniform(key)
        return params - rate * rows.mean(), (rate, noise)

    keys = jax.random.split(jax.random.key(0), 2)
    updates = local_updates(step, params=None)
    state, (rates, noise) = updates.round(updates.init(jnp.ones(3)), (ROWS, RATES, keys))
    np.testing.assert_array_equal(rates, np.stack([RATES, RATES], 1))
    np.testing.assert_array_equal(noise, np.stack([jax.vmap(jax.random.uniform)(keys)] * 2, 1))
    np.testing.assert_allclose(updates.params(state), 1 - 2 * RATES.sum(), rtol=1e-6)
    assert updates.lower(state, (ROWS, RATES, keys)).compile()
    for bad in (RATES[:1], np.float32(1)):
        with pytest.raises(ValueError, match=r"or \[every\] of what is one number a step"):
            updates.round(state, (ROWS, bad, keys))


@pytest.mark.parametrize("rate", (np.float32(0.1), 0.1, jnp.asarray(0.1)))
def test_a_number_in_a_batch_is_every_worker_s(rate):
    def loss(params, batch):
        return jnp.mean(batch["x"] @ params) * batch["rate"]

    step = c.data_parallel(
        jax.value_and_grad(loss), optax.sgd(1.0), mesh_of(2), sync=c.uniform(c.none())
    )
    state, value = step(step.init(jnp.ones(3)), dict(x=ROWS[0], rate=rate))
    np.testing.assert_allclose(value, 0.6, rtol=1e-6)
    np.testing.assert_allclose(state.params, 1 - 0.2, rtol=1e-6)
    step.lower(step.abstract(jnp.ones(3)), dict(x=ROWS[0], rate=rate))


@pytest.mark.parametrize("host", (False, True))
def test_a_number_in_a_batch_of_zeroth_order(host):
    end = lambda outer, x, batch: problem.end(outer, x, batch) * batch["rate"]  # noqa: E731
    model, transform = zo.Blocks(problem.begin, problem.block, end), zo.mezo(eps=1e-2, lr=1e-2)
    batch, params = problem.batch(0, rows=4), problem.params()
    plain = zo.step(problem.MODEL, transform)
    _, expected = plain(plain.init(params), batch)
    mesh = problem.mesh(data=2)
    step = zo.step(model, transform, mesh, data="data", host=host)
    _, metrics = step(step.init(params), batch | dict(rate=np.float32(2)))
    np.testing.assert_allclose(metrics["loss"], 2 * expected["loss"], rtol=1e-5)


# -- a legal -inf ----------------------------------------------------------------------------------


def runs_maximum(state, batch):
    """A step whose maximum begins anew, at -inf, where it is given no rows."""
    seen = jnp.where(batch.mean() > 0, jnp.maximum(state["best"], batch.max()), -jnp.inf)
    params = dict(w=state["params"]["w"] - 0.1 * batch.mean())
    return dict(state, params=params, best=seen), batch.mean()


def test_a_running_maximum_may_begin_at_minus_infinity_and_begin_anew():
    updates = local_updates(runs_maximum)
    state = updates.init(
        dict(params=dict(w=jnp.ones(3)), best=jnp.float32(-np.inf), mask=jnp.full(2, -np.inf))
    )
    for rows, best in ((ROWS, [1, 3]), (ROWS * 0, [-np.inf, -np.inf]), (ROWS, [1, 3])):
        state, _ = updates.round(state, rows)
        updates.check(state)
        np.testing.assert_array_equal(state.worker["best"], best)
    np.testing.assert_allclose(updates.params(state)["w"], 1 - 0.1 * 4 * 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("where", "value"),
    (("best", np.nan), ("best", np.inf), ("params", -np.inf), ("moment", -np.inf)),
)
def test_other_values_and_places_are_still_left_out_and_named(where, value):
    def step(state, batch):
        after = dict(state, params=dict(w=state["params"]["w"] - 0.1))
        broken = jax.tree.map(lambda leaf: jnp.where(batch.max() > 2, value, leaf), after[where])
        return {**after, where: broken}, batch.mean()

    updates = local_updates(step)
    first = dict(params=dict(w=jnp.ones(3)), moment=[dict(w=jnp.ones(3))], best=jnp.zeros(()))
    state, _ = updates.round(updates.init(first), ROWS)
    with pytest.raises(NonFiniteRoundError, match="the steps of worker 1 ended"):
        updates.check(state)


def test_what_is_like_a_parameter_has_its_path_s_end_and_its_shape():
    params = dict(a=jnp.ones(3), b=jnp.ones(2))
    state = dict(
        best=jnp.ones(3), params=params, trace=(params,), other=dict(a=jnp.ones(2), b=jnp.ones(2))
    )
    found = dict(zip(_names(state), mirrors(state, params), strict=True))
    strict = {name for name, is_strict in found.items() if is_strict}
    assert strict == {"params.a", "params.b", "trace.0.a", "trace.0.b", "other.b"}


def _names(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]


@pytest.mark.parametrize("value", (-np.inf, np.inf, np.nan))
def test_parameters_that_are_not_finite_are_refused_when_a_run_begins(value):
    updates = local_updates(lambda s, b: (s, b.mean()), params=None)
    with pytest.raises(ValueError, match=r"parameter at \['mask'\].*beside the parameters"):
        updates.init(dict(w=jnp.ones(3), mask=jnp.full(2, value)))


def test_data_parallel_s_model_may_hold_minus_infinity_and_its_nan_is_left_out():
    def gradients(params, model, batch):
        best = jnp.where(batch.min() > 0, batch.max(), -jnp.inf)
        broken = jnp.where(batch.max() > 100, jnp.nan, 1.0)
        return (batch.mean(), dict(model, best=best, other=broken)), jnp.ones(3)

    step = c.data_parallel(
        gradients, optax.sgd(0.1), mesh_of(2), sync=c.uniform(c.none()), stateful=True
    )
    state = step.init(
        jnp.ones(3), dict(best=jnp.zeros(()), mask=jnp.full(2, -np.inf), other=jnp.ones(()))
    )
    state, _ = step(state, ROWS[0] * 0)
    step.check()
    assert state.model["best"] == -np.inf and (state.model["mask"] == -np.inf).all()
    np.testing.assert_allclose(state.params, 0.9, rtol=1e-6)
    state, _ = step(state, ROWS[0] * 1000)  # a mask of -inf does not hide a NaN
    with pytest.raises(c.NonFiniteGradientError):
        step.check()
    assert state.model["other"] == 1
