"""The first race runs on two hosts; its arithmetic is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import why_not
from benchmarks.lab.report import prediction_error, rows_of, step_s
from benchmarks.lab.timing import Timed, hidden, interleaved, timed

NO_LAB = why_not()
ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
@pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")
def test_two_hosts_race(tmp_path):
    command = [sys.executable, "-m", "benchmarks.lab", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "race.jsonl").read_text().splitlines()]
    assert {row["case"] for row in rows} == {"tensor", "data", "fsdp", "gpt"}
    for case in ("tensor", "data", "fsdp", "gpt"):
        ours = {row["contender"]: row for row in rows if row["case"] == case}
        assert {"plain", "plain, flags", "jaxoverlap"} <= set(ours)
        assert ours["jaxoverlap"]["error"] < 1e-3
        assert all(row["hosts"] == 2 and row["step_s"] > 0 for row in ours.values())
        if form := ours["jaxoverlap"]["closed_form_bytes"]:
            assert 0.9 * form < ours["jaxoverlap"]["sent_bytes"] < 2 * form + 20_000
    assert (tmp_path / "race.svg").exists()
    assert "mean error of the predictions" in done.stdout


def test_contenders_take_turns_and_the_slowest_host_counts():
    order, sent = [], iter(range(0, 1000, 10))

    def contender(name):
        return lambda: order.append(name)

    rows = interleaved(
        {"a": contender("a"), "b": contender("b")},
        runs=2,
        barrier=lambda: order.append("-"),
        sent_bytes=lambda: next(sent),
    )
    assert "".join(order) == "-a-b" * 3
    assert len(rows["a"]["seconds"]) == 2 and rows["a"]["sent_bytes"] == [10, 10]
    one, other = (
        {"seconds": [1.0, 4.0], "sent_bytes": [5, 7]},
        {"seconds": [2.0, 3.0], "sent_bytes": [9, 9]},
    )
    assert timed([{"a": one}, {"a": other}])["a"] == Timed((2.0, 4.0), 8.0)


@pytest.mark.parametrize("step, share", [(3.0, 1.0), (5.0, 0.0), (4.0, 0.5), (6.0, -0.5)])
def test_the_share_hidden(step, share):
    assert hidden(step, 3.0, 2.0) == pytest.approx(share)


def test_rows_compare_with_plain_and_the_bound():
    names = {"compute alone": 2.0, "communication alone": 3.0, "plain": 5.0, "jaxoverlap": 3.3}
    seconds = {name: Timed((s,), 0.0) for name, s in names.items()}
    rows = rows_of("tensor", 100, seconds, {"predicted_s": {"plain": 5.5, "jaxoverlap": 3.0}})
    (ours,) = (row for row in rows if row["contender"] == "jaxoverlap")
    assert ours["hidden"] == pytest.approx(0.85) and ours["over_bound"] == pytest.approx(1.1)
    assert step_s(rows, ours, "plain") == 5.0
    assert prediction_error(rows) == pytest.approx((0.1 + 0.1 / 1.1) / 2)
