"""Train states of any registered type: their parameters are found and replaced as JAX does it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

from jaxoverlap.train import LocalUpdates, co2, local_sgd
from jaxoverlap.train.local_updates.state import ParamsIn
from tests.support.odd_trees import Equinox, Node, Record
from tests.train.local_updates.problem import mesh_of

BATCHES = np.random.default_rng(0).normal(size=(2, 2, 4, 3)).astype(np.float32)
PARAMS = dict(w=jnp.ones((3, 2)), b=jnp.ones(2))
Pair = namedtuple("Pair", ("params", "count"))


@struct.dataclass
class Flax:
    params: Any
    count: Any
    name: str = struct.field(pytree_node=False, default="a name")


def defaults(**parts):
    return defaultdict(list, parts)


@pytest.mark.parametrize(
    ("make", "where"),
    (
        (dict, "params"),
        (OrderedDict, "params"),
        (defaults, "params"),
        (Pair, "params"),
        (Pair, 0),
        (Flax, "params"),
        (Record, "params"),
        (Node, "params"),
        (Node, 0),
        (Equinox, "params"),
        (lambda params, count: (count, params), 1),
        (lambda params, count: [count, params], -1),
        (lambda params, count: nnx.State({0: params, 1: count}), 0),
    ),
)
def test_a_state_of_any_type_is_trained_as_a_dict_is(make, where):
    found = ParamsIn(where)

    def step(state, batch):
        params = jax.tree.map(lambda leaf: leaf - 0.1 * batch.mean(), found.get(state))
        return found.put(state, params), batch.mean()

    updates = LocalUpdates(step, mesh_of(2), outer=co2(every=2), params=where, overlap=False)
    state = updates.init(make(params=PARAMS, count=jnp.int32(7)))
    kind = jax.tree.structure(state.worker)
    for batches in BATCHES:
        state, _ = updates.round(state, batches)
    state = updates.spread(updates.consolidate(state))
    assert jax.tree.structure(state.worker) == kind
    plain = LocalUpdates(
        lambda s, b: (jax.tree.map(lambda leaf: leaf - 0.1 * b.mean(), s), b.mean()),
        mesh_of(2), outer=co2(every=2), params=None, overlap=False,
    )  # fmt: skip
    other = plain.init(PARAMS)
    for batches in BATCHES:
        other, _ = plain.round(other, batches)
    jax.tree.map(np.testing.assert_array_equal, updates.params(state), plain.params(other))


def test_what_is_not_there_is_named():
    for state, where in (
        (dict(weights=1), "params"), (Node(1, 2), "weights"), ((1, 2), 2), (jnp.ones(3), "shape"),
        (None, "params"), (Record(1, 2), "no_part"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"no parameters at {where!r} in a train state of"):
            ParamsIn(where).get(state)


def test_the_split_of_an_nnx_model_and_its_optimizer_trains_as_nnx_does():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 2, rngs=rngs)

    def loss(model, batch):
        return jnp.mean((model.inner(batch) - 1) ** 2)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    graph, begin = nnx.split((model, optimizer))

    def step(state, batch):
        both = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(both[0], batch)
        both[1].update(both[0], gradients)
        return nnx.state(both), value

    updates = LocalUpdates(step, mesh_of(1), outer=local_sgd(every=2), params=0, overlap=False)
    state = updates.init(begin)
    for batches in BATCHES:
        state, metrics = updates.round(state, batches)
        for batch, value in zip(batches, metrics, strict=True):
            expected, gradients = nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, gradients)
            np.testing.assert_allclose(value[0], expected, rtol=1e-5)
    found = jax.tree.leaves(updates.params(state))
    for leaf, wanted in zip(found, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5)


def test_parameters_without_a_leaf_and_a_state_without_any_take_rounds():
    """All that is to be trained may be left out, as `bias=None`."""

    def step(state, batch):
        return state, batch.mean()

    for state in (dict(params=None, count=jnp.int32(7)), dict(params={}, count=None)):
        updates = LocalUpdates(step, mesh_of(2), outer=co2(every=2), overlap=False)
        after, metrics = updates.round(updates.init(state), BATCHES[0])
        assert metrics.shape == (2, 2) and updates.params(after) == state["params"]
