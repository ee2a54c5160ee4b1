"""Steps over devices: one trajectory, replicas to the bit, and scalars alone on the links."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.train import zeroth_order as zo
from tests.support.seeds import some
from tests.train.zeroth_order import problem

TRANSFORM = zo.mezo(eps=1e-2, lr=1e-4, weight_decay=0.1)
STEPS = 200


def tensor_parallel(mesh: Mesh) -> tuple[Any, Any]:
    """The problem's model and parameters, split over "model" as Megatron does."""

    def block(layer: Any, x: jax.Array) -> jax.Array:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * layer["norm"]
        h = jnp.tanh(h @ layer["up"] + layer["bias"])
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, None, "model")))
        return x + h @ layer["down"]

    params = problem.params()
    at = dict(up=P(None, None, "model"), bias=P(None, "model"), down=P(None, "model", None))
    blocks = {
        name: jax.device_put(leaf, NamedSharding(mesh, at.get(name, P())))
        for name, leaf in params["blocks"].items()
    }
    return zo.Blocks(problem.begin, block, problem.end), dict(params, blocks=blocks)


def made(name: str) -> tuple[zo.ZOStep, Any]:
    """A step by its name, and the parameters that it begins at."""
    ways = {
        "one device": {},
        "PertP": dict(mesh=problem.mesh(pair=2), perturb="pair"),
        "DDP": dict(mesh=problem.mesh(data=4), data="data"),
        "2D": dict(mesh=problem.mesh(pair=2, data=2), perturb="pair", data="data"),
    }
    if name != "2D, tensor parallel":
        return zo.step(problem.MODEL, TRANSFORM, **ways[name]), problem.params()
    mesh = problem.mesh(pair=2, data=2, model=2)
    model, params = tensor_parallel(mesh)
    return zo.step(model, TRANSFORM, mesh, perturb="pair", data="data"), params


def replicas_agree(params: Any) -> bool:
    """Whether all devices have the same bits of what they hold in common."""
    for leaf in jax.tree.leaves(params):
        by_index: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            held = np.asarray(shard.data).tobytes()
            if by_index.setdefault(str(shard.index), held) != held:
                return False
    return True


def trajectory(name: str) -> tuple[np.ndarray, Any]:
    step, params = made(name)
    state, losses = step.init(params), []
    for number in range(STEPS):
        state, metrics = step(state, problem.batch(number % 10))
        assert replicas_agree(state.params), (name, number)
        losses.append(np.asarray(metrics["losses"]))
    return np.array(losses), jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def alone() -> tuple[np.ndarray, Any]:
    return trajectory("one device")


@pytest.mark.rotating
@pytest.mark.parametrize("name", some(2, ["PertP", "DDP", "2D", "2D, tensor parallel"]))
def test_all_ways_take_one_trajectory(name, alone):
    losses, params = trajectory(name)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_the_loss_goes_down(alone):
    losses = alone[0].mean((1, 2)).reshape(-1, 10).mean(1)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["PertP", "DDP", "2D"])
def test_nothing_but_scalars_is_sent(name):
    step, params = made(name)
    compiled = step.lower(step.init(params), problem.batch(0)).compile()
    sent = jaxoverlap.audit(compiled).collectives
    assert sent and sum(c.bytes_moved * c.runs for c in sent) <= 64


def test_tensor_parallelism_sends_activations_and_no_parameters():
    step, params = made("2D, tensor parallel")
    compiled = step.lower(step.init(params), problem.batch(0)).compile()
    largest = max(c.bytes_moved for c in jaxoverlap.audit(compiled).collectives)
    rows = problem.ROWS // 2
    # All-reduced over two: 2 (n - 1) / n of the stream is the stream.
    assert largest <= 4 * rows * problem.LENGTH * problem.HIDDEN


@pytest.mark.nightly
def test_rings_in_the_forward_pass_change_nothing():
    mesh = problem.mesh(pair=2, data=2, model=2)
    model, params = tensor_parallel(mesh)
    losses = []
    for overlap in (False, True):
        step = zo.step(model, TRANSFORM, mesh, perturb="pair", data="data", overlap=overlap)
        state, found = step.init(params), []
        for number in range(3):
            state, metrics = step(state, problem.batch(number))
            found.append(np.asarray(metrics["losses"]))
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("directions", some(1, [1, 2]))
def test_deferred_and_flushed_is_immediate_to_the_bit(directions):
    transform = zo.mezo(eps=1e-2, lr=lambda n: 1e-2 / (1 + n), directions=directions)
    found = []
    for deferred in (False, True):
        step = zo.step(problem.MODEL, transform, deferred=deferred)
        state = step.init(problem.params())
        for number in range(12):
            state, _ = step(state, problem.batch(number))
            if number == 5:
                state = step.flush(state)  # as before an evaluation
        found.append(step.params(state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_flushed_state_has_nothing_pending():
    step = zo.step(problem.MODEL, TRANSFORM, deferred=True)
    state, _ = step(step.init(problem.params()), problem.batch(0))
    once = step.flush(state)
    assert float(state.pending.rate) > 0 and float(once.pending.rate) == 0
    jax.tree.map(np.testing.assert_array_equal, step.params(once), once.params)


def test_a_step_does_not_take_the_parameters_that_it_began_at():
    mesh = problem.mesh(data=2)
    params = jax.device_put(problem.params(), NamedSharding(mesh, P()))
    step = zo.step(problem.MODEL, TRANSFORM, mesh, data="data")
    step(step.init(params), problem.batch(0))
    jax.tree.map(np.testing.assert_array_equal, params, problem.params())


def test_losses_that_are_not_finite_are_refused_and_change_nothing():
    step = zo.step(lambda p, batch: (p["w"] * batch).sum(), zo.mezo(eps=1e-3, lr=0.1))
    state = step.init(dict(w=jnp.ones(3)))
    with pytest.raises(zo.NonFiniteLossError, match="step 0: the losses") as caught:
        step(state, jnp.array([1.0, jnp.nan, 1.0]))
    np.testing.assert_array_equal(caught.value.state.params["w"], 1.0)
    state, _ = step(caught.value.state, jnp.ones(3))
    assert int(state.step) == 2


def test_bad_layouts_are_named():
    with pytest.raises(ValueError, match="axis of 4 devices: a pair has 2"):
        zo.step(problem.MODEL, TRANSFORM, problem.mesh(pair=4), perturb="pair")
    with pytest.raises(ValueError, match="axis of 1 devices: a pair has 2"):
        zo.step(problem.MODEL, TRANSFORM, problem.mesh(pair=1), perturb="pair")
    with pytest.raises(ValueError, match="there is no mesh"):
        zo.step(problem.MODEL, TRANSFORM, perturb="pair")
    with pytest.raises(ValueError, match="expected an axis of the mesh"):
        zo.step(problem.MODEL, TRANSFORM, problem.mesh(data=2), data="batch")
    with pytest.raises(ValueError, match="expected a model as Blocks"):
        zo.step(lambda p, b: 0.0, TRANSFORM, problem.mesh(data=1), host=True)
    with pytest.raises(ValueError, match="expected an estimator"):
        zo.step(problem.MODEL, 1e-3)


def test_bad_batches_and_parameters_are_named():
    step = zo.step(problem.MODEL, TRANSFORM, problem.mesh(data=4), data="data")
    with pytest.raises(ValueError, match="not a multiple of the 4 devices"):
        step(step.init(problem.params()), problem.batch(0, rows=6))
    table = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="tied parameters are one leaf"):
        step.init(dict(a=table, b=table))
    with pytest.raises(ValueError, match="is of int32: expected floats"):
        step.init(dict(a=jnp.arange(3)))
    at = NamedSharding(problem.mesh(data=4), P("data"))
    with pytest.raises(ValueError, match="keep parameters whole"):
        step.init(dict(a=jax.device_put(jnp.ones(4), at)))
