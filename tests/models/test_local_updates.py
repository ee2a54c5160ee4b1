"""The trainers' --local-updates: it learns, resumes to the same numbers, and says what is wrong."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from models import gpt, local_updates, trainer, vit
from models.config import Mistake

SMALL = dict(layers=1, hidden=32, heads=2, mlp=64, warmup=2, learning_rate=1e-2, plain=True)
GPT = gpt.Config(
    sequence=32, batch=8, data=1, model=2, local_updates="co2", every=4, steps=16, save_every=8,
    **SMALL,
)  # fmt: skip


def train(config, recipe=gpt.RECIPE):
    return trainer.train(recipe, config)


def losses(run):
    return [row["loss"] for row in run.rows]


@pytest.mark.nightly
def test_a_gpt_learns_and_a_run_that_resumes_sees_the_same_losses(tmp_path):
    whole = train(GPT)
    assert [row["step"] for row in whole.rows] == [3, 7, 11, 15]
    assert losses(whole)[-1] < losses(whole)[0] - 0.5
    kept = dataclasses.replace(GPT, checkpoint=tmp_path / "run", metrics=tmp_path / "rows.jsonl")
    train(dataclasses.replace(kept, steps=8))
    rest = train(kept)
    assert losses(rest) == losses(whole)[2:]
    written = [json.loads(line)["step"] for line in kept.metrics.read_text().splitlines()]
    assert written == [3, 7, 11, 15]


def test_a_run_resumes_with_another_number_of_workers(tmp_path):
    kept = dataclasses.replace(GPT, checkpoint=tmp_path / "run")
    train(dataclasses.replace(kept, steps=8))
    rest = train(dataclasses.replace(kept, workers=4))
    assert len(rest.rows) == 2
    np.testing.assert_allclose(losses(rest)[-1], losses(train(GPT))[-1], rtol=0.1)


def test_a_vit_learns():
    config = vit.Config(
        batch=32, data=2, model=2, local_updates="diloco", every=4, steps=24, **SMALL
    )
    seen = losses(train(config, vit.RECIPE))
    assert seen[-1] < seen[0]


@pytest.mark.parametrize(
    ("change", "says"),
    (
        (dict(local_updates="co3"), "expected one of"),
        (dict(every=0), "every=0"),
        (dict(every=1, local_updates="streaming_diloco"), "multiple of fragments"),
        (dict(local_updates="local_sgd", outer_momentum=0.5), "--outer-momentum: local_sgd has no"),
        (dict(local_updates="diloco", staleness=2.0), "--staleness: diloco has no such setting"),
        (dict(fragments=2), "--fragments: co2 has no such setting"),
        (dict(local_updates=None, outer_rate=0.5), "outer_rate without local_updates"),
        (dict(outer_momentum=1.5), "momentum=1.5"),
    ),
)
def test_flags_that_do_not_fit_are_named(change, says):
    with pytest.raises(Mistake, match=says):
        train(dataclasses.replace(GPT, **change))


def test_rounds_are_taken_whole_and_kept_when_a_checkpoint_is_due(tmp_path):
    kept = dataclasses.replace(GPT, checkpoint=tmp_path / "run", steps=6, save_every=3)
    assert len(train(kept).rows) == 2
    assert sorted(p.name for p in kept.checkpoint.iterdir() if p.is_dir()) == ["4", "8"]


def test_a_batch_that_workers_cannot_share_is_named():
    with pytest.raises(Mistake, match="workers x data=3"):
        dataclasses.replace(GPT, workers=3)


def test_flags_reach_the_outer_optimizer():
    changed = dict(
        local_updates="streaming_diloco", fragments=4, outer_momentum=0.5, outer_rate=0.3
    )
    outer = local_updates.outer_of(dataclasses.replace(GPT, every=8, **changed))
    assert (outer.fragments, outer.lag) == (4, 2)
    with_flags = local_updates.outer_of(dataclasses.replace(GPT, staleness=1.0, outer_momentum=0.0))
    assert with_flags.name == "co2"
    params = {"w": np.ones(3, np.float32)}
    state = with_flags.transform.init(params)
    for _ in range(2):  # neither momentum nor a penalty
        moved, state = with_flags.transform.update(
            {"w": np.full(3, 0.25, np.float32)}, state, params
        )
        np.testing.assert_array_equal(moved["w"], -0.25)
