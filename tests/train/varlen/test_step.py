"""A planned train step has the loss of one on one device; the trainer learns and resumes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.rings import bounds_of
from models import long_context, trainer
from models import varlen as models_varlen
from models.config import Mistake
from tests.train.varlen.batches import COSTS, random_plan

WIDTH, HEADS, VOCAB = 16, 2, 11
SMALL = long_context.Config(
    varlen=True, plain=True, layers=1, hidden=32, heads=2, mlp=32, data=2, context=2, steps=6,
    step_tokens=512, longest=200, save_every=3, warmup=2, learning_rate=1e-2,
)  # fmt: skip


def mesh_of(count, devices, tensor=1):
    sizes = (count, devices, tensor)[: 2 + (tensor > 1)]
    places = np.array(jax.devices()[: count * devices * tensor]).reshape(sizes)
    names = ("node", "device", "tensor")[: len(sizes)]
    return Mesh(places, names, axis_types=(AxisType.Auto,) * len(names))


def new_state(optimizer):
    rng = np.random.default_rng(1)
    params = {
        "table": rng.normal(size=(VOCAB, WIDTH)).astype("f"),
        "qkv": rng.normal(size=(WIDTH, 3, HEADS, WIDTH // HEADS)).astype("f") * 0.3,
    }
    return dict(params=params, optimizer=optimizer.init(params), step=jnp.int32(0))


def model(params, batch, attend):
    x = params["table"][batch["inputs"]] + jnp.sin(batch["positions"])[..., None]
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dcnh->bscnh", x, params["qkv"]), 2, 0)
    x = x + attend(q, k, v).reshape(x.shape)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["table"].T, batch["targets"]
    )
    return (losses * batch["weights"]).sum()


@jax.jit
@jax.value_and_grad
def reference(params, segment, batch):
    """The mean loss of a token on one device, under a dense mask that keeps sequences apart."""

    def alone(q, k, v):
        seen = (segment[:, None] == segment) & jnp.tri(len(segment), dtype=bool)
        return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])

    return model(params, batch, alone) / batch["weights"].sum()


def dense_batch(lengths, tokens, most):
    """Lay sequences out one after the other, as long as the longest batch: one compile for all."""
    total = int(lengths.sum())
    within = [np.arange(most - total), *map(np.arange, lengths)]
    batch = {name: np.pad(x, (most - total, 0))[None] for name, x in tokens.items()}
    batch["positions"] = np.concatenate(within)[None]
    batch["weights"] = (np.arange(most) >= most - total).astype("f")[None]
    return np.repeat(np.arange(len(within)), [len(w) for w in within]), batch


@pytest.mark.parametrize(("batches", "tensor"), [(1, 1), (2, 1), (1, 2)])
def test_the_whole_step_equals_one_on_one_device(batches, tensor):
    """With `optax.MultiSteps` the gradients of several batches are accumulated.

    With tensor parallelism the heads' weights are sharded over a third axis.
    """
    bounds = bounds_of({4: 24, 2: 16, 1: 32}, tokens=40, sent=64, sequences=64)
    planner = varlen.Planner(COSTS, varlen.Nodes(2, 2), capacity=bounds.slots, programs=[bounds])
    optimizer = optax.MultiSteps(optax.sgd(0.1), batches)
    step = varlen.train_step(model, optimizer, mesh_of(2, 2, tensor), costs=COSTS)
    spec = P(None, None, "tensor") if tensor > 1 else P()
    state = jax.device_put(new_state(optimizer), jax.NamedSharding(step.mesh, P()))
    qkv = jax.device_put(state["params"]["qkv"], jax.NamedSharding(step.mesh, spec))
    state["params"] |= {"qkv": qkv}
    want = new_state(optimizer)["params"]
    rng, gradients = np.random.default_rng(0), []
    for _ in range(4):
        plan = random_plan(planner, rng)
        tokens = {n: rng.integers(0, VOCAB, plan.tokens) for n in ("inputs", "targets")}
        most = planner.nodes.total * bounds.tokens
        loss, gradient = reference(want, *dense_batch(plan.lengths, tokens, most))
        state, metrics = step(state, plan, tokens)
        gradients.append(gradient)
        if len(gradients) == batches:
            want = jax.tree.map(lambda p, *gs: p - 0.1 * sum(gs) / batches, want, *gradients)
            gradients = []
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        for name, leaf in state["params"].items():
            np.testing.assert_allclose(leaf, want[name], rtol=1e-4, atol=1e-5)
    (program,) = step.compiled.values()
    assert program._cache_size() == 1, "a batch of other lengths was compiled again"


def test_a_plan_of_other_nodes_is_refused():
    step = varlen.train_step(model, optax.sgd(0.1), mesh_of(2, 2))
    plan = varlen.Planner(COSTS, varlen.Nodes(1, 4), capacity=64)([10, 20])
    with pytest.raises(ValueError, match="plan for it"):
        step({}, plan, {})
    with pytest.raises(ValueError, match="29 tokens for a plan of 30"):
        plan.laid_out(np.zeros(29))


def losses(run):
    return [row["loss"] for row in run.rows]


@pytest.mark.nightly
def test_the_trainer_learns_and_resumes_to_the_same_losses(tmp_path):
    whole = trainer.train(long_context.RECIPE, SMALL)
    assert losses(whole)[-1] < losses(whole)[0] - 0.5
    assert all(0 < row["balance"] <= 1 for row in whole.rows)
    kept = dataclasses.replace(SMALL, checkpoint=tmp_path / "run")
    trainer.train(long_context.RECIPE, dataclasses.replace(kept, steps=3))
    np.testing.assert_allclose(
        losses(trainer.train(long_context.RECIPE, kept)), losses(whole)[3:], rtol=1e-4
    )


@pytest.mark.parametrize("name", ("", "one_byte.txt"))
def test_documents_without_a_byte_to_predict_are_refused(name, tmp_path):
    """Files of one byte once made a step wait for ever for one of two."""
    if name:
        (tmp_path / name).write_text("x")
    with pytest.raises(Mistake, match="no files of two bytes or more"):
        trainer.train(long_context.RECIPE, dataclasses.replace(SMALL, documents=tmp_path))


def test_a_document_must_fit_in_a_step():
    with pytest.raises(Mistake, match="a document must fit"):
        trainer.train(long_context.RECIPE, dataclasses.replace(SMALL, longest=512))


def test_prices_of_no_cluster_are_a_mistake():
    with pytest.raises(Mistake, match="--prices nonsense"):
        trainer.train(long_context.RECIPE, dataclasses.replace(SMALL, prices="nonsense"))


def test_a_plan_of_one_program_is_not_for_several():
    with pytest.raises(Mistake, match="--varlen with --plan"):
        dataclasses.replace(SMALL, plain=False, plan=Path("plan.json"))


def test_files_of_one_byte_are_left_out_and_lengths_are_known_without_reading(tmp_path):
    for number, size in enumerate((1, 40, 0, 300)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    documents = models_varlen.Sources(dataclasses.replace(SMALL, documents=tmp_path))
    for step in range(3):
        assert [len(t) - 1 for t in documents.of_step(step)] == documents.lengths(step)
        assert set(documents.lengths(step)) <= {39, 200}


def small_step(loss, **how):
    bounds = bounds_of({1: 32}, tokens=32, sent=0, sequences=32)
    planner = varlen.Planner(COSTS, varlen.Nodes(1, 2), capacity=32, programs=[bounds])
    optimizer = optax.sgd(0.1)
    step = varlen.train_step(loss, optimizer, mesh_of(1, 2), costs=COSTS, **how)
    whole = jax.NamedSharding(step.mesh, jax.sharding.PartitionSpec())
    return step, planner([20, 9, 5]), jax.device_put(new_state(optimizer), whole)


def test_weights_and_positions_of_a_batch_are_its_own_and_aux_comes_back():
    """Labels that are masked count neither in the loss nor in what it is divided by."""
    rng = np.random.default_rng(0)

    def with_aux(params, batch, attend):
        seen = dict(positions=batch["positions"].sum(), labels=batch["weights"].sum())
        return model(params, batch, attend), seen

    step, plan, state = small_step(with_aux, has_aux=True)
    tokens = {n: rng.integers(0, VOCAB, plan.tokens) for n in ("inputs", "targets")}
    tokens["weights"] = (rng.random(plan.tokens) < 0.5).astype("f")
    tokens["positions"] = rng.integers(0, 100, plan.tokens).astype(np.int32)
    segment, batch = dense_batch(plan.lengths, tokens, plan.tokens)
    batch |= {n: tokens[n][None] for n in ("weights", "positions")}
    loss, _ = reference(new_state(optax.sgd(0.1))["params"], segment, batch)
    step.compile([plan.bounds], state, tokens)
    _, metrics = step(state, plan, tokens)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert metrics["aux"]["positions"] == tokens["positions"].sum()
    assert metrics["aux"]["labels"] == tokens["weights"].sum()


def test_a_batch_without_labels_changes_nothing():
    step, plan, state = small_step(model)
    before = jax.tree.map(np.asarray, state["params"])
    tokens = {n: np.zeros(plan.tokens, int) for n in ("inputs", "targets")}
    state, metrics = step(state, plan, tokens | {"weights": np.zeros(plan.tokens, "f")})
    assert metrics["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, before, state["params"])


def test_a_key_is_another_in_each_step_and_no_value_of_tokens():
    def noisy(params, batch, attend):
        draw = jax.random.uniform(batch["key"])
        return model(params, batch, attend) * 0 + draw * batch["weights"].sum()

    step, plan, state = small_step(noisy)
    tokens = {n: np.zeros(plan.tokens, int) for n in ("inputs", "targets")}
    drawn = []
    for _ in range(2):
        state, metrics = step(state, plan, tokens, jax.random.key(3))
        drawn.append(float(metrics["loss"]))
    assert drawn[0] != drawn[1]
    with pytest.raises(ValueError, match="pass a key"):
        step(state, plan, tokens | {"key": np.zeros(plan.tokens)})


def test_heads_that_groups_cannot_exchange_are_refused():
    bounds = bounds_of({2: 32}, tokens=32, sent=0, sequences=32, exchanged=(2,))
    costs = dataclasses.replace(COSTS, kv_heads=2)
    planner = varlen.Planner(costs, varlen.Nodes(1, 2), capacity=32, programs=[bounds])
    plan, q = planner([40]), np.zeros((1, 64, 3, 8), "f")
    with pytest.raises(ValueError, match=r"3 kv heads a device with groups of \[2\] devices"):
        varlen.attention(q, q, q, plan.arrays, mesh=mesh_of(1, 2), bounds=bounds)


def test_a_plan_prints_and_draws_itself(tmp_path):
    plan = varlen.Planner(COSTS, varlen.Nodes(2, 4), capacity=640)([2000, 300, 20, 1, 900])
    assert "5 sequences, 3221 tokens on 2 x 4 devices" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 120
    plan.draw(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 5_000
