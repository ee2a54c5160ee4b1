"""Local updates on four hosts go on where one is killed in mid-round, and take it back."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.lab import why_not
from benchmarks.local_updates import elastic

NO_LAB = why_not()
pytestmark = [
    pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}"),
    pytest.mark.nightly,
]
STEPS = 40 * elastic.EVERY


def test_a_host_is_killed_in_mid_round_and_comes_back(tmp_path):
    folder = tmp_path / "hosts"
    found = elastic.run("one killed, back", STEPS, folder, dies_at=4, back_after=2)
    rounds, four = found["rounds"], [0, 1, 2, 3]
    assert [one["number"] for one in rounds] == list(range(40))
    groups = [workers for workers, _ in itertools.groupby(one["workers"] for one in rounds)]
    assert groups == [four, four[:3], four]
    discarded = [one["number"] for one in rounds if one["discarded"]]
    assert discarded == [one["number"] for one in rounds if one["workers"] != four][:1]
    assert found["loss"] < 2.2  # 5.5 at the start
    rows = [json.loads(line) for line in (folder / "rows3").read_text().splitlines()]
    numbers = [row["number"] for row in rows]
    lost = {one["number"] for one in rounds if one["workers"] != four}
    assert sorted({*numbers}) == sorted({*range(40)} - lost)
