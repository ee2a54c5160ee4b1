"""The files around the code: the lock, CI, hooks, the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["examples"], *extras["dev"]]
    names = {re.split(r"[\[><=; ]", line)[0].lower().replace("_", "-") for line in lines}
    return names - {"jaxoverlap"}


def test_the_lock_has_all_that_is_needed():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines)
    assert needed() <= {name.lower().replace("_", "-") for name in locked}


def test_ci_runs_both_pythons_with_the_oldest_and_the_newest_jax():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    versions = {"python": ["3.12", "3.13"], "jax": ["oldest", "newest"]}
    assert job["strategy"]["matrix"] == {**versions, "shard": ["1/2", "2/2"]}
    assert ".ci/run ${{ matrix.jax }} ${{ matrix.shard }}" in [
        step.get("run") for step in job["steps"]
    ]
    done = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, check=False)
    assert done.returncode == 2 and b"usage" in done.stderr


def test_hooks_name_tools_that_are_installed():
    yaml = pytest.importorskip("yaml")
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {hook["entry"].split()[0] for hook in repo["hooks"]}
    assert tools == {".venv/bin/ruff", ".venv/bin/lint-imports", ".venv/bin/pytest"}


def test_contributing_is_a_screen_with_what_one_looks_for():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 60
    for heading in ("Proof of value", "When jax moves", "Debugging"):
        assert f"\n## {heading}\n" in text
