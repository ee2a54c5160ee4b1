"""The best configurations of a model, compiled for the pod; the file that trainers follow."""

import dataclasses
import json

import jax
import pytest
from typer.testing import CliRunner

from jaxoverlap.cli.app import app
from jaxoverlap.parallelism.configuration import read_chosen
from models import gpt
from models.configured import build, chosen
from tests.support.pods import pytestmark  # noqa: F401 - it marks the tests of this file

MODEL = {
    "name": "small", "layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 4, "mlp": 4096,
    "sequence": 1024, "vocab": 1000, "gated": True, "biases": False, "tied": False,
}  # fmt: skip
POD = ["--pod", "h100-sxm:1x4", "--global-batch", "8"]


def run(tmp_path, *options):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return CliRunner().invoke(app, ["configure", str(path), *POD, *options])


def broken(model, configuration, order, global_batch, pod):
    """A trainer that cannot split over the tensor axis, and dies of one mesh."""
    if configuration.model == 2:
        raise KeyError("no such key")
    return build(model, configuration, order, global_batch, pod)


@pytest.mark.nightly
def test_the_answer_is_the_fastest_by_simulation(tmp_path):
    said = run(tmp_path, "--compile", "2", "--axes", "pipeline=1,context=1", "--json")
    assert said.exit_code == 0, said.output
    data = json.loads(said.stdout)["configurations"]
    times = [one["simulated_s"] for one in data[:2]]
    assert times == sorted(times)
    assert all(one["simulated_bytes"] > 0 and not one["failed"] for one in data[:2])
    assert "simulated_s" in data[2]
    assert "compiling 1 of 2" in said.stderr
    path = tmp_path / "configuration.json"
    path.write_text(said.stdout)
    found = read_chosen(path)
    assert found.global_batch == 8
    sizes = dict(layers=2, hidden=1024, heads=8, mlp=4096, sequence=1024, vocab=1000, batch=8)
    trained = dataclasses.replace(gpt.Config(data=1, model=1), **sizes, configuration=path)
    _, config = chosen(gpt.RECIPE, trained)
    assert config.split == found.configuration
    assert config.order == found.order


def test_one_that_fails_is_a_row(tmp_path):
    said = run(tmp_path, "--compile", "1", "--trainer", f"{__name__}:broken", "--axes", "model=2")
    assert said.exit_code == 0, said.output
    assert "KeyError: 'no such key'" in said.stdout


def test_what_cannot_be_compiled_is_refused(tmp_path):
    said = run(tmp_path, "--compile", "1", "--stack", "megatron")
    assert said.exit_code == 2
    assert "only JAX steps" in said.stderr
    said = run(tmp_path, "--trainer", "models.configured:build_it")
    assert said.exit_code == 2
    assert "give --compile 3" in said.stderr
    said = run(tmp_path, "--compile", "1", "--trainer", "no.such.module:build")
    assert said.exit_code == 2
    assert "no module" in said.stderr


def test_stacks_are_asked_for_by_name(tmp_path):
    assert "Megatron-LM" in run(tmp_path, "--stack", "megatron").stdout
    assert "; JAX" in run(tmp_path).stdout


@pytest.mark.parametrize(
    "axes",
    [dict(pipeline=2, data=2), dict(pipeline=2, fsdp=2), dict(data=4), dict(context=2, data=2)],
    ids=str,
)
def test_trainers_steps_lower_for_a_pod(axes):
    """In micro-batches and stages attention is cuDNN's on each device; split by context, einsums."""
    from jaxoverlap.parallelism.configuration import Configuration
    from jaxoverlap.parallelism.model import Transformer

    split = Configuration(**axes, zero_stage=1)
    step, args = build(Transformer(**MODEL), split, tuple(split.axes), 8, "h100-sxm:1x4")
    text = step.lower(*args).as_text()
    assert ("cudnn" in text or "fmha" in text) == (split.context == 1)
    assert jax.tree.leaves(args)[0].sharding.mesh.size == 4
