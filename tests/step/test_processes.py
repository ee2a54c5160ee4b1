"""Many processes run one program: real ones, with jax.distributed and gloo, on CPUs."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxoverlap
from jaxoverlap import Plan, overlap
from tests.support.many_processes import abstract, make_mesh, make_step, train
from tests.support.processes import run

HOST = re.escape(socket.gethostname())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make a folder with two plans for one step, and one that a tuning found, in this process."""
    folder = tmp_path_factory.mktemp("plans")
    for name, variant in (("plan", "two_way"), ("other", "one_way x 2")):
        step = overlap(make_step(make_mesh()), granularity=variant)
        plan = step.explain(*abstract(make_mesh()))
        assert len(plan.decisions) >= 4
        plan.write(folder / f"{name}.json")
    tuned_plan = jaxoverlap.tune(
        *(make_step(make_mesh()), abstract(make_mesh())),
        **{"measure": True, "show": False, "cache": folder / "cache"},
    )
    tuned_plan.write(folder / "tuned.json")
    return folder


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Return the losses of the plain step in one process."""
    losses = train(make_step(make_mesh()))
    assert losses[-1] < losses[0]
    return losses


@pytest.fixture(scope="module")
def two(folder):
    """Run every scenario in two processes, one after the other; the last ends them."""
    return run(
        2,
        folder,
        *("of_file", "of_tuned_file", "of_process_0", "explained_alone"),
        *("fails_in_one", "raises_in_one"),
        *("refused_in_one", "tuned", "timed", "absent", "no_plan", "late_plan", "two_plans"),
    )


@pytest.fixture(scope="module")
def four(folder):
    return run(4, folder, "of_file", "of_tuned_file", "two_plans")


def rows(outcomes, scenario: str, what: str) -> list:
    return [row[scenario].get(what) for _, row, _ in outcomes]


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", ["of_file", "of_tuned_file", "of_process_0", "explained_alone"]
)
def test_two_processes_train_as_one_does(two, plain, scenario):
    for losses in rows(two, scenario, "result"):
        np.testing.assert_allclose(losses, plain, rtol=1e-5)


def test_process_0_tunes_for_all(two, plain):
    results = rows(two, "tuned", "result")
    assert [row["calls"] for row in results] == [[0], []]
    for row in results:
        np.testing.assert_allclose(row["losses"], plain, rtol=1e-5)
    for error in rows(two, "timed", "error"):
        assert "measure=True in several processes" in error


@pytest.mark.parametrize("scenario", ["of_file", "of_tuned_file"])
def test_four_processes_train_as_one_does(four, plain, scenario):
    for losses in rows(four, scenario, "result"):
        np.testing.assert_allclose(losses, plain, rtol=1e-5)


# -- disagreement ---------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", ["two", "four"])
def test_two_plans_stop_every_process(request, processes):
    outcomes = request.getfixturevalue(processes)
    for code, _, err in outcomes:
        assert code == 1, err[-3000:]
        said = err[err.rindex("DisagreementError: ") :]
        assert "train_step is not the same program in all processes, and was not compiled" in said
        half = len(outcomes) // 2
        for group in (range(half), range(half, len(outcomes))):
            who = ", ".join(rf"process {rank} \({HOST}\)" for rank in group)
            assert re.search(rf"  [0-9a-f]{{12}}: {who}\n", said), said
        assert f"process {half}, where process 0 has the other:" in said
        assert re.search(
            r"edit \d+: ring of \w+ over model, one_way x 2: .*, and not ring .* two_way", said
        )
        assert "hash of the rewritten step: " in said
        assert "jaxoverlap.agreed()" in said


def test_where_one_fails_all_run_plain_if_they_may(two, plain):
    for losses in rows(two, "fails_in_one", "result"):
        np.testing.assert_allclose(losses, plain, rtol=1e-5)
    for _, _, err in two:
        assert "train_step runs without overlap in all processes" in err


def test_where_one_fails_all_learn(two):
    other, failing = rows(two, "raises_in_one", "error")
    assert failing.startswith("RewriteError: could not rewrite matmul")
    assert re.match(
        r"DisagreementError: train_step was not compiled, as it failed elsewhere:\n"
        rf"  process 1 \({HOST}\): RewriteError: could not rewrite matmul",
        other,
    )


def test_where_one_refuses_its_plan_all_learn(two):
    other, refusing = rows(two, "refused_in_one", "error")
    assert refusing.startswith("UserError: the plan was made for something else than train_step")
    assert "process 1" in other and "the plan was made for something else" in other


def test_one_that_does_not_come_is_named(two):
    waiting, late = rows(two, "absent", "error")
    assert "process 1 did not come to train_step within 1 s, so it was not compiled" in waiting
    assert f"here are process 0 ({socket.gethostname()})" in waiting
    assert "overlap(agree_within_s=)" in waiting
    assert "process 1 came to train_step after the others had given up: they waited 1 s" in late


def test_process_0_without_a_plan(two):
    own, other = rows(two, "no_plan", "error")
    assert own.startswith("FileNotFoundError")
    assert other.startswith("DisagreementError: process 0 made no plan, as it failed: FileNotFound")
    assert two[1][1]["no_plan"]["seconds"] < two[1][1]["absent"]["seconds"], "at once"
    assert rows(two, "late_plan", "result")[0] == "train_step"
    assert (
        "process 0 gave no plan within 0.5 s; process 1 waited"
        in rows(two, "late_plan", "error")[1]
    )


# -- one process ----------------------------------------------------------------------------------


def test_one_process_asks_nobody(folder, plain, monkeypatch):
    def asked(*_):
        raise AssertionError("one process has nobody to ask")

    monkeypatch.setattr("jaxoverlap._jax.jits.key_value_store", asked)
    plan = jaxoverlap.agreed(lambda: Plan.read(folder / "plan.json"))
    np.testing.assert_allclose(train(overlap(make_step(make_mesh()), plan=plan)), plain, rtol=1e-5)


def test_processes_without_a_store(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(jaxoverlap.DisagreementError, match=r"call jax.distributed.initialize\(\)"):
        jaxoverlap.agreed(lambda: Plan.read(folder / "plan.json"))


def test_seconds_to_wait_are_more_than_zero():
    with pytest.raises(ValueError, match=r"agree_within_s=0: expected seconds"):
        overlap(make_step(make_mesh()), agree_within_s=0)
