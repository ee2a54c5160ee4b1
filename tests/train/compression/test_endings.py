"""A run that ends at any moment ends with its own exit code, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.processes import ROOT
from tests.support.seeds import some
from tests.train.compression import ending

CODES = {
    "return": {0},
    "raise": {1},
    "SIGTERM": {-signal.SIGTERM, 128 + signal.SIGTERM},
    "SIGINT": {-signal.SIGINT, 128 + signal.SIGINT},
}
CRASHES = "terminate called", "Fatal Python error", "Segmentation fault", "SIGSEGV"
# Python drops a Ctrl-C that comes in a callback of JAX's for the garbage collector: press it again.
IGNORED = "Exception ignored in: <function _xla_gc_callback"
MOST_S = 120  # of a run, on a busy machine
MOMENTS_S = 12  # from its start to its end at most; it compiles its first program meanwhile


def ended(how: str, seconds: float, folder: Path) -> tuple[int, str]:
    """Return exit code and stderr of a run that ends so, some seconds after all is imported.

    If negative, it ends when a program is being compiled in a thread. (While Python imports, Ctrl-C
    ends it with 1, or is lost in an extension's start.)
    """
    sent = how.startswith("SIG")
    folder.mkdir()
    command = [sys.executable, "-m", ending.__name__, folder, "wait" if sent else how, seconds]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with (
        (folder / "stderr").open("w+") as stderr,
        subprocess.Popen(
            list(map(str, command)), env=environment, cwd=ROOT, stdout=subprocess.PIPE,
            stderr=stderr, text=True,
        ) as child,
    ):  # fmt: skip
        try:
            if sent:
                wait_for(child, seconds)
                child.send_signal(signal.Signals[how])
                time.sleep(1)
                if IGNORED in (folder / "stderr").read_text():
                    child.send_signal(signal.Signals[how])
            child.communicate(timeout=MOST_S)
        finally:
            child.kill()
    return child.returncode, (folder / "stderr").read_text()


def wait_for(child: Any, seconds: float) -> None:
    awaited = "started\n" if seconds >= 0 else "compiling\n"
    next(line for line in child.stdout if line == awaited)
    time.sleep(max(seconds, 0))


def check_files(folder: Path) -> None:
    """Check that the log and each checkpoint are complete, and the checkpoint is the log's."""
    log = folder / "log.json"
    losses = json.loads(log.read_text()) if log.exists() else []
    assert np.isfinite(losses).all()
    if not (folder / "checkpoints").exists():
        return
    step, params = ending.new_step()
    shapes = ocp.args.StandardRestore(step.abstract(params))
    manager = ocp.CheckpointManager(folder / "checkpoints")
    for number in manager.all_steps():
        state = manager.restore(number, args=shapes)
        assert int(state.sync.count) == int(state.control.count) == number + 1
        assert number < len(losses)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    manager.close()


def check(how: str, seconds: float, folder: Path) -> int:
    """Check a run's end; return its exit code."""
    code, stderr = ended(how, seconds, folder)
    assert code in CODES[how], (how, seconds, code, stderr)
    assert not [text for text in CRASHES if text in stderr], (how, seconds, stderr)
    assert ("OwnError: its own" in stderr) == (how == "raise"), (how, seconds, stderr)
    check_files(folder)
    return code


@pytest.mark.rotating
@pytest.mark.parametrize("how", some(2, [*CODES]))
def test_a_run_that_ends_while_a_program_compiles_ends_as_it_should(how, tmp_path):
    check(how, -1, tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_a_run_ends_as_it_should_at_any_moment(seed, tmp_path):
    rng = random.Random(seed)
    how, seconds = list(CODES)[seed % 4], rng.uniform(0, MOMENTS_S)
    print(f"{seed:2} {how:8} {seconds:5.2f} s: exit code {check(how, seconds, tmp_path / 'run')}")
