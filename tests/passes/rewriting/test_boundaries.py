"""What a scan uses at boundaries alone is computed there, and comes out as it did."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting import carried_sums
from jaxoverlap.passes.rewriting.boundaries import boundaries_of
from jaxoverlap.plan.edits import SumCarried, UpdateAtBoundary
from tests.passes.rewriting.test_carried_sums import MESHES, MICRO, arguments, loss, proposed
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.evaluated import evaluated_of
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

Form = str  # how a step says when it updates
FORMS = ("MultiSteps", "summed", "cond", "where", "finite")


def stepping(form: Form, every: int, reverse: bool) -> Any:
    """Return a step that updates its weights after so many microbatches."""
    adam, mean = optax.adamw(0.1), form != "summed"
    multi = optax.MultiSteps(adam, every, use_grad_mean=mean)

    def own(grads: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        """Do the same by hand."""
        count, total, inner = state
        total, count = jax.tree.map(jnp.add, total, grads), count + 1
        last = count % every == 0

        def update(operands: Any) -> Any:
            weights, total, inner = operands
            updates, inner = adam.update(total, inner, weights)
            zeros = jax.tree.map(jnp.zeros_like, total)
            return optax.apply_updates(weights, updates), zeros, inner

        if form == "cond":
            weights, total, inner = lax.cond(last, update, lambda x: x, (weights, total, inner))
        else:
            weights, total, inner = jax.tree.map(
                functools.partial(jnp.where, last),
                update((weights, total, inner)),
                (weights, total, inner),
            )
        return weights, (count, total, inner)

    def micro(carry: Any, part: Any) -> Any:
        weights, state = carry
        grads = jax.grad(functools.partial(loss, remat=True, scanned=True))(weights, *part)
        if form in ("cond", "where"):
            return own(grads, state, weights), None
        if form == "finite":
            finite = jnp.all(jnp.asarray([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
            updates, (_, total, inner) = adam.update(grads, state[2], weights), state
            weights = jax.tree.map(lambda w, u: jnp.where(finite, w + u, w), weights, updates[0])
            total = jax.tree.map(lambda t, g: (1 - finite) * (t + g), total, grads)
            return (weights, (state[0], total, inner)), None
        updates, state = multi.update(grads, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    def step(weights: Any, state: Any, x: Any, tokens: Any) -> Any:
        return lax.scan(micro, (weights, state), (x, tokens), reverse=reverse)[0]

    return step


def operands(form: Form, every: int, done: int, mesh: Mesh) -> tuple[Any, ...]:
    """Return operands of `stepping`, of whose first update some microbatches are done."""
    weights, *batch = arguments(mesh)
    adam, count = optax.adamw(0.1), jnp.asarray(done, jnp.int32)
    total = jax.tree.map(lambda w: 0.1 * done * jnp.ones_like(w), weights)
    state: Any = count, total, adam.init(weights)
    if form in ("MultiSteps", "summed"):
        state = optax.MultiSteps(adam, every).init(weights)._replace(mini_step=count)
        state = state._replace(acc_grads=total)
    everywhere = NamedSharding(mesh, P())

    def sharded(x: Any) -> Any:
        return x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere)

    return (weights, jax.tree.map(sharded, state), *batch)


def check(form: Form, axes: dict[str, int], every: int, done: int, reverse: bool) -> list[Any]:
    """Compare a step with what is proposed with the step without devices."""
    mesh = mesh_of(axes)
    args, step = operands(form, every, done, mesh), stepping(form, every, reverse)
    edited = edited_of(step, args, mesh)
    wanted = jax.tree.leaves(jax.jit(step)(*jax.tree.map(np.asarray, args)))
    proposals = [one for one in proposed(edited) if one]
    for edits in proposals:
        for one, theirs in zip(evaluated(apply(edited, edits).jaxpr, args), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(theirs), 3e-5, 3e-5)
    return proposals


DRAWN = given(
    form=st.sampled_from(("MultiSteps", "summed", "cond", "where")),
    axes=st.sampled_from(MESHES),
    every=st.integers(2, MICRO),
    done=st.integers(0, 1),
    reverse=st.booleans(),
)


@settings(max_examples=3, deadline=None)
@DRAWN
def test_no_number_changes(form, axes, every, done, reverse):
    assert check(form, axes, every, done, reverse)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@DRAWN
def test_no_number_of_300_changes(form, axes, every, done, reverse):
    assert check(form, axes, every, done, reverse)


def test_sums_of_multi_steps_are_added_up_at_the_boundary():
    alone, free, every = check("MultiSteps", MESHES[0], MICRO, 1, False)
    (edit,) = alone
    assert str(edit).endswith(f"uses in 1 of {MICRO} iterations in these alone")
    assert (edit.runs, edit.iterations, edit.at_end) == (1, MICRO, True)
    sums = [one for one in free if isinstance(one, SumCarried)]
    assert [one.axes for one in sums] == [("replica",)] * 3 + [("replica", "fsdp")]
    assert [type(one) for one in every] == [UpdateAtBoundary] + [SumCarried] * 4


def shaped(form: Form, every: int = MICRO, reverse: bool = False) -> EditedStep:
    mesh = mesh_of(MESHES[0])
    return edited_of(stepping(form, every, reverse), operands(form, every, 0, mesh), mesh)


@pytest.mark.parametrize("form", ["MultiSteps", "summed", "cond", "where"])
def test_boundaries_are_counted(form):
    (edit,) = boundaries_of(shaped(form))
    assert (edit.runs, edit.iterations, edit.at_end) == (1, MICRO, True)
    assert not [*boundaries_of(shaped(form, every=1))], "no more than half of the iterations"


def test_a_boundary_that_depends_on_numbers_of_arrays_is_said_to_stay():
    step = evaluated_of(shaped("finite"), shardings={})
    (proposal,) = carried_sums.propose(step)
    assert not proposal.edits
    assert proposal.why_not.startswith("The loop at rewriting/test_boundaries.py")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scan": 99}, "scans, counted from 0"),
        ({"scan": 0}, "nothing at a boundary alone"),
        ({"runs": 0}, "no part of them"),
        ({"runs": MICRO}, "no part of them"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(changes, said):
    edited = shaped("cond")
    (edit,) = boundaries_of(edited)
    with pytest.raises(UserError, match=said):
        apply(edited, [msgspec.structs.replace(edit, **changes)])


def test_an_update_that_needs_an_earlier_one_of_the_same_boundary_stays():
    """The mean of new weights is added to others: the conditional would need its own result."""

    def step(x: Any, weights: Any) -> Any:
        def micro(carry: Any, n: Any) -> Any:
            (first, second), last = carry, n == 3
            first = jnp.where(last, first + x, first)
            mean = jnp.sum(first @ x)
            return (first, jnp.where(last, second, second * mean)), None

        return lax.scan(micro, weights, jnp.arange(4))[0]

    mesh = mesh_of(MESHES[1])
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("fsdp")))
    edited = edited_of(step, (x, (x, x)), mesh)
    (edit,) = boundaries_of(edited)
    with pytest.raises(UserError, match="needs what the boundary decides on"):
        apply(edited, [edit])
    proposals = [*carried_sums.propose(evaluated_of(edited, shardings={}))]
    assert [one.edits for one in proposals] == [(edit,)], "the search says why it is refused"


@pytest.mark.nightly
@marked(pods)
def test_gradients_of_multi_steps_are_sent_over_hosts_once():
    """The search takes it, explain() says so, and XLA's schedule has no all-reduce in a loop."""
    pod = "a100-sxm-80:2x4@100"
    mesh = jaxoverlap.pod_mesh(pod, {"replica": 2, "fsdp": 4})

    def shape(*dims: int, spec: Any = (), dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    table = shape(24, 1024, spec=(None, "fsdp"))
    up, down = (
        shape(2, 1024, 4096, spec=(None, "fsdp")),
        shape(2, 4096, 1024, spec=(None, None, "fsdp")),
    )
    weights = table, (up, down, shape(2, 1024))
    known = {w.shape: w.sharding.spec for w in jax.tree.leaves(weights)}
    state = jax.eval_shape(optax.MultiSteps(optax.adamw(0.1), 4).init, weights)
    state = jax.tree.map(
        lambda x: shape(*x.shape, spec=known.get(x.shape, ()), dtype=x.dtype), state
    )
    batch = None, ("replica", "fsdp")
    args = (
        weights,
        state,
        shape(4, 16, 512, 1024, spec=batch),
        shape(4, 16, 512, spec=batch, dtype=jnp.int32),
    )
    fn = jax.jit(stepping("MultiSteps", 4, False), donate_argnums=(0, 1))
    step = jaxoverlap.overlap(fn, cluster=pod)
    plan = step.explain(*args)
    assert any(isinstance(edit, UpdateAtBoundary) for edit in plan.edits)
    assert "computes in all of its 4 iterations what it uses in 1" in str(plan)
    spent = jaxoverlap.simulate(step.lower(*args).compile(), pod).spent
    large = [one.collective for one in spent if one.collective.bytes_moved > 1 << 20]
    assert {one.runs for one in large if one.kind == "all-reduce"} == {1}
