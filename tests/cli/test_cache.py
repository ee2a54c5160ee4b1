"""`jaxoverlap cache` lists, shows and clears what earlier runs decided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxoverlap.cli import app
from jaxoverlap.start import kept
from jaxoverlap.start.kept import KeptDecision
from jaxoverlap.start.record import PLAIN, Ran, Timed, Trials
from tests.start.case import plans


def decision(step: str, taken: str = "two_way") -> KeptDecision:
    return KeptDecision(
        devices="8 x cpu",
        plan=None if taken == PLAIN else plans()[taken],
        trials=Trials(
            step=step,
            candidates=(
                Timed(name=PLAIN, seconds=(0.455, 0.46, 0.45)),
                Timed(name="two_way", seconds=(0.412, 0.41, 0.42), simulated_s=0.4),
                Timed(name="direct", dropped="XLA gives up"),
            ),
            taken=taken,
            since=58,
            trial_steps=12,
            trial_s=5.2,
            ran=(Ran(name=PLAIN, first=0, steps=58), Ran(name="two_way", first=58, steps=1)),
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kept.write(tmp_path / "starts", "aa11", decision("train_step"))
    kept.write(tmp_path / "starts", "ab22", decision("other_step", PLAIN))
    return tmp_path


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_list(folder):
    said = run("list", "--cache", folder)
    assert "412.0 ms two_way, 455.0 ms plain (3 steps each)" in said
    assert "train_step" in said and "other_step" in said and "8 x cpu" in said
    rows = json.loads(run("list", "--cache", folder, "--json"))
    assert {row["key"]: row["trials"]["taken"] for row in rows} == {
        "aa11": "two_way",
        "ab22": PLAIN,
    }


def test_list_without_any_and_with_a_damaged_one(folder, tmp_path):
    assert "has no decisions" in run("list", "--cache", tmp_path / "none")
    (folder / "starts" / "cc33.json").write_text("{")
    assert "damaged: the file is truncated" in run("list", "--cache", folder)
    assert "cc33.json: the file is truncated" in run("show", "cc", "--cache", folder, code=2)


def test_show(folder):
    said = run("show", "aa", "--cache", folder)
    first = "train_step: 412.0 ms two_way, 455.0 ms plain (3 steps each); two_way from step 58 on"
    assert said.startswith(first) and "direct was dropped: XLA gives up" in said
    assert "which ran when" in said and "12 trial steps took 5.2 s." in said
    assert "matmuls become rings" in said
    one = json.loads(run("show", "ab", "--cache", folder, "--json"))
    assert one["plan"] is None and one["trials"]["since"] == 58


def test_a_key_of_none_or_of_several_is_refused(folder):
    assert "2 decisions in" in run("show", "a", "--cache", folder, code=2)
    assert "no decisions in" in run("clear", "x", "--cache", folder, code=2)


def test_clear(folder):
    assert "1 decision removed" in run("clear", "aa11", "--cache", folder)
    assert [key for key, _ in kept.files(folder / "starts")] == ["ab22"]
    assert json.loads(run("clear", "--cache", folder, "--json")) == {"removed": ["ab22"]}
    assert "0 decisions removed" in run("clear", "--cache", folder)


def test_the_environment_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP_CACHE", str(folder))
    assert "train_step" in run("list")
