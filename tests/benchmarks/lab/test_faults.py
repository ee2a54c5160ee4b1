"""Training ends as docs/clusters.md says when a host dies, is cut off, is slow or comes late.

Each test disturbs a run of two hosts, starts it again from its checkpoints, and compares its losses
with those of an undisturbed run.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lab import Lab, Network, why_not
from tests.benchmarks.lab.training import codes, losses, start, until

NO_LAB = why_not()
pytestmark = pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")

STEPS, TIMEOUT_S = 60, 8
# Collectives give up after TIMEOUT_S, XLA:CPU's reduce-scatters after 30 s; then processes wait as
# long for each other's word, and 10 s for the coordinator's.
ENDS_WITHIN_S = 30 + 35 + 10 + 15
OPTIONS = ("--plain", "--data", "2", "--model", "1", "--timeout-s", str(TIMEOUT_S))


@pytest.fixture
def lab():
    with Lab(Network(hosts=2, rate_mbit=200)) as lab:
        yield lab


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with Lab(Network(hosts=2, rate_mbit=None)) as lab:
        assert codes(begun(lab, folder, "a"), 240) == [0, 0], lab.output(0, "a0")
    return losses(folder / "rows")


def begun(lab: Lab, folder: Path, log: str, ranks=None):
    """Start, or start again, the run whose files are in a folder."""
    keeps = ("--checkpoint", str(folder / "states"), "--metrics", str(folder / "rows"))
    steps = ("--steps", str(STEPS), "--save-every", "5")
    return start(lab, 2, *OPTIONS, *keeps, *steps, log=log, ranks=ranks)


def under_way(folder: Path) -> None:
    until(lambda: len(losses(folder / "rows")) > 12, 150)


def goes_on(lab: Lab, folder: Path, undisturbed: list[float]) -> None:
    """Start all again: whole checkpoints alone are there, and the losses are as if undisturbed."""
    taken = [int(p.name) for p in (folder / "states").iterdir() if p.name.isdigit()]
    assert taken and all(step % 5 == 0 for step in taken)
    assert codes(begun(lab, folder, "again"), 240) == [0, 0], lab.output(0, "again0")
    said = (lab.folder / "again0").read_text()
    assert f"resuming after step {max(taken)} of {STEPS}" in said
    np.testing.assert_allclose(losses(folder / "rows"), undisturbed, rtol=1e-5)


@pytest.mark.nightly
def test_a_host_that_dies_in_mid_step_is_named(lab, tmp_path, undisturbed):
    processes = begun(lab, tmp_path, "a")
    under_way(tmp_path)
    processes[1].kill()
    assert codes(processes, ENDS_WITHIN_S) == [1, -9]
    said = lab.output(0, "a0")
    assert "failed on host0 (process 0): it waited for host1 (process 1), which closed" in said
    assert any(kind in said for kind in ("LostError: an all-", "LostError: a reduce-scatter"))
    goes_on(lab, tmp_path, undisturbed)


@pytest.mark.nightly
def test_where_the_coordinators_host_dies_all_end(lab, tmp_path, undisturbed):
    processes = begun(lab, tmp_path, "a")
    under_way(tmp_path)
    processes[0].kill()
    first, other = codes(processes, ENDS_WITHIN_S)
    assert first == -9 and other != 0
    said = lab.output(1, "a1")
    assert "it waited for host0 (process 0)" in said or "leader task" in said, said
    goes_on(lab, tmp_path, undisturbed)


@pytest.mark.nightly
def test_a_link_that_is_cut_for_five_seconds_is_waited_for(lab, tmp_path, undisturbed):
    processes = begun(lab, tmp_path, "a")
    under_way(tmp_path)
    lab.cut(1)
    time.sleep(5)
    lab.mend(1)
    assert codes(processes, 120) == [0, 0], lab.output(0, "a0")
    np.testing.assert_allclose(losses(tmp_path / "rows"), undisturbed, rtol=1e-5)


@pytest.mark.nightly
def test_a_host_whose_link_is_cut_for_good_is_named(lab, tmp_path, undisturbed):
    processes = begun(lab, tmp_path, "a")
    under_way(tmp_path)
    lab.cut(1)
    assert codes(processes, ENDS_WITHIN_S) == [1, 1]
    said, cut_off = lab.output(0, "a0"), lab.output(1, "a1")
    assert "failed on host0 (process 0): it waited for host1 (process 1)" in said
    assert "failed on host1 (process 1), and host0 (process 0), where" in cut_off
    assert "Either it or host1 is cut off" in cut_off
    lab.mend(1)
    goes_on(lab, tmp_path, undisturbed)


@pytest.mark.nightly
def test_a_link_at_a_tenth_of_its_rate_only_slows_training(lab, tmp_path, undisturbed):
    processes = begun(lab, tmp_path, "a")
    under_way(tmp_path)
    lab.shape(20, host=1)
    assert codes(processes, 180) == [0, 0], lab.output(0, "a0")
    np.testing.assert_allclose(losses(tmp_path / "rows"), undisturbed, rtol=1e-5)


@pytest.mark.nightly
def test_a_host_that_starts_late_is_waited_for(lab, tmp_path, undisturbed):
    first = begun(lab, tmp_path, "a", ranks=[0])
    time.sleep(4)
    assert codes([*first, *begun(lab, tmp_path, "a", ranks=[1])], 120) == [0, 0]
    np.testing.assert_allclose(losses(tmp_path / "rows"), undisturbed, rtol=1e-5)


@pytest.mark.nightly
def test_a_host_that_does_not_start_is_said_to_be_missing(lab, tmp_path):
    (alone,) = begun(lab, tmp_path, "a", ranks=[0])
    assert alone.wait(4 * TIMEOUT_S + 30) != 0
    said = lab.output(0, "a0")
    assert "DEADLINE_EXCEEDED" in said or "did not come" in said or "timed out" in said.lower(), (
        said
    )
