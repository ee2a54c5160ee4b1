"""CO2's options against numpy, drawn together; and what each is worth on its own."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxoverlap.train import LocalUpdates, Outer, co2, local_sgd
from jaxoverlap.train.compression import qsgd, uniform
from jaxoverlap.train.local_updates.co2 import released_momentum
from tests.support.seeds import rotating
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

EVERY, ROUNDS = 2, 7
P0 = flat(make_state()["params"])
PENALTIES = {
    1: lambda moved, gradient: np.ones_like(moved),
    2.5: lambda moved, gradient: np.full_like(moved, 2.5),
    "ratio": lambda moved, gradient: 1 + moved / (gradient + 1e-12),
}


def drawn(seed):
    """Return options of co2(), the oracle's, workers, and options of LocalUpdates."""
    rng = np.random.default_rng(seed)

    def one(*choices):
        return choices[rng.integers(len(choices))]

    options = dict(every=EVERY, clip=one(None, 0.05, 1.0), delay=one(0, 1, 1, 1))
    if by_leaf := rng.random() < 0.25:
        options |= dict(learning_rate="leaf", staleness=1)
    else:
        options |= dict(
            learning_rate=one(0.5, 1.0),
            momentum=one(None, 0.0, 0.4),
            staleness=one(1, 2.5, "ratio", "ratio"),
            over=one("all", "leaf", "element"),
        )
        if options["delay"]:
            options["eager"] = one(False, True, 0.5, 1.0)
    if options["delay"] and rng.random() < 0.6:
        options |= dict(rounds=ROUNDS, start=one(0.0, 0.3), end=one(0.0, 0.3))
    workers, eager = one(1, 2, 4), options.get("eager", False)
    has_phases = "rounds" in options
    wanted = dict(
        beta=options.get("momentum") or 0.0,
        alpha="leaf" if by_leaf else options["learning_rate"],
        penalty=PENALTIES[options.get("staleness", "ratio")],
        over=options.get("over", "all"),
        clip=options["clip"] or np.inf,
        delay=options["delay"],
        share=1 / workers if eager is True else float(eager),
        first=round(ROUNDS * options["start"]) if has_phases else 0,
        until=ROUNDS - round(ROUNDS * options["end"]) if has_phases else ROUNDS,
    )
    return options, wanted, workers, dict(shard_outer=not eager and rng.random() < 0.4)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", rotating(4, range(300)))
def test_options_drawn_together_are_the_oracles(seed):
    options, wanted, workers, more = drawn(seed)
    data = make_data(EVERY * ROUNDS, workers)
    updates = LocalUpdates(
        make_step(), mesh_of(workers), outer=co2(**options), overlap=False, **more
    )
    found = flat(updates.params(train(updates, ROUNDS, data)))
    expected = forms.co2_with(P0, by_worker(data, workers), workers, EVERY, RATE, wanted)
    np.testing.assert_allclose(found, expected, rtol=5e-5, atol=5e-6)


def result(outer, rounds=ROUNDS, workers=4, **options):
    updates = LocalUpdates(make_step(), mesh_of(workers), outer=outer, overlap=False, **options)
    return updates, train(updates, rounds, make_data(EVERY * ROUNDS, workers))


def test_a_run_whose_every_round_waits_is_local_sgd_to_the_bit():
    late = Outer(every=EVERY, transform=local_sgd(every=EVERY).transform, delay=1, waits=True)
    updates, state = result(late)
    others, expected = result(local_sgd(every=EVERY))
    for found, wanted in zip(
        jax.tree.leaves((updates.params(state), state.worker)),
        jax.tree.leaves((others.params(expected), expected.worker)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("eager", (False, 0.5))
def test_a_run_goes_on_from_a_checkpoint_between_rounds_that_wait_and_others(eager):
    outer = co2(every=EVERY, momentum=0.4, eager=eager, rounds=ROUNDS, start=0.3, end=0.3)
    data = make_data(EVERY * ROUNDS, 4)
    updates, state = result(outer)
    for cut in (2, 5):
        first = LocalUpdates(make_step(), mesh_of(4), outer=outer, overlap=False)
        saved = jax.tree.map(np.asarray, train(first, cut, data).arrays)
        again, start = result(outer, rounds=0)
        places = jax.tree.map(lambda leaf: leaf.sharding, start.arrays)
        restored = jax.device_put(saved, places).with_host_of(start)
        rest = tuple(d[cut * EVERY :] for d in data)
        found = train(again, ROUNDS - cut, rest, restored)
        np.testing.assert_array_equal(flat(again.params(found)), flat(updates.params(state)))


def test_momentum_is_the_released_code_s_by_workers():
    wanted = ((1, 0), (16, 0), (17, 0.2), (64, 0.5), (65, 0.6))
    assert [released_momentum(n) for n, _ in wanted] == [m for _, m in wanted]


def test_options_that_do_not_go_together_are_refused():
    for options, match in (
        (dict(learning_rate="leaf"), "staleness=1"),
        (dict(learning_rate="leaf", staleness=1, momentum=0.2), "momentum=0.2"),
        (dict(learning_rate="leaf", staleness=1, eager=True), "eager=True"),
        (dict(learning_rate="layer"), "learning_rate='layer'"),
        (dict(over="layer"), "over='layer'"),
        (dict(eager=1.5), "eager=1.5"),
        (dict(eager=0), "eager=0"),
        (dict(rounds=0), "rounds=0"),
        (dict(rounds=8, start=1.0), "start=1.0"),
        (dict(rounds=8, delay=0), "every round waits anyway"),
        (dict(eager=True, delay=0), "without delay=1"),
    ):
        with pytest.raises(ValueError, match=match):
            co2(every=EVERY, **options)
    with pytest.raises(ValueError, match="without eager=True"):
        Outer(every=2, transform=local_sgd(every=2).transform, delay=1, share=0.5)
    with pytest.raises(ValueError, match="waits"):
        Outer(every=2, transform=local_sgd(every=2).transform, waits=True)
    outer = co2(every=EVERY, eager=True, rounds=8)
    with pytest.raises(ValueError, match="average parameters"):
        LocalUpdates(make_step(), mesh_of(2), outer=outer, sync=uniform(qsgd(4)), overlap=False)
