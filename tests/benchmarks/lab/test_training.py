"""The GPT trains on hosts of a lab as in one process, by the commands that docs/clusters has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lab import Lab, Network, why_not
from tests.benchmarks.lab.training import ALONE, SIZES, codes, losses, start

NO_LAB = why_not()
pytestmark = pytest.mark.skipif(bool(NO_LAB), reason=f"no lab: {NO_LAB}")
ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "docs" / "clusters"
STEPS = ("--steps", "50")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> list[float]:
    """Return the losses of the plain run in one process."""
    path = tmp_path_factory.mktemp("one") / "metrics.jsonl"
    command = [sys.executable, "-m", "models.train_gpt", "--plain", "--data", "2", "--model", "2"]
    command += [*SIZES, *STEPS, "--metrics", str(path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **ALONE}, check=True, capture_output=True)
    return losses(path)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["plain", "overlapped"])
def test_four_hosts_train_as_one_process_does_and_two_go_on(one_process, tmp_path, how):
    options = [*(["--plain"] if how == "plain" else []), "--save-every", "20"]
    options += ["--checkpoint", str(tmp_path / "states"), "--metrics", str(tmp_path / "rows")]
    four, two = ("--data", "2", "--model", "2"), ("--data", "2", "--model", "1")
    with Lab(Network(hosts=4, rate_mbit=1000)) as lab:
        assert codes(start(lab, 4, *options, *four, "--steps", "30", log="a"), 120) == [0] * 4
        assert len(losses(tmp_path / "rows")) == 30
        assert codes(start(lab, 2, *options, *two, *STEPS, log="b"), 120) == [0] * 2
        assert "resuming after step 30 of 50" in (lab.folder / "b0").read_text()
        for quiet in ("a1", "a2", "a3", "b1"):
            said = lab.output(0, quiet).splitlines()
            assert all(line.startswith("[Gloo]") or not line for line in said), said
    np.testing.assert_allclose(losses(tmp_path / "rows"), one_process, rtol=1e-5)


def command_of(file: str) -> list[str]:
    """Return the arguments that a file of docs/clusters starts the trainer with."""
    text = re.sub(r"\\\n\s*", " ", (CLUSTERS / file).read_text())
    text = re.sub(r"(models\.train_gpt[^\n]*)\n\s+(?=--)", r"\1 ", text)
    while (joined := re.sub(r"(models\.train_gpt[^\n]*)\n\s+(?=--)", r"\1 ", text)) != text:
        text = joined
    found = re.search(r"python -m models\.train_gpt([^\n]*)", text)
    assert found
    return shlex.split(found[1])


@pytest.mark.nightly  # test_clusters.py has the commands' options; this is what they do
@pytest.mark.parametrize("file", ["train.sbatch", "train.yaml"])
def test_the_commands_of_the_files_train(file, one_process, tmp_path):
    """On two hosts, with the variables that SLURM or Kubernetes would set; steps and mesh smaller."""
    asked = command_of(file)
    with Lab(Network(hosts=2, rate_mbit=1000)) as lab:
        processes = []
        for rank in range(2):
            slurm = {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
            slurm |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NODELIST": "host[0-1]"}
            slurm |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NUM_NODES": "2"}
            said = {"JOB_COMPLETION_INDEX": str(rank)} if file == "train.yaml" else slurm
            arguments = [said.get(word.lstrip("$"), word) for word in asked]
            ours = [
                "--data",
                "2",
                "--model",
                "1",
                "--heads",
                "4",
                "--steps",
                "3",
                "--plain",
                *SIZES,
            ]
            ours += ["--checkpoint", str(tmp_path / "states"), "--metrics", str(tmp_path / "rows")]
            if file == "train.yaml":
                ours += ["--coordinator", "host0:7733", "--processes", "2"]
            command = (sys.executable, "-m", "models.train_gpt", *arguments, *ours)
            environment = {**ALONE, **said}
            processes.append(lab.spawn(rank, command, environment=environment))
        ended = codes(processes, 60)
        assert ended == [0, 0], lab.output(0) + lab.output(1)
    np.testing.assert_allclose(losses(tmp_path / "rows"), one_process[:3], rtol=1e-5)
