"""Sums that a scan adds into its carry leave it as parts, and come out as they did."""

from __future__ import annotations

import functools
import re
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting import carried_sums
from jaxoverlap.plan.edits import SumCarried
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.evaluated import evaluated_of
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

MICRO, LAYERS, B, S, D, F, WORDS = 3, 2, 8, 4, 8, 16, 24
MESHES = ({"replica": 2, "fsdp": 4}, {"fsdp": 8}, {"replica": 2, "fsdp": 2, "tp": 2})


def layer(x: Any, w: Any) -> Any:
    up, down, scale = w
    return x + jnp.tanh((x * scale) @ up) @ down, None


def loss(weights: Any, x: Any, tokens: Any, remat: bool, scanned: bool) -> Any:
    table, layers = weights
    x = x + table[tokens]
    run = jax.checkpoint(layer) if remat else layer
    if scanned:
        x, _ = lax.scan(run, x, layers)
    else:
        for n in range(LAYERS):
            x, _ = run(x, tuple(w[n] for w in layers))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def accumulated(
    weights: Any,
    x: Any,
    tokens: Any,
    *,
    remat: bool = True,
    scanned: bool = True,
    total: Any = jnp.float32,
) -> Any:
    """Add up the scaled gradients of microbatches in a scan, from a total that is not zero."""

    def accumulate(grads: Any, part: Any) -> Any:
        value, new = jax.value_and_grad(loss)(weights, *part, remat, scanned)
        return jax.tree.map(lambda a, g: a + (0.25 * g).astype(total), grads, new), value

    start = jax.tree.map(lambda w: jnp.full(w.shape, 0.5, total), weights)
    grads, values = lax.scan(accumulate, start, (x, tokens))
    return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, grads), values.mean()


def recurrent(weights: Any, x: Any, tokens: Any) -> Any:
    """One step of a recurrent network, whose iterations share their weights."""
    table, (up, down, _) = weights

    def loss(up: Any, down: Any) -> Any:
        def tick(state: Any, part: Any) -> Any:
            state = jnp.tanh((state + part) @ up[0]) @ down[0]
            return state, jnp.sum(state**2)

        return lax.scan(tick, jnp.zeros(x.shape[1:], x.dtype), x + table[tokens])[1].mean()

    return jax.grad(loss, (0, 1))(up, down)


def arguments(mesh: Mesh, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Return weights that are sharded by `fsdp`, and microbatches that are by all other axes too.

    On a mesh with the axis `tp` the hidden dim is sharded by that.
    """
    rng = np.random.default_rng(0)

    def array(spec: tuple[Any, ...], *shape: int) -> Any:
        value = jnp.asarray(rng.standard_normal(shape) / 4, dtype)
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    tensor, batch = ("tp" if "tp" in mesh.shape else None), batch_of(mesh)
    layers = (
        array((None, "fsdp", tensor), LAYERS, D, F),
        array((None, tensor, "fsdp"), LAYERS, F, D),
        array((), LAYERS, D),
    )
    tokens = jnp.asarray(rng.integers(0, WORDS, (MICRO, B, S)), jnp.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(None, batch)))
    return (array(("fsdp",), WORDS, D), layers), array((None, batch), MICRO, B, S, D), tokens


def batch_of(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis != "tp")


def proposed(edited: EditedStep) -> list[tuple[SumCarried, ...]]:
    """Return the edits that are proposed for a step whose rows are sharded in all matmuls."""

    def sharded(var: Any) -> Any:
        spec = [()] * var.aval.ndim
        if B in var.aval.shape:
            spec[var.aval.shape.index(B)] = batch_of(edited.mesh)
        return tuple(spec) if var.aval.ndim == 3 else None

    known = {}
    for dot in edited.matmuls:
        known[dot.index] = Shardings(*map(sharded, (*dot.eqn.invars, dot.eqn.outvars[0])))
    step = evaluated_of(edited, shardings=known)
    return [one.edits for one in carried_sums.propose(step)]  # type: ignore[misc]


def check_numbers(step: Any, axes: dict[str, int], dtype: Any) -> list[tuple[SumCarried, ...]]:
    """Compare a step with the sums that are proposed with the step without devices."""
    mesh = mesh_of(axes)
    args = arguments(mesh, dtype)
    edited = edited_of(step, args, mesh)
    wanted = jax.tree.leaves(jax.jit(step)(*jax.tree.map(np.asarray, args)))
    proposals = proposed(edited)
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    for edits in proposals:
        got = evaluated(apply(edited, edits).jaxpr, args)
        for one, theirs in zip(got, wanted, strict=True):
            one, theirs = np.asarray(one, np.float32), np.asarray(theirs, np.float32)
            np.testing.assert_allclose(one, theirs, rtol=tolerance, atol=tolerance)
    return proposals


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_sums_of_microbatches_are_added_up_once(remat, scanned):
    step = functools.partial(accumulated, remat=remat, scanned=scanned)
    free, every = check_numbers(step, MESHES[0], jnp.float32)
    assert [edit.carry for edit in every] == [0, 1, 2, 3], "also of the table and of the scale"
    # The scale is not sharded by any axis, so a part has the size of the total anyway.
    assert [edit.axes for edit in free] == [("replica",)] * 3 + [("replica", "fsdp")]
    assert [edit.axes for edit in every] == [("replica", "fsdp")] * 4
    assert str(free[0]).startswith("add up carry 0 of the scan at rewriting/test_carried_sums.py")
    assert str(free[0]).endswith("over replica behind it")


def test_sums_of_a_recurrence_are_added_up_once():
    (every,) = check_numbers(recurrent, MESHES[0], jnp.float32)
    assert [edit.axes for edit in every] == [("replica", "fsdp")] * 2


DRAWN = given(
    axes=st.sampled_from(MESHES),
    remat=st.booleans(),
    scanned=st.booleans(),
    dtype=st.sampled_from((jnp.float32, jnp.bfloat16)),
    total=st.sampled_from((jnp.float32, jnp.bfloat16)),
    recurs=st.booleans(),
)


@settings(max_examples=5, deadline=None)
@DRAWN
def test_no_number_changes(axes, remat, scanned, dtype, total, recurs):
    check_drawn(axes, remat, scanned, dtype, total, recurs)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@DRAWN
def test_no_number_of_300_changes(axes, remat, scanned, dtype, total, recurs):
    check_drawn(axes, remat, scanned, dtype, total, recurs)


def check_drawn(axes, remat, scanned, dtype, total, recurs) -> None:
    step = functools.partial(accumulated, remat=remat, scanned=scanned, total=total)
    narrow = jnp.bfloat16 in (dtype, total)
    assert check_numbers(recurrent if recurs else step, axes, jnp.bfloat16 if narrow else dtype)


def carrying(update: Any) -> Any:
    """Return a step whose scan carries what `update` makes of a total and a new sum."""

    def step(weights: Any, x: Any, tokens: Any) -> Any:
        _, (up, _, _) = weights

        def body(total: Any, part: Any) -> Any:
            return update(total, jnp.einsum("bsd,bse->de", part, part), up), None

        return lax.scan(body, jnp.ones((D, D), x.dtype), x)[0]

    return step


@pytest.mark.parametrize(
    ("update", "number"),
    [
        (lambda total, new, up: total + new, 1),
        (lambda total, new, up: total - new / 3, 1),
        (lambda total, new, up: new + total + 2 * new.T, 1),
        (lambda total, new, up: new - total, 1),
        (lambda total, new, up: 0.9 * total + new, 1),
        (lambda total, new, up: total + (new - total) / 3, 1),
        (lambda total, new, up: (total + new) - (total + new) / 4, 1),
        (lambda total, new, up: total + new + new @ new, 0),
        (lambda total, new, up: total + new**2, 0),
        (lambda total, new, up: total + new * total, 0),
        (lambda total, new, up: total + new + up[0, :, :D], 0),
        (lambda total, new, up: jnp.maximum(total, new), 0),
        (lambda total, new, up: total + new + jnp.sum(total), 0),
    ],
    ids=range(13),
)
def test_only_what_is_added_leaves_a_scan(update, number):
    proposals = check_numbers(carrying(update), MESHES[1], jnp.float32)
    assert [len(edits) for edits in proposals] == [number] * bool(number)


def subtracted(weights: Any, x: Any, tokens: Any) -> Any:
    """Subtract a total that has had something added to it."""

    def body(total: Any, part: Any) -> Any:
        one, other = (jnp.einsum("bsd,bse->de", part, y) for y in (part, part + 1))
        return one - (total + other), None

    return lax.scan(body, jnp.ones((D, D), x.dtype), x)[0]


def scattered(weights: Any, x: Any, tokens: Any) -> Any:
    """Add sums of rows onto ones."""
    _, (up, _, _) = weights

    def body(total: Any, part: Any) -> Any:
        rows, which = part
        return total + jnp.ones((WORDS, F), x.dtype).at[which].add(rows @ up[0]), None

    return lax.scan(body, jnp.ones((WORDS, F), x.dtype), (x, tokens))[0]


@pytest.mark.parametrize(("step", "number"), [(subtracted, 1), (scattered, 0)])
def test_totals_that_are_no_sum_of_parts_stay(step, number):
    assert len(check_numbers(step, MESHES[1], jnp.float32)) == number


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scan": 9}, "scans, counted from 0"),
        ({"carry": 9}, "carries"),
        ({"axes": ("model",)}, "'model' is no axis of the mesh"),
        ({"axes": ()}, "it names no axis, or one twice"),
        ({"axes": ("fsdp", "fsdp")}, "it names no axis, or one twice"),
        ({"sums": ()}, "more sums"),
        ({"sums": ((((0, ("fsdp",)),),),)}, "operands"),
        ({"sums": ((((2, ("fsdp",)),), ((0, ("fsdp",)),)),)}, "dim 2"),
        ({"sums": ((((0, ("fsdp",)), (1, ("fsdp",))), ((0, ("fsdp",)),)),)}, "shards two dims"),
        ({"sums": ((((0, ("replica",)),), ((0, ("replica",)),)),)}, "not over all"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(changes, said):
    mesh = mesh_of(MESHES[0])
    edited = edited_of(carrying(lambda total, new, up: total + new), arguments(mesh), mesh)
    (edits,) = proposed(edited)
    wrong = msgspec.structs.replace(edits[0], **{"axes": ("fsdp",), **changes})
    with pytest.raises(UserError, match=re.escape(said)):
        apply(edited, [wrong])


def test_an_axis_is_on_one_of_two_dims_that_are_added_up():
    """In one matmul it shards the rows, in another one the positions; the sum is over both."""
    mesh = mesh_of(MESHES[1])

    def step(x: Any) -> Any:
        def body(total: Any, part: Any) -> Any:
            return total + jnp.einsum("bsd,bse->de", part, part), None

        return lax.scan(body, jnp.ones((D, D)), x)[0] + jnp.sum(x @ jnp.ones((D, D)))

    x = jnp.asarray(np.random.default_rng(0).standard_normal((MICRO, B, B, D)), jnp.float32)
    args = (jax.device_put(x, NamedSharding(mesh, P(None, "fsdp"))),)
    edited = edited_of(step, args, mesh)
    both = ("fsdp",), ("fsdp",), ()
    known = {dot.index: Shardings(both, both, None) for dot in edited.matmuls}
    (proposal,) = carried_sums.propose(evaluated_of(edited, shardings=known))
    got = evaluated(apply(edited, proposal.edits).jaxpr, args)[0]
    np.testing.assert_allclose(np.asarray(got), np.asarray(step(x)), rtol=1e-3)


@pytest.mark.nightly
@marked(pods)
def test_a_hybrid_step_sends_its_sums_over_hosts_once():
    """The search takes it, explain() says so, and XLA's schedule has no all-reduce in a loop."""
    pod = "a100-sxm-80:2x4@100"
    mesh = jaxoverlap.pod_mesh(pod, {"replica": 2, "fsdp": 4})

    def shape(*dims: int, spec: Any, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    layers = (
        shape(2, 1024, 4096, spec=(None, "fsdp")),
        shape(2, 4096, 1024, spec=(None, None, "fsdp")),
        shape(2, 1024, spec=()),
    )
    batch = batch_of(mesh)
    args = (
        (shape(WORDS, 1024, spec=(None, "fsdp")), layers),
        shape(4, 16, 512, 1024, spec=(None, batch)),
        shape(4, 16, 512, spec=(None, batch), dtype=jnp.int32),
    )
    step = jaxoverlap.overlap(jax.jit(accumulated, donate_argnums=0), cluster=pod)
    plan = step.explain(*args)
    assert any(isinstance(edit, SumCarried) for edit in plan.edits)
    assert "add up carry" in str(plan)
    compiled = step.lower(*args).compile()
    spent = jaxoverlap.simulate(compiled, pod).spent
    large = [one.collective for one in spent if one.collective.bytes_moved > 1 << 20]
    assert {one.runs for one in large if one.kind == "all-reduce"} == {1}
