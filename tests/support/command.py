"""The command, run in this process or in a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from jaxoverlap.cli import app


def run(*arguments: str, code: int = 0) -> str:
    """Run a command, which has to end with this exit code, and return what it prints."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


def run_json(*arguments: str):
    return json.loads(run(*arguments, "--json"))


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
