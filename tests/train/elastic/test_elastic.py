"""Workers that are lost and come back: rounds are discarded and taken again by those that stay.

All in one process: who is alive is played by a script, in the place of JAX's `live_devices`. The
race of processes is benchmarks/local_updates/elastic.py.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils

from jaxoverlap.train import (
    Elastic,
    LocalUpdates,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    streaming_diloco,
)
from jaxoverlap.train.compression import lgreco, power_sgd, qsgd, top_k, uniform
from jaxoverlap.train.elastic import regroup
from jaxoverlap.train.elastic.elastic import ordered
from tests.train.local_updates.numpy_forms import steps
from tests.train.local_updates.problem import (
    RATE,
    ROWS,
    by_worker,
    flat,
    make_data,
    make_state,
    make_step,
    mesh_of,
)

EVERY, WORKERS, ROUNDS = 3, 4, 8
DATA = make_data(ROUNDS * EVERY, WORKERS)
ALL = (0, 1, 2, 3)


class Script:
    """Say who is alive at each attempt at a round, as (workers, those that die in it)."""

    def __init__(self, *attempts):
        self.attempts, self.number = attempts, 0

    @contextlib.contextmanager
    def __call__(self, devices):
        alive, dying = self.attempts[min(self.number, len(self.attempts) - 1)]
        self.number += 1
        yield [devices[w] for w in alive]
        if dying:
            raise multihost_utils.ProcessFailureError({devices[w] for w in dying})


def batches(number, worker):
    rows = slice(worker * ROWS, (worker + 1) * ROWS)
    return tuple(d[number * EVERY : (number + 1) * EVERY, rows] for d in DATA)


def make(outer, script, *, optimizer=None, batches=batches, donate=False, **options):
    def updates(mesh):
        return LocalUpdates(
            make_step(optimizer), mesh, outer=outer, overlap=False, donate=donate, **options
        )

    return Elastic(
        updates, mesh_of(WORKERS), init=lambda mesh: make_state(optimizer), batches=batches,
        live=script,
    )  # fmt: skip


def run(elastic, rounds=ROUNDS):
    done = []
    while elastic.number < rounds:
        done.append(elastic.round())
    return done


LOST = Script(*[(ALL, ())] * 2, (ALL, (3,)), *[((0, 1, 2), ())] * 3, (ALL, ()))
TOOK = [ALL, ALL, *[ALL[:3]] * 3, ALL, ALL, ALL]


def lost():
    return Script(*LOST.attempts)


def test_a_round_is_discarded_and_taken_by_those_that_stay_and_the_lost_one_comes_back():
    """Local SGD, against numpy: averages are over those that took part, and no others."""
    elastic = make(local_sgd(every=EVERY), lost())
    done = run(elastic)
    assert [sorted(one.workers) for one in done] == [list(took) for took in TOOK]
    assert [one.discarded for one in done] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert [one.number for one in done] == list(range(ROUNDS))
    p, data = flat(make_state()["params"]), by_worker(DATA, WORKERS)
    for t, took in enumerate(TOOK):
        ends = [steps(p, data, w, t * EVERY, (t + 1) * EVERY, RATE) for w in took]
        p = np.mean(ends, axis=0)
    np.testing.assert_allclose(flat(elastic.updates.params(elastic.state)), p, rtol=1e-5)


def test_of_an_average_in_flight_the_lost_worker_s_part_is_lost_and_no_other():
    """CO2 without penalty and clip, against numpy: m = mu m + g of a round before."""
    mu, rate = 0.5, 0.7
    outer = co2(every=EVERY, momentum=mu, learning_rate=rate, staleness=1, clip=None)
    elastic = make(outer, lost())
    run(elastic)
    p, data = flat(make_state()["params"]), by_worker(DATA, WORKERS)
    m, sent = np.zeros_like(p), {w: np.zeros_like(p) for w in ALL}
    for t, took in enumerate(TOOK):
        back = np.mean([sent[w] for w in took if w in sent], axis=0)
        sent = {w: sent.get(w, back) for w in took}
        m = mu * m + np.mean([sent[w] for w in took], axis=0)
        sent = {w: p - steps(p, data, w, t * EVERY, (t + 1) * EVERY, RATE) for w in took}
        p = p - rate * m
    m = mu * m + np.mean(list(sent.values()), axis=0)
    found = flat(elastic.updates.params(elastic.state))
    np.testing.assert_allclose(found, p - rate * m, rtol=1e-4, atol=1e-6)


def test_metrics_are_in_the_order_of_the_workers():
    elastic = make(local_sgd(every=EVERY), lost())
    p = make_state()["params"]
    done = elastic.round()
    for row, worker in enumerate(done.workers):
        x, y = (part[0] for part in batches(0, worker))
        expected = np.mean((x @ p["w"] + p["b"] - y) ** 2)
        np.testing.assert_allclose(done.metrics["loss"][0, row], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "outer",
    [
        diloco(every=EVERY),
        overlap_local_sgd(every=EVERY),
        streaming_diloco(every=EVERY + 1, fragments=2, delay=1),
    ],
    ids=lambda outer: outer.name,
)
def test_all_kinds_of_local_updates_go_on(outer):
    data = make_data(ROUNDS * outer.every, WORKERS)

    def batches(number, worker):
        rows, times = slice(worker * ROWS, (worker + 1) * ROWS), number * outer.every
        return tuple(d[times : times + outer.every, rows] for d in data)

    script = Script((ALL, ()), (ALL, (0, 2)), ((1, 3), ()), (ALL, ()), (ALL, ()))
    elastic = make(outer, script, optimizer=optax.adam(1e-2), batches=batches)
    done = run(elastic, 5)
    assert [sorted(one.workers) for one in done] == [[*ALL], [1, 3], [*ALL], [*ALL], [*ALL]]
    assert all(np.isfinite(one.metrics["loss"]).all() for one in done)
    first, last = (float(one.metrics["loss"].mean()) for one in (done[0], done[-1]))
    assert last < first
    for leaf in jax.tree.leaves(elastic.state):
        assert np.isfinite(leaf).all()


def test_those_that_stay_keep_what_is_their_own_and_the_others_get_its_mean():
    """Adam's moments, and keys: each worker's own to the bit, a new worker's key its own too."""
    optimizer = optax.adam(1e-2)

    def init(mesh):
        return dict(make_state(optimizer), key=jax.random.key(3), on=jnp.array(True))

    step = make_step(optimizer)

    def train_step(state, batch):
        key, _ = jax.random.split(state["key"])
        own = {name: state[name] for name in ("params", "optimizer")}
        after, metrics = step(own, batch)
        return dict(after, key=key, on=~state["on"]), metrics

    def updates(mesh):
        outer = local_sgd(every=EVERY)
        return LocalUpdates(train_step, mesh, outer=outer, overlap=False, donate=False)

    script = Script((ALL, ()), (ALL, (1,)), ((0, 2, 3), ()), (ALL, ()))
    elastic = Elastic(updates, mesh_of(WORKERS), init=init, batches=batches, live=script)
    elastic.round()
    elastic.round()
    three, order = elastic.state, elastic.workers
    group = elastic._grouped(ALL)
    assert len(group.workers) == 4 and group.workers != (0, 1, 2, 3)
    rows = {w: row for row, w in enumerate(group.workers)}
    nu = {w: np.asarray(group.state.worker["optimizer"][0].nu["w"])[rows[w]] for w in ALL}
    keys = {w: jax.random.key_data(group.state.worker["key"])[rows[w]].tolist() for w in ALL}
    for row, worker in enumerate(order):
        old = three.worker["optimizer"][0].nu["w"][row]
        np.testing.assert_array_equal(nu[worker], old)
        assert keys[worker] == jax.random.key_data(three.worker["key"])[row].tolist()
    mean = np.mean([nu[w] for w in order], axis=0)
    np.testing.assert_allclose(nu[1], mean, rtol=1e-6)
    assert len({tuple(key) for key in keys.values()}) == 4
    assert group.state.worker["on"].dtype == bool
    assert group.state.worker["on"].tolist() == [three.worker["on"][0]] * 4


def test_what_is_sent_to_a_new_worker_is_the_same_to_the_bit():
    mesh = mesh_of(WORKERS)
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    values = dict(
        float=np.float32([-0.0, np.nan, np.inf, 1e-45]),
        half=jnp.bfloat16(1.1),
        whole=np.int32([-5, 7]),
        byte=np.uint8([255, 0]),
        flag=np.array([True, False]),
        key=jax.random.key(7, impl="rbg"),
    )
    placed = jax.tree.map(lambda x: jax.device_put(x, at), values)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed
    )
    found = regroup.from_worker(placed, shapes, mesh, "data", 2)
    for name, value in values.items():
        if name == "key":
            assert jax.random.key_impl(found[name]) == "rbg"
            assert (jax.random.key_data(found[name]) == jax.random.key_data(value)).all()
        else:
            assert found[name].dtype == value.dtype
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def test_a_worker_that_dies_and_is_back_before_anybody_looked_has_no_state():
    script = Script((ALL, ()), (ALL, (2,)), (ALL, ()))
    elastic = make(local_sgd(every=EVERY), script)
    elastic.round()
    before = elastic.state
    done = elastic.round()
    assert done.discarded == 1 and sorted(done.workers) == [*ALL]
    assert int(before.round) == 1 and not before.round.is_deleted()


def test_orders_of_workers_do_not_come_again_soon():
    found = [ordered((3, 1, 2, 0), changes) for changes in range(24)]
    assert len(set(found)) == 24 and found[0] == ALL and ordered(ALL, 24) == ALL
    assert all(sorted(one) == [*ALL] for one in found)


@pytest.mark.parametrize(
    ("outer", "options", "says"),
    [
        (co2(every=EVERY), dict(donate=True), "donate=False"),
        (eager_diloco(every=EVERY), {}, "takes outer state along"),
        (co2(every=EVERY), dict(shard_outer=True), "takes outer state along"),
    ],
)
def test_local_updates_that_cannot_lose_a_worker_are_refused(outer, options, says):
    with pytest.raises(ValueError, match=says):
        make(outer, lost(), **options).round()


def compressed(sync, outer, script):
    """Return workers that pull a matrix to targets of their own, averages compressed."""

    def step(params, batch):
        pull = params["w"] - batch.mean(0)
        return {"w": params["w"] - 0.3 * pull}, jnp.mean(pull**2)

    def updates(mesh):
        return LocalUpdates(
            step, mesh, outer=outer, params=None, sync=sync, overlap=False, donate=False
        )

    targets = np.random.default_rng(4).normal(size=(WORKERS, 64, 64)).astype("f")
    return Elastic(
        updates,
        mesh_of(WORKERS),
        init=lambda mesh: {"w": jnp.ones((64, 64))},
        batches=lambda number, worker: np.tile(targets[worker], (EVERY, 1, 1, 1)),
        live=script,
    )


@pytest.mark.parametrize(
    ("outer", "sync"),
    [
        (co2(every=EVERY), uniform(power_sgd(2))),
        (local_sgd(every=EVERY), uniform(qsgd(4, error_feedback=True))),
        (local_sgd(every=EVERY), lgreco(power_sgd(4), every=2, accumulate=1, beside=0)),
    ],
    ids=["co2 power_sgd", "local_sgd qsgd", "local_sgd lgreco"],
)
def test_compressed_averages_go_on_with_the_errors_that_are_owed(outer, sync):
    script = Script((ALL, ()), (ALL, (1,)), ((0, 2, 3), ()), (ALL, ()))
    elastic = compressed(sync, outer, script)
    elastic.round(), elastic.round()
    three, order = elastic.state, elastic.workers
    group = elastic._grouped(ALL)
    own = {w: np.asarray(three.sync.error["0"])[row] for row, w in enumerate(order)}
    error = {w: np.asarray(group.state.sync.error["0"])[r] for r, w in enumerate(group.workers)}
    for worker, value in own.items():
        assert np.abs(value).max() > 0
        np.testing.assert_array_equal(error[worker], value)
    np.testing.assert_allclose(error[1], np.mean(list(own.values()), axis=0), atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, group.state.control, three.control)
    assert np.isfinite(elastic.round().metrics).all() and sorted(elastic.workers) == [*ALL]


def test_other_layers_compressed_with_another_number_of_workers_are_refused():
    """TopK's bytes grow with workers: what is compressed with two goes raw with four."""
    elastic = compressed(
        uniform(top_k(0.2)), local_sgd(every=EVERY), Script(((0, 1), ()), (ALL, ()))
    )
    elastic.round()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="another synchronisation"):
        elastic.round()


def test_without_jax_distributed_it_says_what_to_call():
    with pytest.raises(ValueError, match=r"jax\.distributed\.initialize"):
        make(local_sgd(every=EVERY), None)


def test_before_a_round_there_is_no_state():
    elastic = make(local_sgd(every=EVERY), lost())
    assert elastic.number == 0 and elastic.workers == ()
    with pytest.raises(ValueError, match="call round"):
        elastic.state  # noqa: B018
