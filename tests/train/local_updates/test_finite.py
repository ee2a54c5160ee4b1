"""A round that is not finite is rolled back where it went wrong, named, and training goes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import (
    LocalUpdates,
    NonFiniteRoundError,
    Outer,
    bmuf,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from jaxoverlap.train.compression import power_sgd, qsgd, uniform
from tests.train.local_updates.problem import flat, make_data, make_state, make_step, mesh_of

EVERY, WORKERS, ROUNDS, BAD = 4, 4, 8, 3
ADAM = optax.adam(1e-2)
DATA = make_data(ROUNDS * EVERY, WORKERS)
OUTERS = (
    local_sgd(every=EVERY),
    slowmo(every=EVERY, inner_learning_rate=0.1),
    bmuf(every=EVERY),
    diloco(every=EVERY),
    diloco(every=EVERY, delay=1),
    eager_diloco(every=EVERY),
    overlap_local_sgd(every=EVERY),
    streaming_diloco(every=EVERY, fragments=2, delay=0),
    streaming_diloco(every=EVERY, fragments=2, delay=1),
    streaming_diloco(every=EVERY, fragments=2, delay=2),
    co2(every=EVERY),
)


def make(outer, *, optimizer=ADAM, **options):
    return LocalUpdates(
        make_step(optimizer), mesh_of(WORKERS), outer=outer, overlap=False, **options
    )


def batches_of(number, bad=None, step=0):
    """Return a round's batches; with NaNs in a step of one worker."""
    x, y = (np.array(d[number * EVERY : (number + 1) * EVERY]) for d in DATA)
    if bad is not None:
        rows = x.shape[1] // WORKERS
        x[step, bad * rows : (bad + 1) * rows] = np.nan
    return x, y


def run(updates, bad=None, step=0):
    """Return the state after all rounds, and the errors on the way; one round has NaNs."""
    state, errors = updates.init(make_state(ADAM)), []
    for number in range(ROUNDS):
        while True:
            try:
                given = batches_of(number, bad if number == BAD else None, step)
                state, _ = updates.round(state, given)
                break
            except NonFiniteRoundError as error:
                errors.append(error)
    return state, errors


def all_finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(tree)))


@pytest.mark.parametrize("step", (0, EVERY - 1))
@pytest.mark.parametrize("outer", OUTERS, ids=lambda o: f"{o.name}-{o.delay}-{o.lag}")
def test_a_worker_s_nan_is_named_once_and_heals(outer, step):
    updates = make(outer)
    state, errors = run(updates, bad=2, step=step)
    updates.check(state)
    assert [(e.round, e.workers, e.outer) for e in errors] == [(BAD, [2], False)]
    assert all_finite((state, updates.params(state)))
    assert int(state.round) == ROUNDS
    moments = np.asarray(state.worker["optimizer"][0].mu["w"])
    assert (np.abs(moments).max(axis=(1, 2)) > 0).all()
    good, none = run(make(outer))
    assert not none
    np.testing.assert_allclose(
        flat(updates.params(state)), flat(updates.params(good)), rtol=0.5, atol=0.15
    )


@pytest.mark.parametrize("sync", (uniform(power_sgd(1)), uniform(qsgd(4, error_feedback=True))))
@pytest.mark.parametrize("outer", (diloco(every=EVERY), co2(every=EVERY)), ids=lambda o: o.name)
def test_it_heals_with_compressed_averages_too(outer, sync):
    updates = make(outer, sync=sync)
    state, errors = run(updates, bad=1)
    assert [(e.round, e.workers) for e in errors] == [(BAD, [1])]
    assert all_finite((state.worker, state.begin, state.optimizer, state.sync.error))


def test_scattered_outer_state_heals():
    updates = make(co2(every=EVERY), shard_outer=True)
    state, errors = run(updates, bad=0)
    assert [(e.round, e.workers) for e in errors] == [(BAD, [0])]
    assert all_finite(state)


def test_a_worker_that_went_back_counts_as_not_moved_and_keeps_its_inner_state():
    updates = make(local_sgd(every=EVERY))
    state, _ = updates.round(updates.init(make_state(ADAM)), batches_of(0))
    before = jax.device_get(state)
    state, _ = updates.round(state, batches_of(1, bad=3))
    jax.tree.map(
        lambda old, new: np.testing.assert_array_equal(old[3], new[3]),
        before.worker["optimizer"],
        jax.device_get(state.worker["optimizer"]),
    )
    # The others' mean, with nothing from this one.
    step, ends = make_step(ADAM), []
    for worker in range(3):
        own = jax.tree.map(lambda leaf, n=worker: leaf[n], before.worker)
        rows = DATA[0].shape[1] // WORKERS
        for x, y in zip(*batches_of(1), strict=True):
            part = slice(worker * rows, (worker + 1) * rows)
            own, _ = step(own, (x[part], y[part]))
        ends.append(flat(own["params"]))
    begin = flat(before.begin)
    expected = begin + sum(end - begin for end in ends) / WORKERS
    np.testing.assert_allclose(flat(updates.params(state)), expected, rtol=1e-5, atol=1e-6)


def test_an_outer_step_that_is_not_finite_is_left_out_and_named():
    """Nothing that the workers send is infinite; what is made of it is."""

    def bad(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.where(state == 2, jnp.nan, -g), updates), state + 1

    transform = optax.GradientTransformation(lambda params: jnp.int32(0), bad)
    updates = make(Outer(every=EVERY, transform=transform))
    state, found = updates.init(make_state(ADAM)), []
    for number in range(4):
        before = jax.device_get(state.begin)
        try:
            state, _ = updates.round(state, batches_of(number))
            updates.check(state)
        except NonFiniteRoundError as error:
            assert (error.workers, error.outer) == ([], True)
            assert "outer step" in str(error)
            found.append(error.round)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.begin), before)
    assert all_finite(state)
    assert found == [2, 3]


def test_what_was_not_finite_before_does_not_count():
    """A train state may have an infinity of its own: a mask, a best loss that is none yet."""
    step = make_step()

    def with_best(state, batch):
        new, metrics = step({k: state[k] for k in ("params", "optimizer")}, batch)
        return dict(**new, best=state["best"]), metrics

    updates = LocalUpdates(with_best, mesh_of(4), outer=co2(every=EVERY), overlap=False)
    state = updates.init(dict(**make_state(), best=jnp.inf))
    for number in range(3):
        state, _ = updates.round(state, batches_of(number))
    updates.check(state)
    assert not np.array_equal(flat(updates.params(state)), flat(make_state()["params"]))


def test_random_keys_and_counts_go_back_too():
    def step(state, batch):
        key, use = jax.random.split(state["key"])
        noise = jax.random.normal(use) * 0
        return dict(params=state["params"] + noise + batch.mean(), key=key, n=state["n"] + 1), noise

    updates = LocalUpdates(step, mesh_of(4), outer=local_sgd(every=2), overlap=False)
    state = updates.init(dict(params=jnp.zeros(3), key=jax.random.key(0), n=jnp.int32(0)))
    x = np.ones((2, 4), np.float32)
    x[1, 1] = np.inf
    state, _ = updates.round(state, x)
    assert np.asarray(state.worker["n"]).tolist() == [2, 0, 2, 2]
    with pytest.raises(NonFiniteRoundError, match="round 0: the steps of worker 1 ended"):
        updates.check(state)


def test_without_check_nothing_is_looked_at():
    updates = make(local_sgd(every=EVERY), check=False)
    state, errors = run(updates, bad=0)
    assert not errors and not all_finite(state.begin)
