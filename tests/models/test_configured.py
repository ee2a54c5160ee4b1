"""Every legal mesh of eight trains the GPT and the mixture to the losses of one device."""

import dataclasses
import json
import math

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
from models.configured import Config, build, chosen, configured
from tests.support.seeds import some

GPT = gpt.Config(layers=4, hidden=32, heads=4, mlp=64, batch=16, sequence=32)
MOE = moe.Config(layers=4, hidden=32, heads=4, mlp=64, batch=16, sequence=32, group=32, experts=4)
SIX = dataclasses.replace(GPT, layers=6)
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


ZERO_BUBBLE = dataclasses.replace(GPT, pipeline_order="ZB-H1")


def named(value):
    """A run's or a configuration's name among the tests'."""
    return type(value).__module__ if isinstance(value, gpt.Config | moe.Config) else str(value)


SOME = [
    (GPT, dict(data=2, fsdp=2, model=2, micro_batch=4)),
    (GPT, dict(pipeline=2, fsdp=2, model=2, micro_batch=2)),
    (ZERO_BUBBLE, dict(pipeline=2, data=2, micro_batch=2)),
    (GPT, dict(pipeline=2, data=2, context=2, micro_batch=2, interleave=2)),
    (MOE, dict(pipeline=2, data=2, expert=2, micro_batch=2)),
    (MOE, dict(fsdp=2, expert=2, model=2, micro_batch=4)),
    (GPT, dict(data=2, fsdp=2, model=2, micro_batch=2, zero_stage=1, recompute="selective")),
    (MOE, dict(data=2, expert=2, context=2, micro_batch=2, zero_stage=1, recompute="none")),
    (GPT, dict(fsdp=4, model=2, micro_batch=4, recompute="save_dot_except_mlp")),
    (MOE, dict(fsdp=4, expert=2, micro_batch=2, recompute="saves dispatch+up")),
    # Six layers over four stages, of which the ends have one each.
    (SIX, dict(pipeline=4, data=2, micro_batch=2, zero_stage=1)),
]


@pytest.fixture(scope="module")
def alone():
    """The losses of one device, by run."""
    return {run: losses(run, Configuration(micro_batch=run.batch)) for run in (GPT, MOE, SIX)}


@pytest.mark.rotating
@pytest.mark.parametrize(("run", "axes"), some(3, SOME), ids=named)
def test_some_meshes_train_to_the_losses_of_one_device(run, axes, alone):
    same = alone[dataclasses.replace(run, pipeline_order="1F1B")]
    np.testing.assert_allclose(losses(run, Configuration(**axes)), same, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
def test_and_overlapped(alone):
    got = losses(GPT, Configuration(data=2, fsdp=2, model=2, micro_batch=4), overlap=True)
    np.testing.assert_allclose(got, alone[GPT], atol=1e-4)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("run", "split"), [(run, of) for run in (GPT, MOE) for of in legal(run)], ids=named
)
def test_every_legal_mesh_trains_to_the_losses_of_one_device(run, split, overlap, alone):
    np.testing.assert_allclose(losses(run, split, overlap=overlap), alone[run], atol=1e-4)


def test_states_are_sharded_as_zero_says():
    """Under ZeRO-1 a device has a share of the moments of what data and context replicate."""
    split = Configuration(data=2, fsdp=2, context=2, micro_batch=4, zero_stage=1)
    recipe, config = configured(GPT, split)
    mesh = recipe.make_mesh(config)
    state = recipe.abstract_args(config, mesh)[0]

    def share(tree):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 2]
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
        return held / sum(leaf.size for leaf in leaves)

    assert share(state["params"]["layers"]) == 1 / 2
    assert share(state["optimizer"]) == 1 / 8
    compiled = recipe.make_step(config, mesh).lower(*recipe.abstract_args(config, mesh)).compile()
    after, _ = compiled.output_shardings
    same = jax.tree.map(
        lambda leaf, at: leaf.sharding.is_equivalent_to(at, leaf.ndim), state, after
    )
    assert all(jax.tree.leaves(same))


def test_a_vocabulary_that_does_not_divide_is_padded():
    run = dataclasses.replace(GPT, data=1, model=1, vocab=257)
    _, config = configured(run, Configuration(fsdp=8, micro_batch=2))
    assert config.vocab == 264


def test_heads_of_their_own_size_and_fewer_keys_train():
    """Sizes such as gpt-oss's, whose hidden size is no multiple of its heads, on any mesh."""
    fields = {f.name for f in dataclasses.fields(GPT)} & {
        f.name for f in dataclasses.fields(Config)
    }
    sizes = {name: getattr(GPT, name) for name in fields} | {"hidden": 40, "mlp": 64}
    own = dict(heads=8, kv_heads=2, head_dim=16, gated=True, tied=False)

    def trained(split):
        return losses(Config(**{**sizes, **own}), split)

    alone = trained(Configuration(micro_batch=16))
    np.testing.assert_allclose(
        trained(Configuration(model=4, data=2, micro_batch=8)), alone, atol=1e-4
    )
    stages = Configuration(pipeline=2, model=2, fsdp=2, micro_batch=2)
    np.testing.assert_allclose(trained(stages), alone, atol=1e-4)


def test_a_mesh_is_in_its_placement():
    """Data innermost: its two devices are neighbours; the file's order is the mesh's."""
    split = Configuration(data=2, fsdp=2, model=2, micro_batch=2)
    order = ("pipeline", "expert", "context", "fsdp", "model", "data")
    recipe, config = configured(GPT, split, order)
    devices = recipe.make_mesh(config).devices[0, :, :, 0, 0, :]  # data, fsdp, model
    ids = np.vectorize(lambda device: device.id)(devices)
    assert ids[:, 0, 0].tolist() == [0, 1]
    assert ids[0, 0, :].tolist() == [0, 2]
    assert ids[0, :, 0].tolist() == [0, 4]
    np.testing.assert_array_equal(np.sort(ids.ravel()), np.arange(8))


@pytest.mark.parametrize("number", range(4))
def test_a_trainer_follows_the_placement_that_was_chosen(number, tmp_path):
    """The mesh's devices, axis by axis, are those of which the form counted the groups."""
    model = transformer(GPT)
    found = jaxoverlap.configure(model, "h100-sxm:2x4", global_batch=16, keep=40)
    scored = [s for s in found if len(str(s.placement).split(" > ")) > 2][number]
    path = tmp_path / "configuration.json"
    data = found.to_builtins()
    data["configurations"] = [
        {**dataclasses.asdict(scored.configuration), "order": scored.placement.order}
    ]
    path.write_text(json.dumps(data))
    recipe, config = chosen(gpt.RECIPE, dataclasses.replace(GPT, configuration=path))
    mesh = recipe.make_mesh(config)
    assert config.split == scored.configuration
    for index, axis in enumerate(AXES):
        groups = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.shape[axis])
        for group in groups:
            ids = [device.id for device in group]
            assert ids == scored.placement.members(ids[0], (axis,))
    other = dataclasses.replace(GPT, batch=32, configuration=path)
    assert chosen(gpt.RECIPE, other)[1].batch == 16  # the file's, as the flag was not given
    with pytest.raises(Mistake, match="made for batch=16, and --batch is 32"):
        chosen(gpt.RECIPE, other, {"batch"})


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


def saved_names(run, split):
    """The names of the values that a layer's backward pass finds saved."""
    recipe, config = configured(run, split)
    mesh = recipe.make_mesh(config)
    step = recipe.make_step(config, mesh).trace(*recipe.abstract_args(config, mesh))
    return step.lower().compile().memory_analysis().temp_size_in_bytes


def test_a_policy_saves_what_it_names():
    """More is kept with each name, and nothing for what the backward pass does not read."""
    run = dataclasses.replace(GPT, layers=16, sequence=128, attention="xla")

    def kept(recompute):
        return saved_names(run, Configuration(fsdp=8, micro_batch=2, recompute=recompute))

    full, out, qkv, down = map(kept, ("full", "saves out", "saves qkv+out", "saves qkv+out+down"))
    assert full < out < qkv == down


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_rank": 16, "query_rank": 16, "rope_dim": 4}, "latent attention"),
        ({"experts": 4, "choices": 2, "shared_mlp": 64}, "these trainers have not"),
    ],
)
def test_layers_that_the_trainers_have_not_are_refused(fields, message):
    model = dataclasses.replace(transformer(GPT), **fields)
    with pytest.raises(Mistake, match=message):
        build(model, Configuration(), AXES, 16, "h100-sxm:1x8")


def test_a_file_of_another_dtype_is_refused(tmp_path):
    path = tmp_path / "configuration.json"
    data = {"dtype": "fp8", "configurations": [dataclasses.asdict(Configuration())]}
    path.write_text(json.dumps(data))
    with pytest.raises(Mistake, match="made for matmuls in fp8"):
        chosen(gpt.RECIPE, dataclasses.replace(GPT, configuration=path))
    path.write_text(json.dumps(dataclasses.asdict(Configuration(offload=2))))
    with pytest.raises(Mistake, match="offload nothing"):
        chosen(gpt.RECIPE, dataclasses.replace(GPT, configuration=path))


@pytest.mark.parametrize(
    ("order", "split", "message"),
    [
        ("ZB-H2", None, "expected 1F1B or ZB-H1"),
        ("ZB-H1", None, "give --configuration"),
        ("ZB-H1", dict(fsdp=2, model=2), "two stages or more"),
        ("ZB-H1", dict(pipeline=2, fsdp=2), "no axis but pipeline and data"),
    ],
)
def test_orders_that_no_pipeline_can_run_are_mistakes(order, split, message, tmp_path):
    path = tmp_path / "configuration.json"
    found = [dataclasses.asdict(Configuration(**split, micro_batch=2))] if split else []
    path.write_text(json.dumps({"configurations": found}))
    run = dataclasses.replace(GPT, pipeline_order=order, configuration=path if split else None)
    with pytest.raises(Mistake, match=message):
        chosen(gpt.RECIPE, run)
