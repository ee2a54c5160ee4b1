"""A function that is not jitted: overlap() puts jax.jit around it, and refuses what that loses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jax.device_put(jnp.ones((16, 32)), NamedSharding(MESH, P("data", "model")))
W = jax.device_put(jnp.ones((32, 64)), NamedSharding(MESH, P("model", None)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Parameters:
    w: jax.Array


def nnx_step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def nnx_objects() -> tuple[nnx.Linear, nnx.Optimizer]:
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def methods(overlapped):
    return overlapped, overlapped.explain, overlapped.lower, overlapped.trace, overlapped.programs


def test_it_runs_as_with_jax_jit():
    def step(x, w, *, scale=1.0):
        return {"y": scale * (x @ w)}

    overlapped = jaxoverlap.overlap(step)
    assert overlapped.__name__ == "step"
    np.testing.assert_allclose(overlapped(X, W, scale=2.0)["y"], step(X, W, scale=2.0)["y"])
    assert "step" in overlapped.explain(X, W).step
    assert not overlapped.lower(X, W).args_info[0][0].donated, "jax.jit without options"


def test_one_that_takes_nnx_objects_is_refused():
    for call in methods(jaxoverlap.overlap(nnx_step)):
        with pytest.raises(ValueError, match=r"Linear, Optimizer.*overlap\(nnx.jit\(step\)\)"):
            call(*nnx_objects(), X)
    with pytest.raises(ValueError, match=r"nnx_step takes nnx objects .*overlap\(nnx.jit"):
        nnx.jit(jaxoverlap.overlap(nnx_step))(*nnx_objects(), X)


def test_one_that_is_jitted_by_nnx_trains():
    model, optimizer = nnx_objects()
    step = jaxoverlap.overlap(nnx.jit(nnx_step))
    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_the_split_state_of_nnx_objects_is_no_object():
    graph, state = nnx.split(nnx_objects()[0])
    overlapped = jaxoverlap.overlap(lambda state, x: nnx.merge(graph, state)(x))
    np.testing.assert_allclose(overlapped(state, X), nnx.merge(graph, state)(X), rtol=1e-5)


@pytest.mark.parametrize("changed", ["value", "entry", "field", "list"])
def test_one_that_changes_an_argument_in_place_is_refused(changed):
    def step(parameters, x):
        grown = parameters["own"].w + 1 if changed == "field" else parameters["w"] + 1
        if changed == "value":
            parameters["w"] = grown
        elif changed == "entry":
            parameters["again"] = grown
        elif changed == "field":
            parameters["own"].w = grown
        else:
            parameters["list"].append(grown)
        return x @ parameters["w"]

    arguments = {"w": W, "own": Parameters(W), "list": []}
    for call in methods(jaxoverlap.overlap(step)):
        with pytest.raises(ValueError, match=r"step is not jitted, and changes an argument"):
            call(arguments, X)
    assert set(arguments) == {"w", "own", "list"}
