"""Blocks in host memory: the same numbers, and copies under the matmuls on a pod's schedule."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxoverlap.train import zeroth_order as zo
from tests.support.seeds import some
from tests.train.zeroth_order import problem

TRANSFORM = zo.mezo(eps=1e-2, lr=1e-2, weight_decay=0.1)


def run(step: zo.ZOStep, steps: int = 5) -> tuple[np.ndarray, zo.ZOState]:
    state, losses = step.init(problem.params()), []
    for number in range(steps):
        state, metrics = step(state, problem.batch(number))
        losses.append(np.asarray(metrics["losses"]))
    return np.array(losses), state


def same(one: object, other: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "axes, sliced",
    some(
        2,
        [
            (dict(data=1), False),
            (dict(pair=2), True),
            (dict(pair=2), False),
            (dict(pair=2, data=2), True),
        ],
    ),
)
def test_streamed_is_resident_to_the_bit(axes, sliced):
    """On one device to the bit; on several too, beside the resident step on the same devices."""
    mesh = problem.mesh(**axes)
    names = dict(perturb="pair" if "pair" in axes else None, data="data" if len(axes) > 1 else None)
    resident = zo.step(problem.MODEL, TRANSFORM, mesh, **names)
    streamed = zo.step(problem.MODEL, TRANSFORM, mesh, host=True, sliced=sliced, **names)
    losses, state = run(resident)
    found, blocks = run(streamed)
    np.testing.assert_array_equal(losses[:1], found[:1])
    np.testing.assert_allclose(losses, found, rtol=1e-5)
    for leaf in jax.tree.leaves(blocks.params["blocks"]):
        assert leaf.sharding.memory_kind == "pinned_host"
    if np.array_equal(losses, found):
        same(resident.params(state), streamed.params(blocks))
    else:
        assert mesh.size > 1  # XLA may cut a batched matmul otherwise


def test_several_directions_share_an_upload():
    transform = zo.mezo(eps=1e-2, lr=1e-2, directions=2)
    losses, state = run(zo.step(problem.MODEL, transform))
    step = zo.step(problem.MODEL, transform, problem.mesh(data=1), host=True)
    found, blocks = run(step)
    np.testing.assert_array_equal(losses, found)
    same(state.params, step.params(blocks))


def test_each_device_keeps_its_slice():
    mesh = problem.mesh(pair=2, data=2)
    step = zo.step(problem.MODEL, TRANSFORM, mesh, perturb="pair", data="data", host=True)
    up = step.init(problem.params()).params["blocks"]["up"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(4, 2, 16)}


def test_layers_that_disagree_are_named():
    params = problem.params()
    params["blocks"]["up"] = params["blocks"]["up"][:2]
    step = zo.step(problem.MODEL, TRANSFORM, problem.mesh(data=1), host=True)
    with pytest.raises(ValueError, match="expected one for all"):
        step.init(params)
