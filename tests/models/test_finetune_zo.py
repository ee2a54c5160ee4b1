"""The trainer of zeroth-order fine-tuning: it resumes from its log, and says what is wrong."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo
from models import finetune_zo, trainer, tuned_weights, zo_blocks
from models.config import Config, Mistake
from models.finetune_zo import FineTune
from models.gpt import RECIPE
from tests.support.seeds import some


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt") / "run"
    config = Config(
        layers=1, hidden=32, heads=2, mlp=64, sequence=32, batch=8, data=1, model=1, steps=4,
        save_every=4, warmup=2, checkpoint=path, plain=True,
    )  # fmt: skip
    trainer.train(RECIPE, config)
    return path


@pytest.mark.rotating
@pytest.mark.parametrize("method", some(1, ["full", "lora", "prefix"]))
def test_a_run_that_was_cut_short_resumes_to_the_same_bits(checkpoint, tmp_path, method):
    of = FineTune(checkpoint, method, steps=4, batch=4, log=tmp_path / "whole")
    _, whole, task = finetune_zo.finetune(of)
    killed = dataclasses.replace(of, log=tmp_path / "log")
    finetune_zo.finetune(dataclasses.replace(killed, steps=2))
    losses, resumed, _ = finetune_zo.finetune(killed)
    assert len(losses) == 2
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert (tmp_path / "log").read_bytes() == (tmp_path / "whole").read_bytes()
    assert np.isfinite(finetune_zo.evaluate(of, whole, task, batches=1))


@pytest.mark.rotating
@pytest.mark.parametrize("method", some(1, ["full", "lora", "prefix"]))
def test_the_tuned_weights_are_written_and_have_the_tuned_loss(checkpoint, tmp_path, method):
    of = FineTune(
        checkpoint, method, steps=2, batch=4, learning_rate=1e-2, weights=tmp_path / "weights"
    )
    _, trained, task = finetune_zo.finetune(of)
    params = finetune_zo.whole_params(of, trained, task)
    tuned_weights.write(of.weights, params, finetune_zo.tuned_by(of))
    with pytest.raises(Mistake, match="exists; give the name of a new"):
        dataclasses.replace(of, batch=8)
    found = tuned_weights.read(of.weights, params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    config, mesh = finetune_zo.configuration(of), of.mesh()
    batch = RECIPE.batches(config)(0)
    recipe = RECIPE if method != "prefix" else finetune_zo.PREFIX_RECIPE
    loss = finetune_zo.loss_of(recipe, config, mesh)
    whole = jax.jit(loss)(found, batch)
    np.testing.assert_allclose(whole, jax.jit(task.loss)(trained, batch, task.frozen), rtol=1e-6)


def test_all_meshes_take_one_trajectory(checkpoint):
    of = FineTune(checkpoint, steps=2, batch=4)
    alone, *_ = finetune_zo.finetune(of)
    spread, *_ = finetune_zo.finetune(dataclasses.replace(of, pair=True, shards=2, model=2))
    np.testing.assert_allclose(spread, alone, rtol=2e-6)


def test_streamed_layers_learn_what_blocks_on_the_device_do_and_resume(checkpoint, tmp_path):
    of = FineTune(checkpoint, steps=3, batch=4, host=True, log=tmp_path / "log")
    finetune_zo.finetune(dataclasses.replace(of, steps=2))
    losses, trained, task = finetune_zo.finetune(of)
    assert len(losses) == 1
    for leaf in jax.tree.leaves(trained["blocks"]):
        assert leaf.sharding.memory_kind == "pinned_host"
    config, mesh = finetune_zo.configuration(of), of.mesh()
    start = finetune_zo.restored(of, config, mesh)
    resident = zo.step(task.loss, of.transform(), mesh)  # the same blocks, all on the device
    state = resident.init(zo_blocks.in_blocks(start), seed=of.seed)
    text = finetune_zo.load_text(of.text, sequence=config.sequence)
    text = text[: -finetune_zo.held_out(of, config)]
    for number in range(of.steps):
        state, metrics = resident(state, finetune_zo.make_batch(text, config, number))
    np.testing.assert_allclose(losses[-1], metrics["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), trained, state.params
    )
    whole = jax.device_get(finetune_zo.whole_params(of, trained, task))
    assert jax.tree.structure(whole) == jax.tree.structure(start)
    batch = RECIPE.batches(config)(0)
    loss = jax.jit(finetune_zo.loss_of(RECIPE, config, mesh))
    on_device = task.loss(jax.device_get(trained), batch)
    np.testing.assert_allclose(loss(whole, batch), on_device, rtol=1e-6)
    assert np.isfinite(finetune_zo.evaluate(of, trained, task, batches=1))


def test_mistakes_are_named(checkpoint, tmp_path):
    with pytest.raises(Mistake, match="expected full and 1"):
        FineTune(checkpoint, "lora", host=True)
    with pytest.raises(Mistake, match="expected one of full, lora, prefix"):
        FineTune(checkpoint, "adapter")
    with pytest.raises(Mistake, match="expected a multiple of shards=3"):
        FineTune(checkpoint, shards=3)
    with pytest.raises(Mistake, match=r"no checkpoint of models\.train_gpt"):
        finetune_zo.finetune(FineTune(tmp_path))
    with pytest.raises(Mistake, match="take 16 devices"):
        finetune_zo.finetune(FineTune(checkpoint, pair=True, model=8))
    log = tmp_path / "log"
    finetune_zo.finetune(FineTune(checkpoint, steps=1, batch=4, log=log))
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    for other in (
        dict(seed=1), dict(eps=2e-3), dict(learning_rate=1e-5), dict(batch=8), dict(text=text),
        dict(directions=2), dict(method="lora"),
    ):  # fmt: skip
        changed = dict(steps=2, batch=4, log=log) | other
        with pytest.raises(ValueError, match="log of another run"):
            finetune_zo.finetune(FineTune(checkpoint, **changed))
    with pytest.raises(Mistake, match=r"batch=0: .*; and seed=-1: .*; and eps=0\.0"):
        FineTune(checkpoint, eps=0.0, batch=0, seed=-1)
    with pytest.raises(Mistake, match=r"lr=nan"):
        FineTune(checkpoint, learning_rate=float("nan"))
    with pytest.raises(Mistake, match=r"is a directory.* give a file"):
        FineTune(checkpoint, log=tmp_path)
    body = bytearray(log.read_bytes())
    body[-3] ^= 1
    log.write_bytes(body)
    with pytest.raises(zo.LogDamagedError, match="--cut-log"):
        finetune_zo.finetune(FineTune(checkpoint, steps=2, batch=4, log=log))
    losses, *_ = finetune_zo.finetune(FineTune(checkpoint, steps=2, batch=4, log=log, cut_log=True))
    assert len(losses) == 2
