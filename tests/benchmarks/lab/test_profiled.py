"""Processes on hosts profile one step together; each reads the devices of all."""

from __future__ import annotations

import pytest

from benchmarks.lab import Lab, Network, why_not
from benchmarks.lab.__main__ import SMALL
from benchmarks.lab.races import profiled

NO_LAB = why_not()
pytestmark = pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")


def test_hosts_profile_a_step_together():
    with Lab(Network(hosts=2, rate_mbit=1000.0)) as lab:
        name = f"{profiled.__name__}:profiled"
        answers = lab.run(name, way="fsdp", size=SMALL, runs=2)
    for answer in answers:
        assert answer["devices"] == 2
        assert answer["missed"] == []  # by the schedule, or by the profile
        assert answer["exposed_s"] > 0
        parts = answer["compute_s"] + answer["exposed_s"] + answer["idle_s"]
        assert parts == pytest.approx(answer["step_s"])
    assert answers[0]["text"] == answers[1]["text"]
