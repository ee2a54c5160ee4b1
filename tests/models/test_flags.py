"""Flags that do not go together are refused before anything is compiled."""

import math
from pathlib import Path

import pytest
import typer.testing

from models import configured, gpt, long_context, train_gpt
from models.config import Mistake


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    (
        (gpt.Config, dict(compress="qsgd:4", plan=Path("plan.json")), "--plan"),
        (gpt.Config, dict(local_updates="co2", halves=2), "--halves"),
        (long_context.Config, dict(varlen=True, compress="none"), "leave out one"),
        (long_context.Config, dict(varlen=True, longest=0), "longest=0: .* 1 or more"),
        (gpt.Config, dict(batch=0), "batch=0: .* 1 or more"),
        (gpt.Config, dict(seed=-1), "seed=-1: .* 0 or more"),
        (gpt.Config, dict(warmup=-1), "warmup=-1: .* 0 or more"),
        (gpt.Config, dict(heads=0), "heads=0"),
        (gpt.Config, dict(halves=0), "halves=0"),
        (gpt.Config, dict(profile=-1), "profile=-1"),
        (gpt.Config, dict(learning_rate=math.nan), "learning_rate=nan: expected a finite number"),
        (gpt.Config, dict(learning_rate=-1.0), "learning_rate=-1.0"),
        (gpt.Config, dict(weight_decay=math.inf), "weight_decay=inf"),
        (gpt.Config, dict(dtype="float31"), "dtype='float31': expected one of float32"),
        (gpt.Config, dict(plan=Path("missing.json")), "--plan missing.json: no such file"),
        (gpt.Config, dict(metrics=Path()), "--metrics . is a directory"),
        (gpt.Config, dict(coordinator="a:1", processes=2, process=2), "process=2: expected less"),
        (long_context.Config, dict(varlen=True, plan=Path("missing.json")), "no such file"),
        (long_context.Config, dict(prices="nonsense"), "--prices nonsense"),
        (gpt.Config, dict(batch=0, seed=-1, learning_rate=math.inf), "seed.*; and batch.*; and "),
    ),
)
def test_flags_that_would_be_ignored_are_refused(config, flags, words):
    with pytest.raises(Mistake, match=words):
        config(**flags)


def test_a_configured_mesh_has_no_workers():
    run = gpt.Config(compress="qsgd:4", configuration=Path("configured.json"))
    with pytest.raises(Mistake, match="no axis of workers"):
        configured.chosen(gpt.RECIPE, run)


@pytest.mark.parametrize(
    "flags",
    (
        "--batch 0", "--seed -1", "--learning-rate nan", "--warmup -1", "--plan missing.json",
        "--local-updates co3 --compress zip", "--compress qsgd:99", "--halves 0",
    ),
)  # fmt: skip
def test_the_command_names_the_mistake_and_shows_no_traceback(flags):
    done = typer.testing.CliRunner().invoke(
        train_gpt.app, flags.split(), env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    for name in flags.split()[::2]:
        assert name.lstrip("-").replace("-", "_") in done.output.replace("-", "_"), done.output
