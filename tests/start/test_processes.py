"""Many processes run the same program at each step, and keep the same one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from benchmarks.lab import Lab, Network, why_not
from jaxoverlap.start.record import PLAIN
from tests.start import child
from tests.start.case import arguments, make_step, train
from tests.support.processes import run
from tests.support.seeds import some

NO_LAB = why_not()
TOLERANCE = {"rtol": 2e-4, "atol": 1e-6}
FASTEST = some(1, [*child.FASTEST])  # of twelve
NAMES = [name for name in child.SCENARIOS if name in FASTEST or name not in child.FASTEST]
TRAINS = [name for name in NAMES if name != "another_step"]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Return what each process says of each scenario."""
    folder = tmp_path_factory.mktemp("trials")
    done = run(request.param, folder, *NAMES, module=child.__name__, most_s=600)
    for code, rows, err in done:
        assert code == 0 and list(rows) == NAMES, err[-4000:]
    return {name: [rows[name]["result"] for _, rows, _ in done] for name in NAMES}


@pytest.fixture(scope="module")
def plain() -> list[float]:
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    return train(make_step(mesh), *arguments(mesh), lambda number: number == 300)[1]


@pytest.mark.parametrize("name", TRAINS)
def test_all_run_the_same_programs_and_train_as_one_does(name, outcomes, plain):
    first, *others = outcomes[name]
    for other in others:
        assert other["trials"]["ran"] == first["trials"]["ran"]
        assert other["trials"]["taken"] == first["trials"]["taken"]
        assert other["losses"] == first["losses"]
    count = min(len(first["losses"]), len(plain))
    np.testing.assert_allclose(first["losses"][:count], plain[:count], **TOLERANCE)


def dropped(outcomes: Any, name: str) -> dict[str, str]:
    (rows,) = {str(one["trials"]["candidates"]): one for one in outcomes[name]}.values()
    return {one["name"]: one["dropped"] for one in rows["trials"]["candidates"] if one["dropped"]}


@pytest.mark.rotating
@pytest.mark.parametrize("name", FASTEST)
def test_the_fastest_is_kept_by_all(name, outcomes):
    """Each program in its turn; the others are slowed in one process, or in all."""
    for one in outcomes[name]:
        assert one["trials"]["taken"] == one["wanted"]
        assert not any(program["dropped"] for program in one["trials"]["candidates"])
        assert one["trials"]["trial_steps"] <= 60


def test_the_slowest_process_counts(outcomes):
    (trials, *_) = (one["trials"] for one in outcomes["slower_elsewhere"])
    assert trials["taken"] == "two_way" and trials["trial_steps"] <= 60
    medians = {one["name"]: np.median(one["seconds"]) for one in trials["candidates"]}
    assert medians["one_way"] > 0.08 > medians["two_way"]


def test_process_0_finds_what_was_decided_for_all(outcomes):
    for one in outcomes["again"]:
        assert one["trials"]["cached"] and one["trials"]["taken"] == "two_way"


def test_what_fails_in_one_process_is_dropped_in_all(outcomes):
    last = len(outcomes["fails_in_one"]) - 1
    assert list(dropped(outcomes, "fails_in_one")) == ["two_way"]
    said = dropped(outcomes, "fails_in_one")["two_way"]
    assert "XLA gives up here" in said and said.endswith(f"(process {last})")
    assert dropped(outcomes, "another_in_one") == {
        "one_way": "it is not the same program in all processes"
    }


def test_what_hangs_is_too_large_or_differs_in_one_process_is_dropped_in_all(outcomes):
    last = len(outcomes["dropped_in_one"]) - 1
    why = {"one_way": "not compile it within 0.5 s", "two_way": "where 1.0 kB are"}
    found = dropped(outcomes, "dropped_in_one")
    for name, text in (why | {"direct": "its results differ"}).items():
        assert text in found[name] and found[name].endswith(f"(process {last})")
    for one in outcomes["dropped_in_one"]:
        assert one["trials"]["taken"] == PLAIN and one["trials"]["trial_steps"] == 0


def test_a_tunings_programs_have_trial_steps_in_all(outcomes):
    assert not dropped(outcomes, "tuned")
    for one in outcomes["tuned"]:
        names = [program["name"] for program in one["trials"]["candidates"]]
        assert names[:2] == [PLAIN, "rules"] and len(names) == 3


def test_a_late_process_keeps_all_together(outcomes):
    for one in outcomes["late_in_one"]:
        assert one["trials"]["taken"] == "two_way"


def test_where_process_0_finds_nothing_all_run_plain(outcomes):
    for one in outcomes["search_fails"]:
        assert one["trials"]["taken"] == PLAIN and "ZeroDivisionError" in one["trials"]["why"]


def test_another_step_is_refused_before_it_runs(outcomes):
    *_, last = outcomes["another_step"]
    assert "train_step is not the same step in processes" in last


@pytest.mark.nightly
@pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")
@pytest.mark.parametrize("hosts", [2, 4])
def test_the_fastest_is_kept_by_all_hosts_of_the_lab(hosts):
    """All twelve steps, over links of 1 Gbit/s; and what is dropped in one host is in all."""
    names = [*child.FASTEST, "dropped_in_one"]
    with Lab(Network(hosts=hosts, rate_mbit=1000)) as lab:
        done = lab.run(f"{child.__name__}:{child.on_host.__name__}", names=names)
    for rows in zip(*done, strict=True):
        trials = [row["result"]["trials"] for row in rows]
        assert {one["taken"] for one in trials} == {rows[0]["result"].get("wanted", PLAIN)}
        assert all(one["ran"] == trials[0]["ran"] for one in trials)
