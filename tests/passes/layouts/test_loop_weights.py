"""Weights that all iterations of a loop share are gathered before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts import loop_weights
from jaxoverlap.plan.edits import PinArgument, PinValue
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.evaluated import evaluated_of

T, B, D = 3, 16, 8
MESHES = ({"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"replica": 2, "fsdp": 2, "tp": 2})


def recurrent(w: Any, x: Any) -> Any:
    """Return a loss of a recurrent network, whose weights are converted outside of the loop."""
    into, own = w[0], w[1].astype(x.dtype)

    def tick(state: Any, row: Any) -> Any:
        state = jnp.tanh(row @ into + state @ own)
        return state, jnp.sum(state**2)

    return jnp.mean(lax.scan(tick, jnp.zeros(x.shape[1:]), x)[1])


def microbatches(w: Any, x: Any) -> Any:
    """Return the loss of layers that are scanned for each microbatch."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    def micro(total: Any, part: Any) -> Any:
        return total + jnp.sum(lax.scan(jax.checkpoint(layer), part, jnp.stack(w))[0]), None

    return lax.scan(micro, jnp.zeros(()), x)[0]


def layers(w: Any, x: Any) -> Any:
    """Return a loss of layers with weights of their own."""
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x[0], jnp.stack(w))[0])


def once(w: Any, x: Any) -> Any:
    """Return a loss of a loop of one iteration."""
    return recurrent(w, x[:1])


def carried(w: Any, x: Any) -> Any:
    """Return a loss of a loop that changes its weights."""

    def tick(w: Any, row: Any) -> Any:
        return w + 1, jnp.sum(row @ w)

    return jnp.mean(lax.scan(tick, w[0], x)[1])


def stepped(loss: Any, axes: dict[str, int]) -> tuple[EditedStep, tuple[Any, ...]]:
    """Return the gradients of a loss as a step, and its arguments."""
    mesh, rng = mesh_of(axes), np.random.default_rng(0)

    def array(spec: Any, *shape: int) -> Any:
        value = jnp.asarray(rng.standard_normal(shape) / 3, jnp.float32)
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    rows = tuple(axis for axis in axes if axis != "tp")
    args = (
        (array(("fsdp",), D, D), array(("fsdp",), D, D)),
        array((None, rows), T, B, D),
    )
    return edited_of(jax.value_and_grad(loss), args, mesh), args


def proposed(edited: EditedStep) -> tuple[Any, ...]:
    """Return the proposal for a step whose weights are sharded by `fsdp`, as its rows are."""
    rows = tuple(axis for axis in edited.mesh.axis_names if axis != "tp")

    def spec(var: Any) -> Any:
        return (rows if var.aval.shape[0] == B else ("fsdp",), ())

    known = {
        dot.index: Shardings(*map(spec, (*dot.eqn.invars, dot.eqn.outvars[0])))
        for dot in edited.matmuls
    }
    proposals = [*loop_weights.propose(evaluated_of(edited, shardings=known))]
    assert len(proposals) <= 1
    return proposals[0].edits if proposals else ()


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("loss", [recurrent, microbatches])
def test_numbers_are_those_without_devices(loss, axes):
    edited, args = stepped(loss, axes)
    edits = proposed(edited)
    assert edits
    wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(*jax.tree.map(np.asarray, args)))
    for one, theirs in zip(evaluated(apply(edited, edits).jaxpr, args), wanted, strict=True):
        np.testing.assert_allclose(one, theirs, rtol=2e-5, atol=2e-5)


def test_arguments_and_other_values_are_pinned():
    first, second = sorted(proposed(stepped(recurrent, MESHES[0])[0]), key=str)
    assert {type(first), type(second)} == {PinArgument}, "a conversion to the same type is none"
    assert first.spec == second.spec == ((), ())
    (stack,) = proposed(stepped(microbatches, MESHES[0])[0])
    assert isinstance(stack, PinValue)
    assert stack.spec == ((), (), ()), "with the dim of layers"


@pytest.mark.parametrize("loss", [layers, once, carried])
def test_weights_of_single_iterations_stay(loss):
    assert proposed(stepped(loss, MESHES[0])[0]) == ()


def test_what_is_pinned_is_not_proposed_again():
    edited, _ = stepped(recurrent, MESHES[0])
    assert proposed(apply(edited, proposed(edited))) == ()


def test_an_axis_that_the_result_has_stays():
    mesh = mesh_of({"fsdp": 4, "tp": 2})
    w = jax.device_put(jnp.ones((D, D)), NamedSharding(mesh, P("fsdp", "tp")))
    x = jax.device_put(jnp.ones((T, B, D)), NamedSharding(mesh, P(None, "fsdp")))

    def step(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, row: (c, row @ w), 0.0, x)[1]

    edited = edited_of(step, (w, x), mesh)
    known = {0: Shardings((("fsdp",), ()), (("fsdp",), ("tp",)), (("fsdp",), ("tp",)))}
    (proposal,) = loop_weights.propose(evaluated_of(edited, shardings=known))
    (edit,) = proposal.edits
    assert edit.spec == ((), ("tp",))
    (lost,) = proposal.notes.values()
    assert lost.reasons[0].startswith("the loop at layouts/test_loop_weights.py")
    known = {0: Shardings((("fsdp",), ("tp",)), (("tp",), ()), (("fsdp",), ()))}
    assert [*loop_weights.propose(evaluated_of(edited, shardings=known))] == []
