"""Every legal mesh of eight trains the GPT and the mixture to the losses of one device."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxoverlap
from jaxoverlap.parallelism.configuration import AXES, Configuration
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.search import Space, splits
from jaxoverlap.parallelism.stack import JAX
from models import gpt, moe
from models.config import Mistake
from models.configured import chosen, configured

GPT = gpt.Config(layers=4, hidden=32, heads=4, mlp=64, batch=16, sequence=32)
MOE = moe.Config(layers=4, hidden=32, heads=4, mlp=64, batch=16, sequence=32, group=32, experts=4)
STEPS = 3


def transformer(run):
    experts = getattr(run, "experts", 0)
    return Transformer(
        name="tiny", layers=run.layers, hidden=run.hidden, heads=run.heads, mlp=run.mlp,
        sequence=run.sequence, vocab=run.vocab, experts=experts, choices=2 if experts else 0,
        biases=False,
    )  # fmt: skip


def legal(run):
    """Every mesh of eight that is legal, with the largest micro-batch of two or more of them."""
    eight = jaxoverlap.parse_cluster("h100-sxm:1x8")
    found = {}
    for of in splits(transformer(run), eight, run.batch, Space(axes={}), JAX):
        many = of.pipeline == 1 or of.micro_batches(run.batch) >= 2
        if many and of.interleave <= 2:
            found[tuple(of.axes.values()), of.interleave] = of
    return list(found.values())


def losses(run, split, *, overlap=False):
    recipe, config = configured(run, split)
    mesh = recipe.make_mesh(config)
    step = recipe.make_step(config, mesh)
    step = jaxoverlap.overlap(step) if overlap else step
    state, batch_of = recipe.init_state(config, mesh, 0), recipe.batches(config)
    found = []
    for index in range(STEPS):
        state, metrics = step(state, batch_of(index))
        found.append(float(metrics["loss"]))
    return np.array(found)


def named(value):
    """A run's or a configuration's name among the tests'."""
    return type(value).__module__ if isinstance(value, gpt.Config | moe.Config) else str(value)


SOME = [
    (GPT, dict(data=2, fsdp=2, model=2, micro_batch=4)),
    (GPT, dict(pipeline=2, fsdp=2, model=2, micro_batch=2)),
    (GPT, dict(pipeline=2, data=2, context=2, micro_batch=2, interleave=2)),
    (MOE, dict(pipeline=2, data=2, expert=2, micro_batch=2)),
    (MOE, dict(fsdp=2, expert=2, model=2, micro_batch=4)),
]


@pytest.fixture(scope="module")
def alone():
    """The losses of one device, by run."""
    return {run: losses(run, Configuration(micro_batch=run.batch)) for run in (GPT, MOE)}


@pytest.mark.parametrize(("run", "axes"), SOME, ids=named)
def test_some_meshes_train_to_the_losses_of_one_device(run, axes, alone):
    np.testing.assert_allclose(losses(run, Configuration(**axes)), alone[run], atol=1e-4)


@pytest.mark.filterwarnings("ignore:overlap.. changes nothing")
def test_and_overlapped(alone):
    got = losses(GPT, Configuration(data=2, fsdp=2, model=2, micro_batch=4), overlap=True)
    np.testing.assert_allclose(got, alone[GPT], atol=1e-4)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:overlap.. changes nothing")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("run", "split"), [(run, of) for run in (GPT, MOE) for of in legal(run)], ids=named
)
def test_every_legal_mesh_trains_to_the_losses_of_one_device(run, split, overlap, alone):
    np.testing.assert_allclose(losses(run, split, overlap=overlap), alone[run], atol=1e-4)


def test_layers_lie_over_stages():
    recipe, config = configured(GPT, Configuration(pipeline=2, fsdp=2, model=2, micro_batch=2))
    mesh = recipe.make_mesh(config)
    params = recipe.state_shardings(config, mesh)["params"]
    assert mesh.axis_names == AXES
    layers = jax.tree.leaves(params["layers"])
    assert {at.spec[0] for at in layers} == {"pipeline"}


def test_a_file_chooses_the_mesh(tmp_path):
    path = tmp_path / "configuration.json"
    split = Configuration(data=2, model=4, micro_batch=8)
    path.write_text(json.dumps({"configurations": [dataclasses.asdict(split)]}))
    recipe, config = chosen(gpt.RECIPE, dataclasses.replace(GPT, configuration=path))
    assert config.split == split
    assert recipe is not gpt.RECIPE
    assert chosen(gpt.RECIPE, GPT) == (gpt.RECIPE, GPT)
    with pytest.raises(Mistake, match="expected a file"):
        chosen(gpt.RECIPE, dataclasses.replace(GPT, configuration=tmp_path / "none.json"))
    with pytest.raises(Mistake, match="must be a multiple"):
        configured(GPT, Configuration(model=8))
