"""Local updates whose outer gradients are compressed."""

from __future__ import annotations

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

from jaxoverlap.train import (
    LocalUpdates,
    NonFiniteRoundError,
    co2,
    diloco,
    local_sgd,
    streaming_diloco,
)
from jaxoverlap.train.compression import (
    lgreco,
    none,
    power_sgd,
    qsgd,
    top_k,
    uniform,
)
from tests.train.compression import numpy_forms
from tests.train.compression.problem import loss, make_batch, make_params

EVERY = 2
INT4 = uniform(qsgd(4, error_feedback=True))


def make_updates(outer, sync, workers=4, **options):
    devices = jax.devices()[:workers]
    mesh = jax.make_mesh((workers,), ("data",), (AxisType.Auto,), devices=devices)
    optimizer = optax.sgd(0.05)

    @jax.jit
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, inner = optimizer.update(gradients, state["optimizer"], state["params"])
        return dict(params=optax.apply_updates(state["params"], updates), optimizer=inner), value

    updates = LocalUpdates(
        train_step,
        mesh,
        outer=outer,
        sync=sync,
        stacked=("layers",) if sync else (),
        overlap=False,
        **options,
    )
    return updates, dict(params=make_params(), optimizer=optimizer.init(make_params()))


def train(updates, start, rounds, state=None, begin=0):
    state = updates.init(start) if state is None else state
    for t in range(begin, rounds):
        batches = [make_batch(t * EVERY + i) for i in range(EVERY)]
        state, _ = updates.round(state, jax.tree.map(lambda *b: np.stack(b), *batches))
    return state


def held_out(updates, state):
    return float(loss(jax.device_get(updates.params(state)), make_batch(10**6, rows=256)))


@pytest.mark.parametrize(
    "outer",
    (
        co2(every=EVERY),
        pytest.param(local_sgd(every=EVERY), marks=pytest.mark.nightly),
        pytest.param(
            streaming_diloco(every=EVERY, fragments=2, delay=1), marks=pytest.mark.nightly
        ),
    ),
    ids=lambda outer: outer.name,
)
def test_no_compression_is_what_it_was_and_int4_comes_near(outer):
    plain, start = make_updates(outer, None)
    without = train(plain, start, 6)
    same, _ = make_updates(outer, uniform(none()))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        same.params(train(same, start, 6)),
        plain.params(without),
    )
    packed, _ = make_updates(outer, INT4)
    state = train(packed, start, 6)
    assert held_out(packed, state) == pytest.approx(held_out(plain, without), rel=0.05)
    workers = np.asarray(state.worker["params"]["head"])
    if outer.same_start:  # all begin the next round alike, to the bit
        assert all(np.array_equal(workers[0], other) for other in workers[1:])


def test_settings_change_between_rounds_and_a_run_resumes_to_the_bit(tmp_path):
    sync = lgreco(power_sgd(2), every=4, accumulate=2, beside=1)
    updates, start = make_updates(diloco(every=EVERY), sync)
    half = train(updates, start, 5)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
    whole = train(updates, start, 7, half, begin=5)
    again, _ = make_updates(diloco(every=EVERY), sync)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state", again.abstract(start))
    rest = train(again, start, 7, found, begin=5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(rest), jax.device_get(whole))
    assert "of a budget of" in again.explain(rest)
    assert again.sent_bytes(rest) <= again.sent_bytes(updates.init(start))


def test_another_number_of_workers_goes_on_with_what_was_not_sent():
    updates, start = make_updates(co2(every=EVERY), INT4)
    state = train(updates, start, 3)
    kept = np.asarray(state.sync.error["0"]).mean(0)
    fewer, _ = make_updates(co2(every=EVERY), INT4, workers=2)
    spread = fewer.spread(jax.device_get(updates.consolidate(state)))
    np.testing.assert_allclose(np.asarray(spread.sync.error["0"]).mean(0), kept, atol=1e-6)
    train(fewer, start, 5, spread, begin=3)


def test_an_outer_gradient_that_is_not_finite_is_named_and_left_out():
    updates, start = make_updates(diloco(every=EVERY), INT4)
    state = train(updates, start, 2)
    x, y = (np.stack([part] * EVERY) for part in make_batch(0))
    x[0, 0] = np.inf
    state, _ = updates.round(state, (x, y))
    kept = jax.device_get(state.worker["params"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept))
    with pytest.raises(NonFiniteRoundError, match="round 2: the steps of worker 0"):
        train(updates, start, 5, state, begin=3)


def test_scattered_outer_state_and_explain_without_sync_are_named():
    with pytest.raises(ValueError, match="leave out either"):
        make_updates(co2(every=EVERY), INT4, shard_outer=True)
    updates, start = make_updates(co2(every=EVERY), None)
    with pytest.raises(ValueError, match="give them sync="):
        updates.explain(updates.init(start))


def test_sparse_loco_is_its_numpy_form():
    """e = decay e + (start - end); sent: its largest, in two bits; x = x - mean of what is sent."""
    decay, count, rows = 0.9, 48, 4
    rng = np.random.default_rng(8)
    targets = rng.normal(size=(6 * EVERY, 4 * rows, 32, 32)).astype("f")

    @jax.jit
    def step(params, batch):
        pull = params["w"] - batch.mean(0)
        return {"w": params["w"] - 0.3 * pull}, (pull**2).mean()

    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    sync = uniform(top_k(0.01, bits=2), error_decay=decay)
    updates = LocalUpdates(
        step, mesh, outer=local_sgd(every=EVERY), params=None, sync=sync, overlap=False
    )
    state = updates.init({"w": np.ones((32, 32), "f")})
    x, errors = np.ones((32, 32)), [np.zeros((32, 32))] * 4
    for t in range(6):
        own = targets[t * EVERY : (t + 1) * EVERY]
        state, _ = updates.round(state, own)
        ends = []
        for worker in range(4):
            w = x
            for batch in own:
                w = w - 0.3 * (w - batch[worker * rows : (worker + 1) * rows].mean(0))
            ends.append(w)
        whole = [decay * e + (x - end) for e, end in zip(errors, ends, strict=True)]
        mean, errors = numpy_forms.sparse_two_bits(whole, count, 4096)
        x = x - mean
        np.testing.assert_allclose(updates.params(state)["w"], x, atol=2e-4)
