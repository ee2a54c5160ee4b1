"""Leaves that are None."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxoverlap
from jaxoverlap.train import compression
from jaxoverlap.train.compression import none, power_sgd, qsgd, top_k, uniform
from jaxoverlap.train.local_updates.algorithms import streaming_diloco
from jaxoverlap.train.local_updates.local_updates import LocalUpdates
from tests.support.seeds import some
from tests.train.compression.problem import mesh_of

LAYERS = [{"w": np.eye(64, dtype=np.float32), "bias": None} for _ in range(4)]
ODD: Any = {"first": None, "layers": LAYERS, "last": {"w": np.eye(64, dtype=np.float32)}}
BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def without_none(params: Any) -> Any:
    return {"layers": [{"w": x["w"]} for x in params["layers"]], "last": params["last"]}


def loss(params: Any, batch: Any) -> Any:
    for layer in params["layers"]:
        batch = jnp.tanh(batch @ layer["w"])
    return jnp.mean((batch @ params["last"]["w"]) ** 2)


def step_of(compressor: Any) -> Any:
    return compression.data_parallel(
        jax.value_and_grad(loss), optax.adam(1e-2), mesh_of(), axis="data", sync=uniform(compressor)
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    "compressor", some(2, [power_sgd(2), qsgd(3), top_k(0.02), none()]), ids=repr
)
def test_a_none_is_no_leaf(compressor):
    step, usual = step_of(compressor), step_of(compressor)
    state, other = step.init(ODD), usual.init(without_none(ODD))
    assert step.sent_bytes(state) == usual.sent_bytes(other)
    audit = jaxoverlap.audit(step.lower(step.abstract(ODD), BATCH).compile())
    assert sum(c.runs * c.bytes_moved for c in audit.collectives) == step.sent_bytes(state)
    for _ in range(2):
        state, value = step(state, BATCH)
        other, wanted = usual(other, BATCH)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert state.params["first"] is None and state.params["layers"][0]["bias"] is None
    got = jax.tree.leaves(without_none(state.params))
    for one, same in zip(got, jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-6)


def test_fragments_of_local_updates_count_the_same_leaves():
    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def trained(params: Any) -> Any:
        outer = streaming_diloco(every=4, fragments=2, delay=1)
        rounds = LocalUpdates(step, mesh_of(), outer=outer, params=None, overlap=False)
        state = rounds.init(params)
        for _ in range(2):
            state, _ = rounds.round(state, np.stack([BATCH] * 4))
        return rounds.params(state)

    odd, usual = trained(ODD), trained(without_none(ODD))
    assert odd["first"] is None
    for one, same in zip(jax.tree.leaves(odd), jax.tree.leaves(usual), strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-5)
