"""The trainers beside the GPT do what is their own, and overlap keeps what they compute."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer.testing
from flax import nnx

import jaxoverlap
from models import digits, long_context, moe, train_long, train_moe, train_vit, vit
from models.recipe import Recipe

SMALL = dict(layers=2, hidden=32, heads=4, mlp=64, learning_rate=1e-2, warmup=2, steps=6)
TINY = {
    moe: moe.Config(sequence=32, group=16, batch=8, **SMALL),
    vit: vit.Config(batch=16, **SMALL),
    long_context: long_context.Config(sequence=32, batch=4, **SMALL),
}
COMMANDS = {moe: train_moe, vit: train_vit, long_context: train_long}
each = pytest.mark.parametrize("model", TINY, ids=lambda m: m.__name__.split(".")[-1])


# -- training, both ways --------------------------------------------------------------------------


class Run(NamedTuple):
    step: Any
    rows: list[dict[str, float]]
    state: Any


@pytest.fixture(scope="module")
def runs():
    """Return runs(model): a few steps from one state, plain and overlapped; made once per model."""
    return functools.cache(lambda model: both_ways(model.RECIPE, TINY[model]))


def both_ways(recipe: Recipe, config) -> tuple[Run, Run]:
    mesh, batch_of = recipe.make_mesh(config), recipe.batches(config)
    start = jax.device_get(recipe.init_state(config, mesh, seed=0))
    plain, both = recipe.make_step(config, mesh), []
    for step in (plain, jaxoverlap.overlap(plain)):
        state, rows = jax.device_put(start, recipe.state_shardings(config, mesh)), []
        for index in range(config.steps):
            state, metrics = step(state, batch_of(index))
            rows.append({name: float(value) for name, value in metrics.items()})
        both.append(Run(step, rows, state))
    return both[0], both[1]


@each
def test_losses_fall_and_agree(model, runs):
    plain, overlapped = ([row["loss"] for row in run.rows] for run in runs(model))
    assert plain[-1] < plain[0] - 0.1
    np.testing.assert_allclose(overlapped, plain, rtol=1e-4)


@each
def test_gradients_agree_in_size(model, runs):
    """A loss shows little of a wrong gradient: Adam takes steps of one size."""
    plain, overlapped = ([row["grad_norm"] for row in run.rows] for run in runs(model))
    np.testing.assert_allclose(overlapped[:3], plain[:3], rtol=1e-4)


@each
def test_there_are_rings_and_every_other_matmul_has_a_reason(model, runs):
    config, (_, overlapped) = TINY[model], runs(model)
    plan = overlapped.step.explain(*model.abstract_args(config, model.RECIPE.make_mesh(config)))
    kinds = {d.kind for d in plan.decisions}
    exchanged = {"all_to_all_matmul"} if model is moe else set()
    assert kinds == {"all_gather_matmul", "matmul_reduce_scatter"} | exchanged
    assert len(plan.decisions) > 20
    waiting = [s.reason for s in plan.skips if not s.idle]
    known = ("exchange" if model is moe else "no such thing", "both move dim")
    assert all(any(word in reason for word in known) for reason in waiting), waiting


@each
def test_the_state_lies_where_it_is_said_to(model, runs):
    config = TINY[model]
    expected, _ = model.abstract_args(config, model.RECIPE.make_mesh(config))
    for run in runs(model):
        assert jax.tree.structure(run.state) == jax.tree.structure(expected)
        for real, abstract in zip(*map(jax.tree.leaves, (run.state, expected)), strict=True):
            assert (real.shape, real.dtype) == (abstract.shape, abstract.dtype)
            assert real.sharding.is_equivalent_to(abstract.sharding, real.ndim)


@each
def test_every_large_weight_is_split_over_all_devices(model):
    config = TINY[model]
    state, _ = model.abstract_args(config, model.RECIPE.make_mesh(config))
    for path, leaf in jax.tree.leaves_with_path(state["params"]):
        if leaf.size > config.layers * config.hidden * 16:
            local = np.prod(leaf.sharding.shard_shape(leaf.shape))
            assert local * 8 == leaf.size, jax.tree_util.keystr(path)


@each
def test_a_batch_is_as_described(model):
    config = TINY[model]
    _, described = model.abstract_args(config, model.RECIPE.make_mesh(config))
    batch_of = model.RECIPE.batches(config)
    batch, again, other = batch_of(3), batch_of(3), batch_of(4)
    assert batch.keys() == described.keys()
    for name, array in batch.items():
        assert (array.shape, array.dtype) == (described[name].shape, described[name].dtype)
        np.testing.assert_array_equal(array, again[name])
        assert (array != other[name]).any()


@each
@pytest.mark.nightly
def test_loss_and_gradients_do_not_depend_on_the_mesh(model):
    recipe, by_mesh = model.RECIPE, []
    with jax.enable_x64(True):
        for sizes in ((1, 1), (2, 4)):
            mesh_sizes = dict(zip(recipe.config.AXES, sizes, strict=True))
            wide = dict(dtype="float64", param_dtype="float64")
            config = dataclasses.replace(TINY[model], **mesh_sizes, **wide)
            mesh = recipe.make_mesh(config)
            params = recipe.init_state(config, mesh, seed=0)["params"]
            batch = recipe.batches(config)(0)
            by_mesh.append(jax.device_get(recipe.make_grads(config, mesh)(params, batch)))
    for whole, split in zip(*map(jax.tree.leaves, by_mesh), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-9, atol=1e-12)


# -- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (moe, {"expert": 3}, "heads=4 with expert=3"),
        (moe, {"experts": 6}, "experts=6 with expert=4"),
        (moe, {"batch": 4}, "batch=4 with data x expert=8"),
        (moe, {"group": 12}, "sequence=32 with group=12"),
        (moe, {"choices": 9}, "choices=9 with experts=8"),
        (moe, {"dispatch": "sorted"}, "dispatch=.sorted.: expected one of slots, ragged"),
        (moe, {"slack": 0}, "slack=0"),
        (moe, {"vocab": 128}, "vocab=128"),
        (vit, {"patch": 3}, "image=8 with patch=3"),
        (vit, {"patch": 8}, "patches=1 with model=4"),
        (vit, {"model": 0}, "model=0: expected a whole number"),
        (long_context, {"sequence": 34}, "sequence=34 with context=4"),
        (long_context, {"heads_at_once": 3}, "heads=4 with heads_at_once=3"),
        (long_context, {"data": 3}, "hidden=32 with data=3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(model, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY[model], **change)


@each
@pytest.mark.parametrize("sizes", [(1, 8), (8, 8)])
def test_a_pod_has_sizes_that_fit(model, sizes):
    axes = dict(zip(model.Config.AXES, sizes, strict=True))
    config = model.Config.pod(**axes, layers=7)
    assert config.mesh == axes
    assert (config.layers, config.dtype) == (7, "bfloat16")
    assert config.batch >= max(2, sizes[0])


@each
def test_every_field_is_a_flag(model):
    app = typer.testing.CliRunner()
    helped = app.invoke(COMMANDS[model].app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert helped.exit_code == 0
    for field in dataclasses.fields(model.Config):
        assert f"--{field.name.replace('_', '-')} " in helped.output
    refused = app.invoke(COMMANDS[model].app, ["--hidden", "130"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "hidden=130 with heads=4" in refused.output


# -- experts --------------------------------------------------------------------------------------


def test_a_route_fills_slots_and_no_slot_twice():
    tokens, experts, choices, capacity = 32, 4, 2, 9  # of 64 wanted slots there are 36
    scores = np.random.default_rng(0).standard_normal((3, tokens, experts)).astype(np.float32)
    probabilities = np.asarray(jax.nn.softmax(scores))
    dispatch, combine = map(np.asarray, moe.route(jnp.array(probabilities), choices, capacity))
    assert dispatch.shape == combine.shape == (3, tokens, experts, capacity)
    assert set(np.unique(dispatch)) == {0, 1}
    assert (dispatch.sum(axis=1) <= 1).all(), "two tokens in one slot"
    assert (dispatch.sum(axis=-1) <= 1).all(), "two slots for one token at one expert"
    wanted = np.argsort(-probabilities, axis=-1)[..., :choices]
    went = dispatch.any(axis=-1)
    assert not np.where(np.eye(experts)[wanted].any(axis=-2), False, went).any()
    full = dispatch.sum(axis=(1, 3)) == capacity
    first = np.eye(experts)[wanted[..., 0]].sum(axis=1)
    assert full.any()
    served = (went & (np.eye(experts)[wanted[..., 0]] > 0)).sum(axis=1)
    np.testing.assert_array_equal(served, np.minimum(first, capacity), "first choices go first")


def test_with_slots_for_all_the_weights_are_the_best_probabilities():
    scores = np.random.default_rng(1).standard_normal((2, 8, 4)).astype(np.float32)
    probabilities = np.asarray(jax.nn.softmax(scores))
    _, combine = moe.route(jnp.array(probabilities), 2, 8)
    best = np.where(probabilities >= np.sort(probabilities)[..., -2:-1], probabilities, 0)
    expected = best / best.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(combine.sum(axis=-1), expected, rtol=1e-6)


def test_an_even_load_costs_one_and_an_uneven_one_more():
    even = jnp.array(np.tile(0.999 * np.eye(4) + 0.00025, (1, 2, 1)), jnp.float32)
    np.testing.assert_allclose(moe.uneven(even), [1.0], rtol=1e-6)
    np.testing.assert_allclose(moe.uneven(jnp.array([[[1.0, 0, 0, 0]] * 8])), [4.0])


# -- images ---------------------------------------------------------------------------------------


def test_patches_are_squares_of_the_image():
    image = np.arange(2 * 8 * 8 * 1).reshape(2, 8, 8, 1)
    patches = digits.cut(image, 2)
    assert patches.shape == (2, 16, 4)
    np.testing.assert_array_equal(patches[0, 5], image[0, 2:4, 2:4].ravel())
    np.testing.assert_array_equal(patches[1, 3], image[1, 0:2, 6:8].ravel())


def test_no_batch_has_an_image_that_is_held_out():
    config = dataclasses.replace(TINY[vit], batch=4000)
    seen = {image.tobytes() for image in digits.digit_batches(config)(0)["patches"]}
    kept = {image.tobytes() for image in digits.held_out(config, 2)["patches"]}
    assert len(kept) > 280
    assert len(seen) > 1200
    assert not seen & kept


def test_other_images_are_refused():
    with pytest.raises(ValueError, match=r"image=16, channels=1, classes=10: the digits have"):
        digits.load_digits(dataclasses.replace(TINY[vit], image=16))


def test_the_report_says_how_many_are_right(runs):
    config, (plain, _) = TINY[vit], runs(vit)
    mesh = vit.RECIPE.make_mesh(config)
    said = vit.accuracy(config, mesh, plain.state["params"])
    percent = float(said.removeprefix("right on ").split("%")[0])
    assert 15 < percent <= 100  # chance is 10
    assert said.endswith("of 296 images held out")


# -- long texts -----------------------------------------------------------------------------------


def logits_of(config, params, tokens):
    mesh = long_context.RECIPE.make_mesh(config)
    new = nnx.eval_shape(lambda: long_context.LongContext(config, mesh, nnx.Rngs(0)))
    definition, _ = nnx.split(new)
    return jax.jit(lambda params, tokens: nnx.merge(definition, params)(tokens))(params, tokens)


def test_heads_together_or_apart_and_no_byte_sees_a_later_one(runs):
    config, (plain, _) = TINY[long_context], runs(long_context)
    params = plain.state["params"]
    tokens = long_context.RECIPE.batches(config)(0)["inputs"]
    changed = tokens.copy()
    changed[:, 9] ^= 1
    logits = np.asarray(logits_of(config, params, tokens))
    other = np.asarray(logits_of(config, params, changed))
    np.testing.assert_array_equal(logits[:, :9], other[:, :9])
    assert (logits[:, 9:] != other[:, 9:]).any(axis=(0, 2)).all()
    together = logits_of(dataclasses.replace(config, heads_at_once=4), params, tokens)
    np.testing.assert_allclose(together, logits, rtol=1e-4, atol=1e-5)


# -- ragged experts -------------------------------------------------------------------------------


def test_ragged_experts_mix_as_slots_do_where_every_token_finds_room():
    slots = dataclasses.replace(TINY[moe], slack=8.0)
    losses = {}
    for dispatch in ("slots", "ragged"):
        config = dataclasses.replace(slots, dispatch=dispatch)
        mesh, batch_of = moe.RECIPE.make_mesh(config), moe.RECIPE.batches(config)
        state = moe.RECIPE.init_state(config, mesh, seed=0)
        step = moe.RECIPE.make_step(config, mesh)
        made = []
        for index in range(3):
            state, metrics = step(state, batch_of(index))
            made.append(float(metrics["loss"]))
        losses[dispatch] = made
    np.testing.assert_allclose(losses["ragged"], losses["slots"], rtol=1e-5)


def test_ragged_experts_are_split_and_keep_their_losses():
    config = dataclasses.replace(TINY[moe], dispatch="ragged", batch=16)
    mesh, batch_of = moe.RECIPE.make_mesh(config), moe.RECIPE.batches(config)
    start = jax.device_get(moe.RECIPE.init_state(config, mesh, seed=0))
    plain = moe.RECIPE.make_step(config, mesh)
    split = jaxoverlap.overlap(plain, halves=2)
    losses = []
    for step in (plain, split):
        state = jax.device_put(start, moe.RECIPE.state_shardings(config, mesh))
        made = []
        for index in range(3):
            state, metrics = step(state, batch_of(index))
            made.append(float(metrics["loss"]))
        losses.append(made)
    state = jax.device_put(start, moe.RECIPE.state_shardings(config, mesh))
    assert split.explain(state, batch_of(0)).split
    np.testing.assert_allclose(*losses, rtol=1e-4)
