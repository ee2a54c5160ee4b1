"""A profile is cut where a program begins again; what it has not whole is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxoverlap.profiling.formats import files, xplane
from jaxoverlap.profiling.formats.events import Device, DeviceEvent, Recording
from jaxoverlap.profiling.kinds import Classifier
from jaxoverlap.profiling.steps import Steps, steps_of
from tests.profiling import synthetic


def _steps(tmp_path: Path, planes, modules=synthetic.MODULES, **more) -> Steps:
    recording = xplane.read(synthetic.write(tmp_path / "a.xplane.pb", planes, modules))
    return steps_of(recording, Classifier(recording.modules, len(recording.devices)), **more)


def test_whole_runs_of_all_devices(tmp_path: Path):
    steps = _steps(tmp_path, synthetic.two_gpus())
    assert (steps.program, steps.incomplete) == ("jit_step", 0)
    window = [((at * 1e3, (at + 112) * 1e3),) * 2 for at in (100, 300, 500)]
    assert list(steps.windows) == window


@pytest.mark.parametrize("modules", [synthetic.MODULES, None], ids=["with HLO", "without"])
@pytest.mark.parametrize(
    "end", [880, 885], ids=["before the loop's last kernel", "after its first"]
)
def test_a_profile_that_begins_and_ends_in_a_run(end, modules, tmp_path: Path):
    whole = synthetic.gpu(*(synthetic.step(at) for at in (0, 200, 400, 600, 800)))
    cut = {line: [e for e in es if 65 < e.start < end] for line, es in whole.items()}
    steps = _steps(tmp_path, {"/device:GPU:0": cut}, modules)
    assert [w for (w,) in steps.windows] == [(a * 1e3, (a + 112) * 1e3) for a in (200, 400, 600)]
    assert steps.incomplete == 2


def test_the_busiest_program_is_the_step_unless_another_is_named(tmp_path: Path):
    lines = synthetic.gpu(synthetic.step(100), synthetic.step(300))
    lines["Stream #14(Compute)"].append(
        synthetic.kernel("fusion", "f", 250, 5, module="jit_metrics")
    )
    planes = {"/device:GPU:0": lines}
    assert _steps(tmp_path, planes).program == "jit_step"
    (window,) = _steps(tmp_path, planes, module="jit_metrics").windows
    assert window == ((250e3, 255e3),)
    with pytest.raises(ValueError, match="no program 'jit_x': it has jit_metrics, jit_step"):
        _steps(tmp_path, planes, module="jit_x")


def test_devices_that_began_at_different_runs_are_matched_by_time(tmp_path: Path):
    planes = synthetic.two_gpus((100, 300, 500, 700))
    late = {line: [e for e in es if e.start >= 300] for line, es in planes["/device:GPU:1"].items()}
    steps = _steps(tmp_path, {**planes, "/device:GPU:1": late})
    assert [[start for start, _ in w] for w in steps.windows] == [
        [at * 1e3] * 2 for at in (300, 500, 700)
    ]


def test_each_process_has_a_number_of_its_own_for_the_program(tmp_path: Path):
    for process, program in enumerate((3, 8)):
        lines = {
            line: [replace(e, stats={**e.stats, "program_id": program}) for e in events]
            for line, events in synthetic.gpu(synthetic.step(100), synthetic.step(300)).items()
        }
        path = tmp_path / f"host{process}" / "a.xplane.pb"
        synthetic.write(path, {"/device:GPU:0": lines}, {("jit_step", program): synthetic.MODULE})
    recording = files.recorded(tmp_path)
    steps = steps_of(recording, Classifier(recording.modules, 2))
    assert [len(step) for step in steps.windows] == [2, 2]


def _unnamed(**more) -> Recording:
    events = tuple(DeviceEvent("Stream #7", "gemm", at, at + 10) for at in (0.0, 20.0, 40.0))
    return Recording("x", "GPU", (Device("GPU 0", "", events),), **more)


def test_without_names_marks_are_steps_or_all_is_one():
    classifier = Classifier({}, 1)
    assert steps_of(_unnamed(), classifier).windows == (((0.0, 50.0),),)
    steps = steps_of(_unnamed(marks=(15.0, 35.0)), classifier)
    assert steps.windows == (((15.0, 35.0),), ((35.0, 50.0),))
