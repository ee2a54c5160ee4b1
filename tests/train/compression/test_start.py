"""Raw averages before the first compressed one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxoverlap.train import local_sgd
from jaxoverlap.train.compression import lgreco, none, power_sgd, uniform
from tests.train.compression.problem import make_batch, make_params
from tests.train.compression.test_data_parallel import make_step, same
from tests.train.compression.test_local_updates import EVERY, make_updates, train

START = 3


def run(step, steps):
    state, sent = step.init(make_params()), []
    states = []
    for i in range(steps):
        state, _ = step(state, make_batch(i))
        states.append(jax.device_get(state.params))
        sent.append(step.sent_bytes(state))
    step.check()
    return state, states, sent


@pytest.mark.parametrize("in_backward", (False, True))
def test_the_first_steps_are_those_of_no_compression(in_backward):
    step = make_step(uniform(power_sgd(2), start=START), in_backward=in_backward)
    assert "raw" in step.explain(step.init(make_params()))
    _, ours, sent = run(step, START + 1)
    _, plain, raw = run(make_step(uniform(none()), in_backward=in_backward), START + 1)
    for own, reference in zip(ours[:START], plain[:START], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own, reference)
    assert not same(ours[START], plain[START])
    flags = sent[0] - raw[0]  # one flag a compressed layer
    assert sent[:START] == [raw[0] + flags] * START and 0 <= flags < 0.01 * raw[0]
    assert sent[START] < raw[0] / 2


def test_a_choice_made_before_the_start_is_used_from_it_on():
    step = make_step(lgreco(power_sgd(2), every=2, accumulate=1, beside=1, start=START))
    state, _, sent = run(step, START)
    assert (state.control.settings == -1).all() and np.isfinite(state.control.errors).any()
    chosen = state.control.pending
    state, _ = step(state, make_batch(START))
    assert (state.control.settings == chosen).all() and step.sent_bytes(state) < sent[0]


def test_rounds_of_local_updates_start_raw():
    outer = local_sgd(every=EVERY)
    ours, start = make_updates(outer, uniform(power_sgd(2), start=1))
    plain, _ = make_updates(outer, uniform(none()))
    first, reference = train(ours, start, 1), train(plain, start, 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), first.worker, reference.worker
    )
    before = ours.sent_bytes(first)
    assert ours.sent_bytes(train(ours, start, 2, first, 1)) < before / 2


def test_a_negative_start_raises():
    with pytest.raises(ValueError, match="start=-1: expected a whole number, 0 or more"):
        lgreco(power_sgd(2), start=-1)
