"""Workers in processes of their own: one dies in mid-round, and the run goes on from before it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROCESSES, ROUNDS = 3, 4
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.nightly  # JAX's processes start slowly, and the dead one is waited for


def run(folder: Path, dies_at: int = -1) -> list[tuple[int, list[dict[str, Any]], str]]:
    """Return of each process its exit code, its rounds and what it wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "tests.train.local_updates.dying")
    started = [
        subprocess.Popen(
            [
                *command,
                str(rank),
                str(PROCESSES),
                str(port),
                str(folder),
                str(ROUNDS),
                str(dies_at),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(PROCESSES)
    ]
    found = []
    for process in started:
        out, error = process.communicate(timeout=120)
        # Gloo writes to stdout too.
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        found.append((process.returncode, rows, error))
    return found


def test_a_worker_that_dies_ends_the_others_and_the_run_resumes_to_the_same_losses(tmp_path):
    whole = run(tmp_path / "whole")
    assert [code for code, *_ in whole] == [0] * PROCESSES
    began = time.monotonic()
    broken = run(tmp_path / "broken", dies_at=2)
    seconds = time.monotonic() - began
    assert broken[-1][0] == 9
    for code, rows, error in broken[:-1]:
        assert code not in (0, None) and [r["round"] for r in rows][:2] == [0, 1]
        # JAX's coordinator and `jaxoverlap.lost_named` word it differently.
        named = ("task:2", "task_id: 2", "Task 2", "process 2")
        assert any(name in error for name in named), error[-2000:]
    assert seconds < 60
    resumed = run(tmp_path / "broken")
    assert [code for code, *_ in resumed] == [0] * PROCESSES
    for (_, rows, _), (_, before, _) in zip(resumed, whole, strict=True):
        assert rows == before[2:]
