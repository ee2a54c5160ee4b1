"""A run's log: eight bytes a step, and the parameters again from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo
from tests.train.zeroth_order import problem

TRANSFORM = zo.mezo(eps=1e-2, lr=lambda n: 1e-2 / (1 + n), weight_decay=0.1)
HEADER = zo.header_of(problem.params(), TRANSFORM, seed=3)


def run(path, step, state, begin, end):
    with zo.Log(path, HEADER) as log:
        for number in range(begin, end):
            state, metrics = step(state, problem.batch(number))
            log.add(metrics)
    return state


@pytest.mark.parametrize("deferred", [False, True])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path, deferred):
    step = zo.step(problem.MODEL, TRANSFORM, deferred=deferred)
    whole = run(tmp_path / "whole", step, step.init(problem.params(), seed=3), 0, 12)
    path = tmp_path / "killed"
    run(path, step, step.init(problem.params(), seed=3), 0, 7)
    with path.open("ab") as file:
        file.write(b"\x01\x02\x03")  # of a record that was not written whole
    with zo.Log(path, HEADER) as log:
        assert log.steps == 7
        state = zo.replay(log.records, TRANSFORM, step.init(problem.params()).params, seed=3)
    state = run(path, step, state, 7, 12)
    jax.tree.map(np.testing.assert_array_equal, step.params(state), step.params(whole))
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_step_takes_eight_bytes(tmp_path):
    step, path = zo.step(problem.MODEL, TRANSFORM), tmp_path / "log"
    state = run(path, step, step.init(problem.params(), seed=3), 0, 1)
    before = path.stat().st_size
    run(path, step, state, 1, 11)
    assert path.stat().st_size - before == 10 * 8


def test_replay_holds_over_many_devices(tmp_path):
    mesh = problem.mesh(pair=2, data=2)
    step = zo.step(problem.MODEL, TRANSFORM, mesh, perturb="pair", data="data")
    state = run(tmp_path / "log", step, step.init(problem.params(), seed=3), 0, 5)
    with zo.Log(tmp_path / "log", HEADER) as log:
        records = log.records
    alone = zo.replay(records, TRANSFORM, jax.tree.map(jnp.asarray, problem.params()), seed=3)
    jax.tree.map(np.testing.assert_array_equal, state.params, alone.params)


@pytest.mark.parametrize("what", ["params", "seed", "directions", "weight_decay"])
def test_a_log_of_another_run_is_refused(tmp_path, what):
    with zo.Log(tmp_path / "log", HEADER):
        pass
    params, seed, given = problem.params(), 3, dict(eps=1e-2, lr=1e-2, weight_decay=0.1)
    if what == "params":
        params = problem.params(seed=1)
    elif what == "seed":
        seed = 4
    else:
        given[what] = 2
    other = zo.header_of(params, zo.mezo(**given), seed=seed)
    with pytest.raises(ValueError, match=f"log of another run \\({what}"):
        zo.Log(tmp_path / "log", other)


def test_what_is_no_log_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\x89PNG\n1234")
    with pytest.raises(ValueError, match="is not a log"):
        zo.Log(path, HEADER)
