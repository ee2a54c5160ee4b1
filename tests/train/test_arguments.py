"""What users give is checked where it is given, by one module, in words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxoverlap._util.limits import number, whole
from jaxoverlap.train import (
    LocalUpdates,
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
from jaxoverlap.train import compression as c
from jaxoverlap.train import zeroth_order as zo
from tests.train.local_updates.problem import flat, make_data, make_state, make_step, mesh_of

NOT_NUMBERS = (np.nan, np.inf, -np.inf, True, "1", None, [1.0])
NOT_COUNTS = (0, -1, 2.5, np.nan, np.inf, True, "2", None, np.float32(2))


def local_updates(**options):
    return LocalUpdates(make_step(), mesh_of(4), **(dict(outer=co2(every=4)) | options))


def data_parallel(**options):
    given = dict(sync=c.uniform(c.none()), optimizer=optax.sgd(0.1), loss=jax.value_and_grad(sum))
    given |= options
    loss, optimizer = given.pop("loss"), given.pop("optimizer")
    return c.data_parallel(loss, optimizer, mesh_of(4), **given)


RATES = (
    lambda r: diloco(every=4, learning_rate=r),
    lambda r: bmuf(every=4, learning_rate=r),
    lambda r: eager_diloco(every=4, learning_rate=r),
    lambda r: streaming_diloco(every=4, fragments=2, delay=1, learning_rate=r),
    lambda r: co2(every=4, learning_rate=r),
    lambda r: slowmo(every=4, inner_learning_rate=0.1, learning_rate=r),
    lambda r: slowmo(every=4, inner_learning_rate=r),
    lambda r: zo.mezo(eps=1e-3, lr=r),
)


@pytest.mark.parametrize("make", RATES)
def test_a_rate_is_finite_and_above_0_or_a_schedule_that_is(make):
    for bad in (0, -1, *NOT_NUMBERS):
        with pytest.raises(ValueError, match=r"(rate|lr)=.*: expected a finite number above 0"):
            make(bad)
    for bad in (lambda n: np.nan, lambda n: jnp.inf, lambda n: -1.0, lambda n: 1.0 - n):
        with pytest.raises(ValueError, match=r"a schedule that is .* at step"):
            make(bad)
    with pytest.raises(ValueError, match="cannot be called with a step"):
        make(lambda: 1.0)
    make(np.float32(0.1))
    make(optax.linear_schedule(0.0, 1.0, 10))


@pytest.mark.parametrize(
    ("name", "make"),
    (
        ("every", lambda n: local_sgd(every=n)),
        ("every", lambda n: c.lgreco(c.power_sgd(2), every=n)),
        ("fragments", lambda n: streaming_diloco(every=4, fragments=n, delay=0)),
        ("rank", lambda n: c.power_sgd(n)),
        ("bits", lambda n: c.qsgd(n)),
        ("directions", lambda n: zo.mezo(eps=1e-3, lr=1e-3, directions=n)),
        ("rank", lambda n: zo.lora(dict(w=jnp.ones((4, 4))), rank=n, where=lambda path: True)),
        ("accumulate", lambda n: c.accordion(c.qsgd(4), accumulate=n)),
    ),
)
def test_a_count_is_whole_python_s_or_numpy_s(name, make):
    for bad in NOT_COUNTS:
        with pytest.raises(ValueError, match=f"{name}=.*: expected a whole number"):
            make(bad)
    make(np.int64(4))
    make(np.uint8(4))


@pytest.mark.parametrize(
    ("make", "says"),
    (
        (lambda: co2(every=4, staleness=np.inf), "staleness=inf"),
        (lambda: co2(every=4, staleness=True), "staleness=True"),
        (lambda: co2(every=4, clip=np.inf), "clip=inf"),
        (lambda: co2(every=4, momentum=np.nan), "momentum=nan"),
        (lambda: streaming_diloco(every=4, fragments=2, delay=1, alpha=2), "alpha=2"),
        (lambda: streaming_diloco(every=4, fragments=2, delay=3), "delay=3"),
        (lambda: overlap_local_sgd(every=4, pullback=np.nan), "pullback=nan"),
        (lambda: diloco(every=4, nesterov="no"), "nesterov='no'"),
        (lambda: Outer(every=4, transform=optax.sgd), "with its parentheses"),  # type: ignore
        (lambda: Outer(every=4, transform=optax.sgd(1.0), keep=np.nan), "keep=nan"),
        (lambda: c.accordion(c.power_sgd(4), high=2, low=8), "low=8 with high=2"),
        (lambda: c.accordion(c.power_sgd(4), threshold=np.inf), "threshold=inf"),
        (lambda: c.uniform(c.qsgd(4), seed=-1), "seed=-1"),
        (lambda: c.uniform(c.qsgd(4), start=1.5), "start=1.5"),
        (lambda: c.top_k(np.nan), "fraction=nan"),
        (lambda: c.top_k("0.1"), "fraction='0.1'"),
        (lambda: c.power_sgd(4, error_feedback="yes"), "error_feedback='yes'"),
        (lambda: local_updates(overlap={"halvs": 2}), "no option halvs"),
        (lambda: local_updates(overlap="halves"), "overlap='halves'"),
        (lambda: local_updates(overlap=None), "overlap=None"),
        (lambda: local_updates(overlap={"halves": 0}), "halves"),
        (lambda: local_updates(sync=c.power_sgd(2)), "sync=PowerSGD"),
        (lambda: local_updates(stacked=("w",)), "without sync"),
        (lambda: local_updates(sync=c.uniform(c.qsgd(4)), stacked="layers"), r"\('layers',\)"),
        (lambda: local_updates(shard_outer="yes"), "shard_outer='yes'"),
        (lambda: data_parallel(stacked="layers"), r"expected a sequence of keys, as \('layers',\)"),
        (lambda: data_parallel(optimizer=optax.sgd), "with its parentheses"),
        (lambda: data_parallel(loss=None), "loss_and_grads=None: expected a function"),
        (lambda: data_parallel(in_backward="no"), "in_backward='no'"),
        (lambda: data_parallel(overlap={"halvs": 2}), "no option halvs"),
        (lambda: zo.mezo(eps=lambda n: 1e-3, lr=1e-3), "eps=<function"),
        (lambda: zo.mezo(eps=1e-3, lr=1e-3, weight_decay=np.inf), "weight_decay=inf"),
        (lambda: zo.mezo(eps=1e-3, lr=1e-3, decays="bias"), "decays='bias'"),
        (lambda: zo.step(sum, zo.mezo(eps=1e-3, lr=1e-3), deferred="no"), "deferred='no'"),
        (lambda: zo.step(sum, zo.mezo(eps=1e-3, lr=1e-3), overlap={"halvs": 1}), "no option halvs"),
        (lambda: zo.step("loss", zo.mezo(eps=1e-3, lr=1e-3)), "loss_fn='loss'"),
    ),
)
def test_what_cannot_be_is_refused_by_its_own_name(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_an_accordion_with_one_end_beyond_the_other_s_default_is_refused():
    sync = c.accordion(c.power_sgd(4), high=1)
    with pytest.raises(ValueError, match="low=2 and high=1 for w"):
        data_parallel(sync=sync).init(dict(w=jnp.ones((512, 512))))


def test_the_checkers_give_python_s_own_types():
    assert type(whole("n", np.int64(3), 1)) is int
    assert type(number("x", np.float32(0.5), above=0)) is float
    with pytest.raises(ValueError, match=r"x=1: expected a finite number at least 0 and below 1"):
        number("x", 1, least=0, below=1)


# -- schedules whose values come later -------------------------------------------------------------


def test_slowmo_with_a_warm_up_from_0_moves_when_its_workers_do():
    schedule = optax.linear_schedule(0.0, 0.1, 2)
    optimizer = optax.sgd(lambda count: schedule(count // 4))
    updates = LocalUpdates(
        make_step(optimizer), mesh_of(4), outer=slowmo(every=4, inner_learning_rate=schedule),
        overlap=False,
    )  # fmt: skip
    data, state = make_data(16, 4), updates.init(make_state(optimizer))
    begin = flat(state.begin)
    for number_ in range(4):
        state, _ = updates.round(state, tuple(d[number_ * 4 : number_ * 4 + 4] for d in data))
        updates.check(state)
        if number_ == 0:
            np.testing.assert_array_equal(flat(state.begin), begin)
    assert np.isfinite(flat(state.begin)).all() and np.abs(flat(state.begin) - begin).max() > 0.01


@pytest.mark.parametrize("bad", (np.nan, np.inf, -1.0))
def test_a_zeroth_order_rate_that_turns_bad_is_named_and_changes_nothing(bad):
    transform = zo.mezo(eps=1e-3, lr=lambda step: jnp.where(step == 5, bad, 1e-2))
    step = zo.step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), transform)
    params, batch = dict(w=jnp.ones((4, 3))), np.ones((2, 4), np.float32)
    state = step.init(params)._replace(step=jnp.int32(4))
    state, _ = step(state, batch)
    before = jax.device_get(state.params)
    with pytest.raises(
        zo.NonFiniteLossError, match=f"step 5: .*learning rate is {bad:g}"
    ) as raised:
        step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, raised.value.state.params, before)
    assert float(raised.value.metrics["rate"]) == 0
