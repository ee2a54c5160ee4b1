"""Losses that users bring: masks, dropout, other numbers, 16 bits, adapters; exact or in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxoverlap.train import zeroth_order as zo
from jaxoverlap.train.zeroth_order.directions import stochastic
from jaxoverlap.train.zeroth_order.estimator import decays
from tests.support.seeds import some
from tests.train.zeroth_order import problem

TRANSFORM = zo.mezo(eps=1e-2, lr=1e-2)
PARAMS = dict(w=jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32))


def masked_parts(params, batch):
    x, mask = batch
    rows = jnp.sin(x @ params["w"]).sum(-1) ** 2
    return (rows * mask).sum(), mask.sum()


def masked(params, batch):
    return zo.Weighted(*masked_parts(params, batch))


def masked_mean(params, batch):
    total, count = masked_parts(params, batch)
    return total / count


def batch_of(mask):
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(mask), 6)).astype(np.float32), np.array(mask, np.float32)


UNEVEN = ([1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0])
MESHES = (
    (dict(data=2), dict(data="data")),
    (dict(data=4), dict(data="data")),
    (dict(pair=2, data=4), dict(perturb="pair", data="data")),
)


@pytest.mark.parametrize("mask", UNEVEN)
@pytest.mark.parametrize(("axes", "options"), MESHES)
def test_uneven_masks_over_shards_give_the_loss_of_the_whole_batch(axes, options, mask):
    batch = batch_of(mask)
    alone = zo.step(masked_mean, TRANSFORM)
    expected, seen = alone(alone.init(PARAMS), batch)
    step = zo.step(masked, TRANSFORM, problem.mesh(**axes), **options)
    found, metrics = step(step.init(PARAMS), batch)
    np.testing.assert_allclose(metrics["losses"], seen["losses"], rtol=2e-6)
    np.testing.assert_allclose(found.params["w"], expected.params["w"], rtol=1e-3, atol=1e-5)


def test_masks_over_shards_whose_blocks_are_in_host_memory():
    def end(outer, x, batch):
        rows = problem.end(outer, x, batch), batch["mask"]
        return zo.Weighted((rows[0] * batch["mask"]).sum(), batch["mask"].sum())

    model = zo.Blocks(problem.begin, problem.block, end)
    batch = problem.batch(0, rows=8) | dict(mask=np.array([1, 1, 1, 0, 0, 0, 0, 0], np.float32))
    params = problem.params()
    losses = []
    for axes, options in ((dict(data=1), {}), (dict(data=2), dict(data="data"))):
        mesh = problem.mesh(**axes)
        step = zo.step(model, TRANSFORM, mesh, host=True, **options)
        losses.append(np.asarray(step(step.init(params), batch)[1]["losses"]))
    assert np.isfinite(losses[0]).all() and np.isfinite(losses[1]).all()


def test_dropout_of_nnx_in_the_rest_works_and_both_signs_see_one_mask():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(PARAMS["w"])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def loss(params, x, rngs):
        return jnp.mean((nnx.Dropout(0.5)(x, rngs=rngs) @ params["w"]) ** 2)

    step, x = zo.step(loss, TRANSFORM), np.ones((8, 6), np.float32)
    state = step.init(PARAMS)
    for number in range(2):
        state, metrics = step(state, x, nnx.Rngs(dropout=number))
    # With one mask the difference of the losses is of the order of eps.
    assert abs(float(np.diff(metrics["losses"])[0, 0])) < 1.0
    assert np.isfinite(metrics["losses"]).all()


def test_other_numbers_come_with_the_loss():
    def loss(params, batch):
        value = jnp.mean((batch @ params["w"]) ** 2)
        return value, dict(twice=2 * value, rows=batch.shape[0])

    for axes, options in (*MESHES[2:], (None, {})):
        mesh = problem.mesh(**axes) if axes else None
        step = zo.step(loss, TRANSFORM, mesh, has_aux=True, **options)
        _, metrics = step(step.init(PARAMS), np.ones((8, 6), np.float32))
        np.testing.assert_allclose(metrics["aux"]["twice"], 2 * metrics["loss"], rtol=1e-6)
        assert float(metrics["aux"]["rows"]) == (2 if axes else 8)


@pytest.mark.parametrize(
    ("loss", "options", "says"),
    (
        (
            lambda p, b: (p["w"].sum(), 1),
            {},
            r"returned a tuple: expected a loss \(has_aux=False\)",
        ),
        (lambda p, b: p["w"].sum(), dict(has_aux=True), r"expected \(loss, aux\)"),
        (lambda p, b: p["w"].sum(0), {}, r"the loss has the shape \(4,\): expected a scalar"),
    ),
)
def test_what_is_no_loss_is_refused_in_words(loss, options, says):
    step = zo.step(loss, TRANSFORM, **options)
    with pytest.raises(ValueError, match=says):
        step(step.init(PARAMS), np.ones((8, 6), np.float32))


def test_what_blocks_in_host_memory_cannot_take_is_refused_in_words():
    mesh = problem.mesh(data=1)
    step = zo.step(problem.MODEL, TRANSFORM, mesh, host=True)
    state = step.init(problem.params())
    with pytest.raises(ValueError, match="other arguments with host=True"):
        step(state, problem.batch(0), jax.random.key(0))
    with pytest.raises(ValueError, match="has_aux=True with host=True"):
        zo.step(problem.MODEL, TRANSFORM, mesh, host=True, has_aux=True)


def test_a_state_of_another_kind_is_refused_in_words():
    step = zo.step(lambda p, b: p["w"].sum(), TRANSFORM)
    with pytest.raises(ValueError, match=r"type dict: expected a ZOState.*init\(\)"):
        step(PARAMS, None)
    with pytest.raises(ValueError, match=r"inside jax\.jit"):
        jax.jit(step)(step.init(PARAMS), np.ones(2))


# -- weight decay and adapters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "decayed"),
    (
        ("['rescaler']['w']", True), ("['lnet']", True), ("['planner']['kernel']", True),
        ("['biased_head']", True), ("['normal_q']", True), ("['scaler']", True),
        ("['layers']['q']['weight']", True), ("['embedding']", True),
        ("['q']['bias']", False), ("['mlp_norm']", False), ("['LayerNorm_0']['weight']", False),
        ("['input_layernorm']", False), ("['ln_f']", False), ("['ln1']", False), ("['scale']", False),
        ("['RMSNorm']['w']", False), ("['final_norms']", False), ("['biases']", False),
        (".layers.norm.value", False),
    ),
)  # fmt: skip
def test_weight_decay_leaves_out_whole_words_alone(path, decayed):
    assert decays(path, jnp.ones((2, 3))) is decayed
    assert not decays(path, jnp.ones(3))


def test_adapters_of_no_parameter_are_refused():
    adapters = zo.lora(PARAMS, rank=2, where=lambda path: True)
    zo.adapted(PARAMS, adapters)
    with pytest.raises(ValueError, match=r"adapters of \['v'\], which are no parameters"):
        zo.adapted(PARAMS, {"['v']": adapters["['w']"]})


# -- 16 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean(dtype):
    values = jnp.asarray([1.0, 1.001, -0.3337, 3e-3, 0.0, -1e-8, 250.3, 1 / 3], jnp.float32)
    chance = (jnp.arange(4096, dtype=jnp.float32) + 0.5) / 4096
    found = jax.vmap(lambda c: stochastic(values, dtype, jnp.full(values.shape, c)))(chance)
    exact = np.asarray(found, np.float64)
    down, up = exact.min(0), exact.max(0)
    assert (down <= values).all() and (values <= up).all()
    assert all(len(np.unique(column)) <= 2 for column in exact.T)
    step = np.maximum(up - down, 1e-12)
    np.testing.assert_array_less(np.abs(exact.mean(0) - np.asarray(values)) / step, 1e-3)


def test_small_updates_in_16_bits_are_kept_in_the_mean_and_lost_to_the_nearest():
    params = dict(w=jnp.full((64, 64), 0.5, jnp.bfloat16))

    def loss(params, batch):
        return params["w"].astype(jnp.float32).mean() * 64

    def moved(rounding):
        transform = zo.mezo(eps=1e-1, lr=1e-4, directions=8, rounding=rounding)
        step = zo.step(loss, transform)
        state = step.init(params, seed=1)
        for _ in range(60):
            state, _ = step(state, np.ones(1))
        return float(np.asarray(state.params["w"], np.float64).mean() - 0.5)

    assert moved("nearest") == 0
    # The gradient is 1 / 64 an element: 60 steps of 1e-4 move the mean by 9e-5.
    assert moved("stochastic") < -2e-5


@pytest.mark.rotating
@pytest.mark.parametrize("deferred", some(1, [False, True]))
def test_rounding_by_chance_gives_the_same_bits_in_blocks_deferred_and_from_the_log(
    tmp_path, deferred
):
    params = problem.params(dtype=jnp.bfloat16)
    transform = zo.mezo(eps=1e-1, lr=1e-2)
    step = zo.step(problem.MODEL, transform, deferred=deferred)
    mesh = problem.mesh(pair=2, data=2)
    host = zo.step(problem.MODEL, transform, mesh, perturb="pair", host=True)
    state, streamed = step.init(params), host.init(params)
    with zo.Log(tmp_path / "log", zo.header_of(params, transform, seed=0)) as log:
        for number in range(4):
            state, metrics = step(state, problem.batch(number))
            log.add(metrics)
            # Losses in bfloat16 depend on how matmuls are done: the scalars are given.
            pending = zo.Pending(
                jnp.asarray(np.asarray(metrics["scalars"])),
                jnp.float32(float(metrics["rate"])),
                jnp.int32(number),
            )
            streamed = host.flush(streamed._replace(pending=pending))
        again = zo.replay(log.records, transform, params, seed=0)
    jax.tree.map(np.testing.assert_array_equal, again.params, step.params(state))
    jax.tree.map(np.testing.assert_array_equal, again.params, jax.device_get(streamed.params))
    step.flush(step.flush(state))
