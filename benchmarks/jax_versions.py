"""Find or make a Python environment with another version of jax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
from rich.console import Console

PACKAGES = ("flax", "msgspec", "optax", "rich", "typer")  # besides jax

console = Console()


def environment(version: str) -> str:
    """The Python that has this jax: this one, or one in an environment made under out/."""
    if version == jax.__version__:
        return sys.executable
    folder = Path("out/environments") / f"jax-{version}"
    python = folder / "bin" / "python"
    stamp = folder / "finished"  # written last: an install that was cut short starts again
    if not stamp.exists():
        with console.status(f"installing jax {version} into {folder}"):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            jax_itself = f"jax[cuda12-local]=={version}"
            install = [python, "-m", "pip", "install", "--quiet", jax_itself, *PACKAGES]
            subprocess.run(install, check=True)
            stamp.touch()
    return str(python)
