"""Every command of the page about configure runs as it is printed."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.support.pods import needs_plugin

PAGE = ROOT / "docs" / "configure.md"
COMPILES = "--compile"


def commands():
    """The command lines of the page, in their order."""
    for block in blocks(PAGE):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "sh":
            yield from (line for line in lines if line.strip())
        elif block.language == "console":
            yield from (line[2:] for line in lines if line.startswith("$ "))


def run(line, folder):
    """Run a line in a shell, with this Python behind the names of programs."""
    python = shlex.quote(sys.executable)
    line = line.replace("python -m", f"{python} -m")
    if line.startswith("jaxoverlap "):
        line = f"{python} -m {line}"
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    settings = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        line, shell=True, cwd=folder, env=settings, capture_output=True, text=True, timeout=900
    )


def check(lines, folder):
    assert lines
    for line in lines:
        done = run(line, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.nightly
def test_the_commands_run_as_printed(tmp_path):
    lines = [line for line in commands() if COMPILES not in line]
    assert any("train_long" in line for line in lines)
    check(lines, tmp_path)


@needs_plugin
@pytest.mark.pods
@pytest.mark.nightly
def test_those_that_compile_run_as_printed(tmp_path):
    lines = [line for line in commands() if COMPILES in line or line.startswith("echo")]
    check(lines, tmp_path)
