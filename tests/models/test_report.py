"""A run's report: a row for each step, and which of them ran a candidate for the clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax

from models.gpt import RECIPE
from models.loop import trial_steps
from models.report import Report


def test_steps_that_were_trials_say_so(tmp_path: Path, capsys):
    path = tmp_path / "metrics.jsonl"
    config = RECIPE.config(steps=3, metrics=path, log_every=1)
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with Report(RECIPE, config, mesh, 0) as report:
        for index in range(3):
            report.add(index, {"loss": 1.0}, trial=index == 1)
    assert ["trial" in row for row in report.rows] == [False, True, False]
    assert [json.loads(line) for line in path.read_text().splitlines()] == report.rows
    shown = capsys.readouterr().out.splitlines()
    assert [line.endswith("trial step") for line in shown] == [False, True, False]


def test_trial_steps_are_those_of_all_signatures():
    assert trial_steps(lambda state: state) == 0
    records = (SimpleNamespace(trial_steps=2), SimpleNamespace(trial_steps=3))
    assert trial_steps(SimpleNamespace(trials=records)) == 5
