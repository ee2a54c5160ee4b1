"""Every algorithm against numpy, written from its paper; exact identities between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import (
    LocalUpdates,
    bmuf,
    co2,
    diloco,
    eager_diloco,
    local_sgd,
    overlap_local_sgd,
    slowmo,
    streaming_diloco,
)
from tests.train.local_updates import numpy_forms as forms
from tests.train.local_updates.problem import (
    RATE,
    by_worker,
    flat,
    make_data,
    make_state,
    make_step,
    mesh_of,
    train,
)

WORKERS, EVERY, ROUNDS = 4, 4, 6
DATA = make_data(EVERY * ROUNDS, WORKERS)
LISTS = by_worker(DATA, WORKERS)
P0 = flat(make_state()["params"])


def trained(outer, *, workers=WORKERS, inside=1, rounds=ROUNDS, **options):
    updates = LocalUpdates(
        make_step(), mesh_of(workers, inside), outer=outer, overlap=False, **options
    )
    return updates, train(updates, rounds, DATA)


def result(outer, **options):
    updates, state = trained(outer, **options)
    return flat(updates.params(state))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_local_sgd():
    close(result(local_sgd(every=EVERY)), forms.averaged(P0, LISTS, WORKERS, EVERY, RATE))


def test_local_sgd_of_one_step_is_the_synchronous_step():
    updates, state = trained(local_sgd(every=1), rounds=EVERY * ROUNDS)
    close(flat(updates.params(state)), forms.synchronous(P0, LISTS, WORKERS, RATE))


def test_slowmo():
    outer = slowmo(every=EVERY, inner_learning_rate=RATE, momentum=0.3, learning_rate=0.8)
    close(result(outer), forms.slowmo(P0, LISTS, WORKERS, EVERY, RATE, 0.3, 0.8))


def test_slowmo_divides_by_the_schedule_of_its_rounds():
    rates = [0.1, 0.2, 0.05, 0.1, 0.1, 0.4]
    outer = slowmo(
        every=EVERY, inner_learning_rate=lambda n: jnp.asarray(rates, "f")[n], momentum=0.5
    )
    p, u = P0, 0 * P0
    for t in range(ROUNDS):
        ends = [forms.steps(p, LISTS, i, t * EVERY, (t + 1) * EVERY, RATE) for i in range(WORKERS)]
        u = 0.5 * u + (p - np.mean(ends, axis=0)) / rates[t]
        p = p - rates[t] * u
    close(result(outer), p)


@pytest.mark.parametrize("nesterov", (False, True))
def test_bmuf(nesterov):
    outer = bmuf(every=EVERY, momentum=0.6, learning_rate=0.9, nesterov=nesterov)
    close(result(outer), forms.bmuf(P0, LISTS, WORKERS, EVERY, RATE, 0.6, 0.9, nesterov))


@pytest.mark.parametrize("delay", (0, 1))
def test_diloco(delay):
    outer = diloco(every=EVERY, learning_rate=0.5, momentum=0.6, delay=delay)
    close(result(outer), forms.diloco(P0, LISTS, WORKERS, EVERY, RATE, 0.5, 0.6, delay))


def test_eager_diloco():
    outer = eager_diloco(every=EVERY, learning_rate=0.5, momentum=0.6)
    _, state = trained(outer)
    expected = forms.eager_diloco(P0, LISTS, WORKERS, EVERY, RATE, 0.5, 0.6)
    params = state.worker["params"]
    for worker in range(WORKERS):
        close(flat({k: v[worker] for k, v in params.items()}), expected[worker])


def test_overlap_local_sgd():
    _, state = trained(overlap_local_sgd(every=EVERY, pullback=0.6, momentum=0.7))
    xs, z = forms.overlap_local_sgd(P0, LISTS, WORKERS, EVERY, RATE, 0.6, 0.7)
    close(flat(state.begin), z)
    params = state.worker["params"]
    for worker in range(WORKERS):
        close(flat({k: v[worker] for k, v in params.items()}), xs[worker])


@pytest.mark.parametrize("delay", (0, 1, 2))
@pytest.mark.parametrize("scattered", (False, True))
def test_streaming_diloco(delay, scattered):
    outer = streaming_diloco(
        every=EVERY, fragments=2, delay=delay, alpha=0.3, learning_rate=0.5, momentum=0.6
    )
    _, state = trained(outer, shard_outer=scattered)
    parts = [slice(forms.FEATURES * forms.OUT, None), slice(0, forms.FEATURES * forms.OUT)]  # b, w
    xs, x = forms.streaming_diloco(P0, LISTS, WORKERS, EVERY, RATE, parts, delay, 0.3, 0.5, 0.6)
    close(flat(state.begin), x)
    params = state.worker["params"]
    for worker in range(WORKERS):
        close(flat({k: v[worker] for k, v in params.items()}), xs[worker])


@pytest.mark.parametrize("momentum", (0.0, 0.5))
@pytest.mark.parametrize("clip", (1e9, 0.02))
@pytest.mark.parametrize(
    ("staleness", "penalty"),
    (
        (1, lambda moved, gradient: 1.0),
        (2.5, lambda moved, gradient: 2.5),
        ("ratio", lambda moved, gradient: 1 + moved / (gradient + 1e-12)),
        (lambda moved, gradient: 0.1 * moved, lambda moved, gradient: 0.1 * moved),
    ),
    ids=("none", "constant", "ratio", "callable"),
)
@pytest.mark.parametrize("scattered", (False, True))
def test_co2(momentum, clip, staleness, penalty, scattered):
    outer = co2(every=EVERY, momentum=momentum, learning_rate=0.9, staleness=staleness, clip=clip)
    expected = forms.co2(P0, LISTS, WORKERS, EVERY, RATE, momentum, 0.9, penalty, clip)
    close(result(outer, shard_outer=scattered), expected)


# -- exact identities -----------------------------------------------------------------------------


def bits(outer, **options):
    updates, state = trained(outer, **options)
    return jax.tree.map(np.asarray, (state, updates.params(state)))


def same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_co2_without_all_that_is_its_own_is_local_sgd_to_the_bit():
    bare = co2(every=EVERY, momentum=0, staleness=1, clip=None, delay=0)
    found, expected = bits(bare), bits(local_sgd(every=EVERY))
    same_bits((found[0].worker, found[1]), (expected[0].worker, expected[1]))


def test_co2_of_diloco_s_momentum_is_diloco_a_round_late_to_the_bit():
    found = bits(co2(every=EVERY, momentum=0.5, learning_rate=0.7, staleness=1, clip=None))
    late = diloco(every=EVERY, momentum=0.5, learning_rate=0.7, nesterov=False, delay=1)
    expected = bits(late)
    same_bits((found[0].worker, found[1]), (expected[0].worker, expected[1]))


def test_a_wide_clip_and_a_penalty_of_one_change_nothing_to_the_bit():
    found = bits(
        co2(every=EVERY, momentum=0.5, staleness=lambda moved, gradient: 0 * moved, clip=1e9)
    )
    expected = bits(co2(every=EVERY, momentum=0.5, staleness=1, clip=None))
    same_bits((found[0].worker, found[1]), (expected[0].worker, expected[1]))


def test_a_small_clip_bounds_every_element_of_the_momentum():
    _, state = trained(co2(every=EVERY, momentum=0.9, clip=1e-3))
    momentum = np.concatenate([np.ravel(m) for m in jax.tree.leaves(state.optimizer)])
    assert np.abs(momentum).max() <= np.float32(1e-3) * (EVERY * ROUNDS)  # the norm's state too
    clipped = jax.tree.leaves(state.optimizer[0].inner)
    found = np.concatenate([np.ravel(m) for m in clipped])
    assert np.abs(found).max() == np.float32(1e-3)
    assert np.mean(np.abs(found) == np.float32(1e-3)) > 0.5  # it does clip
    assert np.abs(np.concatenate([np.ravel(m) for m in clipped])).min() >= 0


@pytest.mark.parametrize("scattered", (False, True))
def test_a_round_begins_with_the_same_bits_on_all_workers_after_50(scattered):
    outer = co2(every=2, momentum=0.5)
    data = make_data(100, 8)
    updates = LocalUpdates(
        make_step(), mesh_of(8), outer=outer, shard_outer=scattered, overlap=False
    )
    state = train(updates, 50, data)
    for leaf in jax.tree.leaves(state.worker["params"]):
        shards = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert len(shards) == 8
        for shard in shards[1:]:
            np.testing.assert_array_equal(shard, shards[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.worker["params"]))
    ends = np.asarray(state.sent["w"])
    assert not (ends[0] == ends[1]).all()  # they did learn different things


@pytest.mark.parametrize(
    "outer",
    (
        local_sgd(every=EVERY),
        slowmo(every=EVERY, inner_learning_rate=RATE),
        bmuf(every=EVERY),
        diloco(every=EVERY),
        diloco(every=EVERY, delay=1),
        co2(every=EVERY),
        overlap_local_sgd(every=EVERY),
    ),
    ids=lambda outer: f"{outer.name}-{outer.delay}",
)
def test_scattered_outer_state_equals_whole(outer):
    found, expected = result(outer, shard_outer=True), result(outer)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_scattered_outer_state_is_scattered():
    _, state = trained(co2(every=EVERY), shard_outer=True)
    for leaf in (state.begin["w"], state.optimizer[0].inner[0].momentum["w"]):
        assert leaf.addressable_shards[0].data.size == leaf.size / WORKERS


def test_an_outer_optimizer_of_adam_is_the_same_scattered():
    from jaxoverlap.train import Outer

    outer = Outer(every=EVERY, transform=optax.lamb(1e-2), delay=1)  # it has norms of whole leaves
    close(result(outer, shard_outer=True), result(outer))
