"""The built wheel works where there is no checkout: its modules, its data, its children."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.pods import needs_plugin

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.nightly  # builds by a setuptools that pip fetches
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_FLAGS"))}
POD = ("--pod", "h100-sxm:1x4", "--mesh", "tp=4")
STEP = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def build(mesh):
    def shape(*spec):
        return jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    out = NamedSharding(mesh, P(None, "tp"))
    return jax.jit(lambda x, w: x @ w, out_shardings=out), (shape("tp"), shape(None, "tp"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")  # setuptools writes into it
    for name in ("jaxoverlap", "passes"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", str(folder)], check=True, capture_output=True
    )
    (built,) = folder.glob("dist/*.whl")
    return built


@pytest.fixture(scope="module")
def bin_of(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel, and what it depends on, of which nothing is this package."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, env=ENVIRONMENT)
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file are searched, and .pth files there are not read: no editable install.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def said(program: Path, *arguments: str, cwd: Path) -> str:
    environment = ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run(
        [str(program), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_the_data_and_the_extras(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    for top in ("jaxoverlap", "passes"):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".md":
                inside = file.relative_to(ROOT).as_posix()
                assert (inside if top == "jaxoverlap" else f"jaxoverlap/{inside}") in names
    assert "Provides-Extra: pods" in metadata and 'extra == "pods"' in metadata


@needs_plugin
def test_it_explains_and_simulates_without_the_checkout(bin_of: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text(STEP)
    where = "import jaxoverlap.passes.apply as a; print(a.__file__)"
    assert said(bin_of / "python", "-c", where, cwd=tmp_path).startswith(str(bin_of.parent))
    command = bin_of / "jaxoverlap"
    assert "jaxoverlap explain" in said(command, "new-target", "other.py", cwd=tmp_path)
    plan = json.loads(said(command, "explain", "mine.py", *POD, "--json", cwd=tmp_path))
    assert plan["price"]["plain_s"] > 0
    step = said(command, "simulate", "mine.py", *POD, "--html", "a.html", "--json", cwd=tmp_path)
    assert json.loads(step)["overlapped"]["speedup"]["plain_s"] > 0  # by a child
    assert "<html" in (tmp_path / "a.html").read_text()
    assert "NCCL" in said(command, "flags", "gcp-a3-mega", "--as", "env", cwd=tmp_path)
