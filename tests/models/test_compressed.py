"""The trainers' --compress: it learns, resumes to the same numbers, and says what is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from models import compressed, gpt, trainer, vit
from models.config import Mistake

SMALL = dict(layers=2, hidden=32, heads=2, mlp=64, warmup=2, learning_rate=1e-2, plain=True)
GPT = gpt.Config(
    sequence=32, batch=8, data=1, model=2, compress="lgreco:powersgd:2", compress_every=4,
    steps=10, save_every=5, **SMALL,
)  # fmt: skip


def losses(run):
    return [row["loss"] for row in run.rows]


@pytest.mark.nightly
def test_a_gpt_learns_and_a_run_that_resumes_sees_the_same_losses(tmp_path):
    whole = trainer.train(gpt.RECIPE, GPT)
    assert losses(whole)[-1] < losses(whole)[0] - 0.5
    kept = dataclasses.replace(GPT, checkpoint=tmp_path / "run")
    trainer.train(gpt.RECIPE, dataclasses.replace(kept, steps=5))
    rest = trainer.train(gpt.RECIPE, dataclasses.replace(kept, steps=8))
    assert losses(rest) == losses(whole)[5:8]


def test_a_vit_learns():
    config = vit.Config(batch=32, data=1, model=2, compress="topk:0.05", steps=24, **SMALL)
    seen = losses(trainer.train(vit.RECIPE, config))
    assert seen[-1] < seen[0]


def test_local_updates_send_compressed_averages():
    config = dataclasses.replace(GPT, local_updates="co2", every=4, compress="powersgd:2", steps=16)
    seen = losses(trainer.train(gpt.RECIPE, config))
    assert seen[-1] < seen[0] - 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("powersgd:0", "rank=0"),
        ("lgreco", "expected .CHOOSER:.COMPRESSOR"),
        ("lgreco:zip:3", "expected .CHOOSER:.COMPRESSOR"),
        ("qsgd:9", "bits=9"),
        ("topk:2", "fraction=2.0"),
        ("none:3", "expected .CHOOSER"),
        ("powersgd:x", "invalid literal"),
    ),
)
def test_flags_that_do_not_fit_are_named(text, says):
    with pytest.raises(Mistake, match=says):
        compressed.sync_of(dataclasses.replace(GPT, compress=text))


@pytest.mark.parametrize(
    ("text", "compressor", "by_error", "switched"),
    (
        ("powersgd:4", "PowerSGD(rank=4", False, False),
        ("lgreco:qsgd:3", "QSGD(bits=3", True, False),
        ("accordion:topk:0.02", "TopK(fraction=0.02", False, True),
        ("lgreco-accordion:powersgd", "PowerSGD(rank=4", True, True),
        ("none", "NoCompression", False, False),
    ),
)
def test_the_flag_names_a_synchronisation(text, compressor, by_error, switched):
    sync = compressed.sync_of(dataclasses.replace(GPT, compress=text))
    assert repr(sync.compressor).startswith(compressor)
    assert (sync.by_error, sync.accordion is not None) == (by_error, switched)
