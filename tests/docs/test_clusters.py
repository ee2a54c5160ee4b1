"""The files of docs/clusters do what they say: their lines run as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models import trainer
from models.gpt import RECIPE
from models.trainer import command_line

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "docs" / "clusters"


def words(file: str) -> list[str]:
    """Return the command line of a file, from python on."""
    text = (CLUSTERS / file).read_text().replace("\\\n", " ")
    if file.endswith(".yaml"):
        text = re.search(r">-\n(.*?)\n\s+resources:", text, re.DOTALL)[1]  # type: ignore[index]
        text = " ".join(text.split()).removeprefix("exec ").replace("$JOB_COMPLETION_INDEX", "3")
    else:
        text = re.search(r"srun \S+\s+(python .*)", text)[1]  # type: ignore[index]
    return shlex.split(text)


@pytest.mark.parametrize("file", ["train.sbatch", "train.yaml"])
def test_the_lines_are_taken_as_they_are_written(file: str, monkeypatch: pytest.MonkeyPatch):
    """All but the training: options exist, and sizes go with the mesh and the number of hosts."""
    given = []
    monkeypatch.setattr(trainer, "main", lambda recipe, config: given.append(config))
    python, dash_m, module, *options = words(file)
    assert (python, dash_m, module) == ("python", "-m", "models.train_gpt")
    done = CliRunner().invoke(command_line(RECIPE, "trains"), options)
    assert done.exit_code == 0, done.output
    (config,) = given
    text = (CLUSTERS / file).read_text()
    hosts = re.search(r"(?:--nodes=|completions: )(\d+)", text)
    gpus = re.search(r"(?:--gpus-per-node=|nvidia.com/gpu: )(\d+)", text)
    assert hosts and gpus and config.devices == int(hosts[1]) * int(gpus[1])
    assert not list(config.mistakes())


def sbatch(file: str, folder: Path, devices: int, *more: str) -> str:
    """Run an sbatch file with bash, as SLURM runs it on one host: srun starts one process."""
    srun = folder / "srun"
    srun.write_text(f'#!/bin/sh\nshift\nshift\nexec "{sys.executable}" "$@" {shlex.join(more)}\n')
    srun.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1"}
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | slurm | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(CLUSTERS / file)],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_own_script_trains_by_its_sbatch_file(tmp_path: Path):
    out = sbatch("own.sbatch", tmp_path, 8)
    losses = [float(value) for value in re.findall(r"step \d loss (\S+)", out)]
    assert len(losses) == 5 and all(0 < loss < 2 for loss in losses)


@pytest.mark.nightly
def test_the_trainers_sbatch_file_trains_on_64_devices(tmp_path: Path):
    more = ("--steps", "1", "--checkpoint", str(tmp_path / "c"), "--metrics", str(tmp_path / "m"))
    sbatch("train.sbatch", tmp_path, 64, *more)
    assert len((tmp_path / "m").read_text().splitlines()) == 1
