"""A log and an estimator refuse what they cannot replay or hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo

PARAMS = {"w": np.ones((4, 3), np.float32)}


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def test_a_log_that_has_a_step_left_out_replays_to_the_same_bits(tmp_path):
    transform = zo.mezo(eps=1e-3, lr=1e-2)
    step = zo.step(loss, transform)
    state = step.init(PARAMS)
    with zo.Log(tmp_path / "log", zo.header_of(PARAMS, transform, seed=0)) as log:
        for number in range(4):
            batch = np.full((2, 4), np.nan if number == 1 else 1 + number, np.float32)
            try:
                state, metrics = step(state, batch)
            except zo.NonFiniteLossError as error:
                state, metrics = error.state, error.metrics
            log.add(metrics)
        again = zo.replay(log.records, transform, PARAMS, seed=0)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_records_states_and_eps_that_do_not_fit_are_refused():
    several = zo.mezo(eps=1e-3, lr=1e-2, directions=3)
    with pytest.raises(ValueError, match=r"expected \[steps, 4\]"):
        zo.replay(np.ones((5, 2)), several, PARAMS, seed=0)
    state = zo.step(loss, zo.mezo(eps=1e-3, lr=1e-2)).init(PARAMS)
    with pytest.raises(ValueError, match="pending update of shape"):
        zo.step(loss, several)(state, np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="float32 can hold"):
        zo.mezo(eps=1e-50, lr=1e-2)


def test_a_pending_update_is_not_lost_in_a_step_that_does_not_defer():
    transform, batch = zo.mezo(eps=1e-3, lr=1e-2), np.ones((2, 4), np.float32)
    defers, immediate = zo.step(loss, transform, deferred=True), zo.step(loss, transform)
    state, _ = defers(defers.init(PARAMS), batch)
    with pytest.raises(ValueError, match="flush it by the step that made it"):
        immediate(state, batch)
    immediate(defers.flush(state), batch)
