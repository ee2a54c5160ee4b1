"""A run's log: twelve bytes a step, and the parameters again from them."""

from __future__ import annotations

import os

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


def test_a_step_takes_twelve_bytes(tmp_path):
    step, path = zo.step(problem.MODEL, TRANSFORM), tmp_path / "log"
    state = run(path, step, step.init(problem.params(), seed=3), 0, 1)
    before = path.stat().st_size
    run(path, step, state, 1, 11)
    assert path.stat().st_size - before == 10 * 12


def test_replay_holds_over_many_devices(tmp_path):
    mesh = problem.mesh(pair=2, data=2)
    step = zo.step(problem.MODEL, TRANSFORM, mesh, perturb="pair", data="data")
    state = run(tmp_path / "log", step, step.init(problem.params(), seed=3), 0, 5)
    with zo.Log(tmp_path / "log", HEADER) as log:
        records = log.records
    alone = zo.replay(records, TRANSFORM, jax.tree.map(jnp.asarray, problem.params()), seed=3)
    jax.tree.map(np.testing.assert_array_equal, state.params, alone.params)


@pytest.mark.parametrize(
    ("what", "change"),
    (
        ("params", dict(params=problem.params(seed=1))),
        ("seed", dict(seed=4)),
        ("directions", dict(directions=2)),
        ("eps", dict(eps=2e-2)),
        ("weight_decay", dict(weight_decay=2.0)),
        ("rates", dict(lr=2e-2)),
        ("rates", dict(lr=lambda step: jnp.where(step < 50, 1e-2, 1e-3))),
        ("decays", dict(decays=lambda path, leaf: False)),
        ("run", dict(run=dict(text="other"))),
    ),
)
def test_a_log_of_another_run_is_refused_as_it_is(tmp_path, what, change):
    given = dict(params=problem.params(), seed=3, run=dict(text="one"))
    estimator = dict(eps=1e-2, lr=1e-2, weight_decay=0.1)

    def header(change):
        own = {k: change.get(k, v) for k, v in given.items()}
        rest = {k: v for k, v in change.items() if k not in own}
        return zo.header_of(own.pop("params"), zo.mezo(**(estimator | rest)), **own)

    with zo.Log(tmp_path / "log", header({})):
        pass
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(ValueError, match=f"log of another run \\({what} "):
        zo.Log(tmp_path / "log", header(change))
    assert (tmp_path / "log").read_bytes() == before
    with zo.Log(tmp_path / "log", header({})):
        pass


# -- integrity ------------------------------------------------------------------------------------


def written(path, count=6):
    """Return the bytes of a log of so many steps, and its records."""
    with zo.Log(path, HEADER) as log:
        for number in range(count):
            log.add(dict(rate=1e-2 / (1 + number), scalars=np.array([0.5 - number])))
        return path.read_bytes(), log.records


@pytest.mark.parametrize("bit", (0, 7, 30))
@pytest.mark.parametrize("at", (0, 5, 11, 12 * 3 + 2, 12 * 5 + 9))
def test_a_bit_that_flipped_is_found_at_its_record(tmp_path, at, bit):
    path = tmp_path / "log"
    whole, records = written(path)
    head = whole.index(b"\n") + 1
    changed = bytearray(whole)
    changed[head + at] ^= 1 << bit % 8
    path.write_bytes(changed)
    with pytest.raises(zo.LogDamagedError, match=rf"record of step {at // 12}, of 6") as raised:
        zo.Log(path, HEADER)
    assert raised.value.good == at // 12
    assert path.read_bytes() == changed  # nothing is lost by looking
    with zo.Log(path, HEADER, cut=True) as log:
        np.testing.assert_array_equal(log.records, records[: at // 12])
        log.add(dict(rate=1.0, scalars=[2.0]))
    assert (tmp_path / "log.damaged").read_bytes() == changed
    with zo.Log(path, HEADER) as log:
        assert log.steps == at // 12 + 1


def test_bytes_and_records_that_are_lost_inside_are_found(tmp_path):
    path = tmp_path / "log"
    whole, _ = written(path)
    head = whole.index(b"\n") + 1
    for lost in (4, 12, 24):
        path.write_bytes(whole[: head + 12] + whole[head + 12 + lost :])
        with pytest.raises(zo.LogDamagedError, match="record of step 1,"):
            zo.Log(path, HEADER)


def test_a_header_that_was_not_written_whole_begins_again(tmp_path):
    path = tmp_path / "log"
    whole, _ = written(path, 0)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with zo.Log(path, HEADER) as log:
            assert log.steps == 0
        assert path.read_bytes() == whole
    changed = whole.replace(b'"seed":3', b'"seed":7')
    path.write_bytes(changed)
    with pytest.raises(ValueError, match="another run"):
        zo.Log(path, HEADER)


def test_a_second_writer_is_refused(tmp_path):
    with (
        zo.Log(tmp_path / "log", HEADER) as log,
        pytest.raises(ValueError, match="open in another process"),
    ):
        log.add(dict(rate=1.0, scalars=[2.0]))
        zo.Log(tmp_path / "log", HEADER)
    with zo.Log(tmp_path / "log", HEADER) as log:
        assert log.steps == 1


@pytest.mark.parametrize(
    "metrics",
    (
        dict(rate=np.nan, scalars=[1.0]),
        dict(rate=1.0, scalars=[np.inf]),
        dict(rate=1.0, scalars=[1.0, 2.0]),
        dict(rate=1.0, scalars=[]),
    ),
)
def test_what_cannot_be_replayed_is_not_written(tmp_path, metrics):
    path = tmp_path / "log"
    whole, _ = written(path)
    with zo.Log(path, HEADER) as log, pytest.raises(ValueError, match="expected 2 finite"):
        log.add(metrics)
    assert path.read_bytes() == whole


def test_a_disk_that_is_full_loses_the_record_and_no_other(tmp_path, monkeypatch):
    path, write = tmp_path / "log", os.pwrite
    whole, _ = written(path)
    with zo.Log(path, HEADER) as log:
        with monkeypatch.context() as patch:
            left = iter((5, 0))

            def full(file, data, at):
                if not (room := next(left)):
                    raise OSError(28, "No space left on device")
                return write(file, data[:room], at)

            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space"):
                log.add(dict(rate=1.0, scalars=[2.0]))
        assert path.read_bytes() == whole
        log.add(dict(rate=1.0, scalars=[2.0]))
    with zo.Log(path, HEADER) as log:
        assert log.steps == 7


def test_what_is_no_log_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\x89PNG\n1234")
    with pytest.raises(ValueError, match="is not a log"):
        zo.Log(path, HEADER)
