"""The library makes of a fixed set of steps what it made before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.golden.__main__ import differences
from tests.support.pods import needs_plugin
from tests.support.processes import ROOT


def test_a_difference_names_the_fact():
    then, now = {"module": "a", "rings": 3, "pins": 1}, {"module": "b", "rings": 3, "parts": 2}
    assert differences(then, now) == ["module: a, now b", "pins: 1, now None", "parts: None, now 2"]
    assert differences(then, then) == []


@pytest.mark.nightly
@needs_plugin
def test_seventy_one_steps_are_as_before():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden"],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
