"""Blocks in host memory: the same numbers, and copies under the matmuls on a pod's schedule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


# -- a narrow copy --------------------------------------------------------------------------------


def narrow(dtype, every=3, **axes):
    mesh = problem.mesh(**(axes or dict(data=1)))
    names = dict(perturb="pair", data="data") if axes else {}
    return zo.step(
        problem.MODEL, TRANSFORM, mesh, host=True, offload_dtype=dtype, refresh_every=every, **names
    )


def test_a_copy_as_wide_as_the_blocks_is_the_blocks_to_the_bit():
    losses, state = run(zo.step(problem.MODEL, TRANSFORM), 8)
    step = narrow(jnp.float32)
    found, copied = run(step, 8)
    np.testing.assert_array_equal(losses, found)
    same(state.params, step.params(copied))


@pytest.mark.parametrize("axes", [{}, dict(pair=2, data=2)], ids=["alone", "2D"])
def test_the_host_s_blocks_are_what_the_scalars_say_and_losses_are_of_the_copy(axes):
    step, records = narrow(jnp.float8_e4m3fn, **axes), []
    state = start = step.init(problem.params())
    for leaf in jax.tree.leaves((state.params["blocks"], state.narrow["values"])):
        assert leaf.sharding.memory_kind == "pinned_host"
    for number in range(8):
        state, metrics = step(state, problem.batch(number))
        records.append([metrics["rate"], *metrics["scalars"]])
        if number == 0:
            copied = jax.tree.map(
                lambda v, s: np.float32(v) * np.asarray(s).reshape(-1, *[1] * (v.ndim - 1)),
                jax.device_get(start.narrow["values"]),
                start.narrow["scales"],
            )
            rounded = dict(outer=problem.params()["outer"], blocks=copied)
            resident = zo.step(problem.MODEL, TRANSFORM)
            _, wanted = resident(resident.init(rounded), problem.batch(0))
            np.testing.assert_allclose(metrics["losses"], wanted["losses"], rtol=1e-5)
            _, exact = resident(resident.init(problem.params()), problem.batch(0))
            assert not np.allclose(metrics["losses"], exact["losses"], rtol=1e-5)
    replayed = zo.replay(np.array(records), TRANSFORM, problem.params(), seed=0)
    same(step.params(state), replayed.params)


def test_a_copy_needs_the_host_and_a_float():
    with pytest.raises(ValueError, match="without host=True"):
        zo.step(problem.MODEL, TRANSFORM, offload_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="expected a float of 8 to 32 bits"):
        narrow(jnp.int8)
    with pytest.raises(ValueError, match="refresh_every=0"):
        narrow(jnp.bfloat16, every=0)
