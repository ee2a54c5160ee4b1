"""Files of several processes are one profile on the hosts' clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxoverlap.profiling.formats import files
from tests.profiling import synthetic


def test_processes_join_on_the_hosts_clock(tmp_path: Path):
    one = {"/device:GPU:0": synthetic.gpu(synthetic.step(100))}
    for host, start_ns in ((10, synthetic.START_NS + 40_000), (2, synthetic.START_NS)):
        path = tmp_path / f"host{host}" / "a.xplane.pb"
        synthetic.write(path, one, synthetic.MODULES, start_ns=start_ns)
    recording = files.recorded(tmp_path)
    assert [d.name for d in recording.devices] == ["process 0 GPU 0", "process 1 GPU 0"]
    assert [d.events[0].start_ns for d in recording.devices] == [100e3, 140e3]  # host2, host10
    assert recording.start_ns == synthetic.START_NS
    assert len(recording.modules) == 2  # a process's numbers are its own
    assert {(e.module, e.program) for d in recording.devices for e in d.events} == set(
        recording.modules
    )


def test_a_folder_with_profiles_of_different_times_is_refused(tmp_path: Path):
    one = {"/device:GPU:0": synthetic.gpu(synthetic.step(100))}
    for run, later in (("monday", 0), ("tuesday", 10**9)):
        synthetic.write(tmp_path / run / "a.xplane.pb", one, start_ns=synthetic.START_NS + later)
    with pytest.raises(ValueError, match=r"different times[\s\S]*monday[\s\S]*tuesday"):
        files.recorded(tmp_path)
    assert files.recorded(tmp_path / "monday").devices


def test_a_process_without_a_clock_is_refused(tmp_path: Path):
    one = {"/device:GPU:0": synthetic.gpu(synthetic.step(100))}
    synthetic.write(tmp_path / "a.xplane.pb", one)
    synthetic.write(tmp_path / "b.xplane.pb", one, start_ns=None)
    with pytest.raises(ValueError, match=r"b\.xplane\.pb does not say when it began"):
        files.recorded(tmp_path)


def test_a_path_without_a_profile_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no such file or folder"):
        files.recorded(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no \*\.xplane\.pb"):
        files.recorded(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"expected a file \*\.xplane\.pb"):
        files.recorded(tmp_path / "a.txt")
