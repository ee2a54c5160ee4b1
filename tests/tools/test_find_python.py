"""tools/find-python finds an interpreter wherever pyenv keeps it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "find-python"


def script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_the_shims_of_another_home_lead_to_their_versions(tmp_path: Path):
    """pyenv's shims exit with an error where no version is chosen; the versions are beside them."""
    script(tmp_path / "pyenv" / "shims" / "python3", "exit 127")
    script(tmp_path / "pyenv" / "versions" / "x" / "bin" / "python3", f'exec {sys.executable} "$@"')
    home = tmp_path / "home"
    home.mkdir()
    shims = tmp_path / "pyenv" / "shims"
    environment = {"HOME": str(home), "PATH": f"{shims}:/usr/bin:/bin", "UV_OFFLINE": "1"}
    done = subprocess.run(
        ["sh", str(TOOL)], capture_output=True, text=True, env=environment, check=False
    )
    found = Path(done.stdout.strip())
    assert done.returncode == 0 and found.is_file(), done.stderr
    assert "asking uv" not in done.stderr
