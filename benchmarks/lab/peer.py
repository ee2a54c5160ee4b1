"""Find PyTorch for the race: a virtual environment of its own, made once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PYTHON, VERSION = "python3.11", "2.13.0"  # the index has a CPU wheel of this for this


def torch_python(folder: Path) -> tuple[str, str]:
    """Return the interpreter of an environment that has PyTorch; or "" and the reason why not.

    Args:
        folder: where the environment is, or is to be made (about 1 GB).
    """
    python = folder / "bin" / "python"
    if not _has_torch(python):
        found = shutil.which(PYTHON)
        if found is None:
            return "", f"no {PYTHON}, for which the index has PyTorch's CPU wheel"
        for command in (
            [found, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", f"torch=={VERSION}", "numpy"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return "", f"`{' '.join(command[1:])}` failed: {last}"
    return str(python), ""


def _has_torch(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-c", "import torch"], capture_output=True).returncode == 0
