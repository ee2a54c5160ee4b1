"""Scenarios in several processes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    processes: int,
    folder: Path,
    *scenarios: str,
    module: str = "tests.support.many_processes",
    most_s: float = 60,
) -> list[tuple[int, dict[str, dict], str]]:
    """Run scenarios in children; return each one's exit code, rows by scenario, and stderr."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", module),
                *(str(rank), str(processes), str(port), str(folder), *scenarios),
            ],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    began, outcomes = time.monotonic(), []
    try:
        for child in children:
            out, err = child.communicate(timeout=most_s - (time.monotonic() - began))
            lines = [line for line in out.splitlines() if line.startswith("{")]  # gloo talks too
            rows = {row["scenario"]: row for row in map(json.loads, lines)}
            outcomes.append((child.returncode, rows, err))
    finally:
        for child in children:
            child.kill()
            child.wait()
    print(f"{processes} processes: {time.monotonic() - began:.1f} s", {
        name: round(row["seconds"], 1) for name, row in outcomes[0][1].items()
    })  # fmt: skip
    return outcomes
