"""A run that ends in any phase ends as it does without the library, and leaves no half of a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxoverlap.start import kept
from tests.start import ending
from tests.support.processes import ROOT
from tests.support.seeds import some

CODES = {
    "return": {0},
    "raise": {1},
    "SIGTERM": {-signal.SIGTERM},
    "SIGINT": {-signal.SIGINT, 128 + signal.SIGINT},
}
CRASHES = "terminate called", "Fatal Python error", "Segmentation fault", "SIGSEGV"
START_S = 120  # to the phase, on a busy machine
END_S = 20  # from the phase to the end: a compilation under way, and no search


def started(folder: Path, phase: str, how: str, stderr: Any = None) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", ending.__name__, str(folder), phase, how]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def test_a_run_that_was_killed_decides_nothing_when_it_is_started_again(tmp_path):
    with started(tmp_path, "decided", "wait") as first:
        assert first.stdout is not None
        assert next(first.stdout).strip() == "decided"
        first.kill()
    with started(tmp_path, "decided", "return") as second:
        assert second.communicate(timeout=START_S)[0].strip() == "decided as before"
    assert second.returncode == 0


@pytest.mark.rotating
@pytest.mark.parametrize("phase", some(2, [*ending.PHASES]))
@pytest.mark.parametrize(
    "how",
    [
        "SIGINT",
        "SIGTERM",
        *(pytest.param(h, marks=pytest.mark.nightly) for h in ("return", "raise")),
    ],
)
def test_a_run_ends_in_any_phase_as_it_should(how, phase, tmp_path):
    errors = tmp_path / "stderr"
    wait = "wait" if how.startswith("SIG") else how
    with errors.open("w") as stderr, started(tmp_path, phase, wait, stderr) as child:
        try:
            assert child.stdout is not None
            began = time.monotonic()
            next((line for line in child.stdout if line.strip() == phase), None)
            reached = time.monotonic()
            assert reached < began + START_S
            if how.startswith("SIG"):
                child.send_signal(signal.Signals[how])
            child.wait(timeout=END_S)
        finally:
            child.kill()
    said = errors.read_text()
    assert child.returncode in CODES[how], (child.returncode, said)
    assert not [text for text in CRASHES if text in said], said
    assert ("OwnError: its own" in said) == (how == "raise"), said
    assert ("KeyboardInterrupt" in said) == (how == "SIGINT"), said
    files = list((tmp_path / "starts").glob("*"))
    assert all(kept.KeptDecision.from_bytes(Path(file).read_bytes()) for file in files)
    assert len(files) == (phase == "decided")
