"""Run the GPT trainer on hosts of a lab, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lab import Lab

SIZES = (
    *("--layers", "2", "--hidden", "64", "--mlp", "128", "--sequence", "32", "--batch", "8"),
    *("--warmup", "5", "--dtype", "float32"),
)
ALONE = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def start(
    lab: Lab, hosts: int, *options: str, log: str, ranks: Sequence[int] | None = None
) -> list[subprocess.Popen]:
    """Start the trainer on some hosts; what they say goes to files of the lab, LOG and the host."""
    started = []
    for rank in range(hosts) if ranks is None else ranks:
        job = ("--coordinator", "host0:7790", "--processes", str(hosts), "--process", str(rank))
        command = (sys.executable, "-m", "models.train_gpt", *job, *SIZES, *options)
        started.append(lab.spawn(rank, command, environment=ALONE, log=f"{log}{rank}"))
    return started


def codes(processes: Sequence[subprocess.Popen], within_s: float) -> list[int]:
    """Wait for processes to end, and return their exit codes; fails if one takes too long."""
    end = time.monotonic() + within_s
    return [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]


def losses(path: Path) -> list[float]:
    """Return the losses that a run has written, in the order of steps."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def until(happened: Callable[[], bool], within_s: float) -> None:
    """Wait until something has happened."""
    end = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < end, f"it did not happen within {within_s:g} s"
        time.sleep(0.05)
