"""One loop for steps and rounds: programs made beside, evicted; compression that is off is told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap.train import diloco
from jaxoverlap.train.compression import (
    NonFiniteGradientError,
    TrainState,
    accordion,
    data_parallel,
    lgreco,
    none,
    power_sgd,
    qsgd,
    top_k,
    transform,
    uniform,
)
from jaxoverlap.train.programs import Programs
from tests.support.seeds import some
from tests.train.compression.problem import loss, make_batch, make_params, mesh_of
from tests.train.compression.test_local_updates import make_updates
from tests.train.compression.test_local_updates import train as train_rounds

PARAMS = dict(up=jnp.ones((64, 64)), down=jnp.ones((64, 64)), head=jnp.ones((64, 32)))


def step_of(sync, params=PARAMS, workers=4, **options):
    return data_parallel(
        jax.value_and_grad(loss), optax.adam(1e-2), mesh_of(workers), sync=sync, **options
    )


# -- compression that does nothing -----------------------------------------------------------------


def cast(dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)


@pytest.mark.parametrize(
    ("sync", "params", "workers", "says"),
    (
        (uniform(qsgd(8)), cast(jnp.bfloat16), 4, r"compresses 0 of 3 matrices, 0\.0 of 20\.5 kB"),
        (uniform(qsgd(8)), cast(jnp.bfloat16), 4, r"down by 1\.\d+, .*and a layer has to reach 2"),
        (lgreco(qsgd(8)), cast(jnp.bfloat16), 4, "compresses 0 of 3 matrices"),
        (uniform(top_k(0.3)), PARAMS, 8, "with 8 workers the default setting divides"),
        (uniform(power_sgd(2)), dict(b=jnp.ones(5000)), 4, "no other leaf is a matrix of 1024"),
        (lgreco(top_k(0.1)), PARAMS, 4, "nothing to choose.*Nothing is measured"),
        (lgreco(qsgd(8)), PARAMS, 4, "nothing to choose"),
    ),
)
def test_compression_that_does_nothing_says_so_once_and_in_the_table(sync, params, workers, says):
    step = step_of(sync, workers=workers)
    with pytest.warns(UserWarning, match=says) as seen:
        state = step.init(params)
        step.abstract(params)
    assert len(seen) == 1
    table = " ".join(step.explain(state).split())
    assert ("nothing is measured" in table) == ("nothing to choose" in says)
    if "matrices" in says:
        assert "Matrices among them: with 4 workers" in table
    with pytest.warns(UserWarning, match=says):
        transform(sync, params, axis="data", workers=workers)


@pytest.mark.parametrize(
    "sync",
    (uniform(none()), uniform(qsgd(4)), lgreco(power_sgd(2)), lgreco(qsgd(4)),
     lgreco(accordion(qsgd(8))), uniform(top_k(0.01))),
)  # fmt: skip
def test_compression_that_does_something_is_silent(sync):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(sync).init(PARAMS)


def test_what_can_choose_nothing_measures_nothing():
    with pytest.warns(UserWarning, match="nothing to choose"):
        step = step_of(lgreco(top_k(0.1), every=2, accumulate=1), stacked=("layers",))
        state = step.init(make_params())
    assert state.sync.accumulated == {}
    for i in range(5):
        state, _ = step(state, make_batch(i))
    assert len(step._loop.programs) == 1


def test_layers_that_are_left_out_by_name_go_raw():
    for make in (uniform, lgreco, accordion):
        step = step_of(make(power_sgd(2), raw=("head",)), stacked=("layers",))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = step.init(make_params())
        table = step.explain(state)
        assert "layers.up" in table and "head" not in table
    both = lgreco(accordion(power_sgd(2), raw=("head",)))
    assert both.raw == ("head",)
    with pytest.raises(ValueError, match=r"raw=.*no leaf of the parameters stands below tail"):
        step_of(uniform(power_sgd(2), raw=("tail",)), stacked=("layers",)).init(make_params())
    with pytest.raises(ValueError, match="raw='head': expected a sequence"):
        uniform(power_sgd(2), raw="head")


# -- programs --------------------------------------------------------------------------------------


def test_programs_that_were_not_used_for_long_are_let_go():
    programs, made = Programs(most=2), []

    def make(name):
        return lambda: made.append(name) or name

    for name in "abacab":
        assert programs.get(name, make(name)) == name
    assert made == ["a", "b", "c", "b"] and len(programs) == 2
    for name in "xyz":
        programs.beside(name, lambda name=name: SimpleNamespace(compile=make(name)))
    assert len(programs) <= 4 and programs.get("z", make("again")) == "z"


ADAPTIVE = lgreco(power_sgd(2), every=3, accumulate=1, beside=1)


def test_a_round_s_new_program_is_made_in_a_thread_before_it_is_needed(monkeypatch):
    beside, asked = [], Programs.beside

    def seen(self, key, make):
        beside.append(key)
        asked(self, key, make)

    monkeypatch.setattr(Programs, "beside", seen)
    updates, start = make_updates(diloco(every=2), ADAPTIVE)
    state = train_rounds(updates, start, 3)
    assert not beside
    state = train_rounds(updates, start, 4, state, begin=3)  # chosen before round 3
    assert len(beside) == 2
    made = dict(updates._programs._made)
    state = train_rounds(updates, start, 8, state, begin=4)
    wanted = {key for key in updates._programs._made if key[0] == "round"} - made.keys()
    assert wanted <= set(beside)
    assert len(updates._programs) <= 16


# -- another number of workers ----------------------------------------------------------------------


MORE_OR_FEWER = (
    (uniform(power_sgd(2)), 2), (uniform(power_sgd(2)), 8), (uniform(qsgd(4)), 2),
    (uniform(qsgd(4)), 8), (ADAPTIVE, 2), (ADAPTIVE, 8),
)  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(("sync", "workers"), some(2, MORE_OR_FEWER))
def test_a_run_goes_on_with_another_number_of_workers(sync, workers):
    step = step_of(sync, stacked=("layers",))
    state = step.init(make_params())
    for i in range(4):
        state, _ = step(state, make_batch(i))
    other = step_of(sync, workers=workers, stacked=("layers",))
    with pytest.raises(ValueError, match=r"of 4 workers, .*consolidate|devices"):
        if not state.sync.error and not state.sync.accumulated:
            raise ValueError("devices")  # nothing differs between workers
        other(state, make_batch(4))
    spread = other.spread(other.consolidate(state))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(spread.params),
        jax.device_get(state.params),
    )
    for name, error in spread.sync.error.items():
        mean = np.asarray(state.sync.error[name]).mean(0)
        np.testing.assert_allclose(np.asarray(error).mean(0), mean, atol=1e-6)
    like = other.abstract(make_params(), workers=4)
    assert jax.tree.map(lambda x: x.shape, like) == jax.tree.map(lambda x: x.shape, state)
    for i in range(4, 8):
        spread, value = other(spread, make_batch(i))
    assert np.isfinite(value)
    other.check()


def test_other_layers_with_other_workers_are_named():
    step = step_of(uniform(top_k(0.12)))
    state = step.init(PARAMS)
    with pytest.warns(UserWarning, match="compresses 0 of 3"):
        other = step_of(uniform(top_k(0.12)), workers=8)
        with pytest.raises(ValueError, match="made for another synchronisation or model"):
            other.spread(other.consolidate(state))


# -- what is given ---------------------------------------------------------------------------------


def test_parameters_on_one_device_keys_and_integers():
    step = step_of(uniform(power_sgd(2)), stacked=("layers",))
    committed = jax.device_put(make_params(), jax.devices()[5])
    state, _ = step(step.init(committed), make_batch(0))
    with pytest.raises(ValueError, match=r"a parameter of dtype int32 at \['n'\]: only floats"):
        step.init(dict(**make_params(), n=jnp.int32(1)))
    with pytest.raises(ValueError, match="of type dict: expected a TrainState"):
        step(dict(params=1), make_batch(0))
    with pytest.raises(ValueError, match=r"inside jax\.jit"):
        jax.jit(step)(state, make_batch(0))
    assert isinstance(state, TrainState)


def test_typed_keys_in_a_batch_differ_between_workers():
    """Each worker gets its own key of [workers], here the mask of a dropout."""

    def with_dropout(params, batch):
        key, x = batch
        mask = jax.random.bernoulli(key[0], 0.5, x.shape)
        return jnp.mean((jnp.where(mask, x, 0) @ params["w"]) ** 2)

    step = data_parallel(
        jax.value_and_grad(with_dropout), optax.sgd(0.1), mesh_of(), sync=uniform(none())
    )
    state = step.init(dict(w=jnp.ones((8, 4))))
    for number in range(2):
        keys = jax.random.split(jax.random.key(number), 4)
        state, value = step(state, (keys, np.ones((8, 8), np.float32)))
    assert np.isfinite(value)


def test_an_error_names_the_step_it_was_in():
    step = step_of(uniform(power_sgd(2)), stacked=("layers",))
    state = step.init(make_params())
    for i in range(3):
        x, y = make_batch(i)
        state, _ = step(state, (x * (np.nan if i == 2 else 1), y))
    with pytest.raises(NonFiniteGradientError, match="step 2"):
        step.check()
