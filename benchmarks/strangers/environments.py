"""Install published trainers, each into an environment of its own."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.strangers.cases import CASES
from benchmarks.strangers.stranger import Case


def environment(case: Case, jax: str, console: Console) -> str:
    """The Python that has the stranger, in an environment made under out/.

    uv installs: pip's own resolver was still looking after twenty minutes.
    """
    folder = Path("out/environments") / f"{case.module}-jax-{jax}"
    python, stamp = folder / "bin" / "python", folder / "finished"
    if not stamp.exists():  # written last: an install that was cut short starts again
        with console.status(f"installing {case.module} into {folder}"):
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
            uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
            subprocess.run([*uv, f"jax=={jax}", *case.packages], check=True)
            if case.bare:
                subprocess.run([*uv, "--no-deps", *case.bare], check=True)
            stamp.touch()
    return str(python)


def environment_of(name: str, console: Console) -> str:
    """The Python that has what a case of this name needs."""
    return environment(next(case for case in CASES if case.name == name), "0.12.0.1", console)
