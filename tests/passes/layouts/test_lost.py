"""Layouts that keep a batch sharded where loops index it; pins of values change no number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.partitioned import SpmdProgram
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.layouts.propose import propose_lookups, propose_starts
from jaxoverlap.plan.edits import PinArgument, PinValue
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.evaluated import evaluated_of

ROWS, TOKENS, WIDTH, LAYERS = 16, 8, 16, 8
MESHES = ({"data": 8}, {"data": 2, "model": 4}, {"data": 4, "model": 2})


def layers(weights: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]


def loss(weights: Any, x: Any) -> Any:
    return jnp.mean(layers(weights, x) ** 2)


def by_reshape(weights: Any, batch: Any, parts: int) -> Any:
    """Scan microbatches that a reshape makes."""

    def add(total: Any, part: Any) -> Any:
        return total + jax.grad(loss)(weights, part), part.sum()

    split = batch.reshape(parts, -1, *batch.shape[1:])
    total, sums = lax.scan(add, jnp.zeros_like(weights), split)
    return weights - total, sums


def by_slice(weights: Any, batch: Any, parts: int) -> Any:
    """Slice microbatches at a loop's index."""
    rows = batch.shape[0] // parts

    def add(number: Any, total: Any) -> Any:
        part = lax.dynamic_slice_in_dim(batch, number * rows, rows)
        return total + jax.grad(loss)(weights, part)

    return weights - lax.fori_loop(0, parts, add, jnp.zeros_like(weights)), batch[0]


def by_index(weights: Any, batch: Any, parts: int) -> Any:
    """Write what is computed of each microbatch at a loop's index."""
    split = batch.reshape(parts, -1, *batch.shape[1:])

    def one(number: Any, done: Any) -> Any:
        part = layers(weights, lax.dynamic_index_in_dim(split, number, keepdims=False))
        return lax.dynamic_update_index_in_dim(done, part, number, 0)

    return weights, lax.fori_loop(0, parts, one, jnp.zeros_like(split))


def at_once(weights: Any, batch: Any, parts: int) -> Any:
    """Orthogonalise the gradients of all layers at once, as Muon does."""
    x = jax.grad(loss)(weights, batch)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-6)
    for _ in range(parts):
        x = 1.5 * x - 0.5 * (x @ x.mT) @ x
    return weights - 0.1 * x, batch.sum()


def by_slots(weights: Any, batch: Any, parts: int) -> Any:
    """Scatter tokens to slots of experts, and look up what is computed of them."""

    def loss_of(w: Any) -> Any:
        x = batch.reshape(-1, WIDTH)
        expert = jnp.argmax(x[:, :parts], -1)
        hot = jax.nn.one_hot(expert, parts, dtype=jnp.int32)
        slot = jnp.sum(jnp.cumsum(hot, 0) * hot, -1) - 1
        slots = jnp.zeros((parts, len(x), WIDTH), x.dtype).at[expert, slot].set(x)
        done = jnp.tanh(jnp.einsum("ecd,edf->ecf", slots, w[:parts]))
        return jnp.mean((x + done[expert, slot]) ** 2)

    return weights - jax.grad(loss_of)(weights), batch.sum()


STEPS = {fn.__name__: fn for fn in (by_reshape, by_slice, by_index, at_once, by_slots)}


def arguments(
    mesh: Mesh, rows: Any, columns: Any, batch: Any, layer: Any = None
) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH
    x = rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
    at = NamedSharding(mesh, P(layer, rows, columns)), NamedSharding(mesh, P(*batch))
    return jax.device_put(weights, at[0]), jax.device_put(x, at[1])


DRAWN = given(
    axes=st.sampled_from(MESHES),
    name=st.sampled_from([*STEPS]),
    parts=st.sampled_from((1, 2, 4)),
    batch=st.sampled_from(((), ("data",), (None, "data"), ("all",), ("data", "other"))),
    columns=st.booleans(),
    by_layer=st.booleans(),
)


@settings(max_examples=8, deadline=None)
@DRAWN
def test_pinned_values_change_no_number(axes, name, parts, batch, columns, by_layer):
    check_numbers(axes, name, parts, batch, columns, by_layer)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@DRAWN
def test_pinned_values_change_no_number_of_300(axes, name, parts, batch, columns, by_layer):
    check_numbers(axes, name, parts, batch, columns, by_layer)


def check_numbers(
    axes: Any, name: str, parts: int, batch: Any, columns: bool, by_layer: bool
) -> None:
    """Compare every layout that is proposed with the step without devices."""
    mesh = mesh_of(axes)
    other = "model" if "model" in axes else None
    spec = tuple({"all": tuple(axes), "other": other}.get(a, a) for a in batch)
    first = (None, "data") if by_layer else ("data", None)
    args = arguments(mesh, first[0], other if columns else None, spec, layer=first[1])

    def step(weights: Any, x: Any) -> Any:
        return STEPS[name](weights, x, parts)

    edited = edited_of(step, args, mesh)
    wanted = jax.jit(step)(*map(np.asarray, args))
    for proposal in propose_starts(evaluated_of(edited)):
        got = evaluated(apply(edited, proposal.edits).jaxpr, args)
        for one, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["by_reshape", "by_slice", "by_index"])
def test_a_batch_that_a_loop_indexes_stays_sharded(name):
    """Some layout that is proposed shards the batch or the tokens of what the loop reads."""
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ("data",))
    edited = edited_of(lambda w, x: STEPS[name](w, x, 2), args, mesh)
    pins = [e for one in propose_starts(evaluated_of(edited)) for e in one.edits]
    values = [e for e in pins if isinstance(e, PinValue)]
    assert bool(values) == (name != "by_slice")
    assert all(("data",) in e.spec[1:] and not e.spec[0] for e in values)
    assert any(not isinstance(e, PinValue) and ("data",) in e.spec[:2] for e in pins)


@pytest.mark.parametrize(("batch", "reasons"), [(("data",), 1), ((None, "data"), 0)])
def test_only_a_slice_along_a_sharded_dim_is_a_reason(batch, reasons):
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, batch)
    edited = edited_of(lambda w, x: by_slice(w, x, 2), args, mesh)
    proposals = [*propose_starts(evaluated_of(edited))]
    said = {why for one in proposals for why in one.notes[PinValue].reasons}
    assert len(said) == reasons and all("slices the batch" in why for why in said)


def test_slots_of_tokens_are_sharded_by_slot():
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ("data",))
    edited = edited_of(lambda w, x: by_slots(w, x, 2), args, mesh)
    *_, last = propose_starts(evaluated_of(edited))
    assert [e.spec for e in last.edits if e.spec == ((), ("data",), ())]
    (reason,) = last.notes[PinValue].reasons
    assert reason.startswith("the scatter at layouts/test_lost.py:")


def test_layers_at_once_are_sharded_by_layers():
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ("data",))
    edited = edited_of(lambda w, x: at_once(w, x, 1), args, mesh)
    *_, last = propose_starts(evaluated_of(edited))
    sharded = [e for e in last.edits if e.spec == (("data",), (), ())]
    assert any(isinstance(e, PinValue) for e in sharded) and len(sharded) > 2


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_are_sharded_by_layer_are_sharded_within_each(nested):
    """Where a scan runs along them, perhaps converted; not the momenta, which no scan reads."""
    mesh = mesh_of({"data": 2, "model": 4})
    weights, x = arguments(mesh, None, "model", ("data",), layer="data")

    def step(weights: Any, momenta: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            w = w.astype(jnp.bfloat16)
            if not nested:
                return loss(w, x.astype(w.dtype))
            parts = jnp.moveaxis(x.reshape(-1, 2, *x.shape[1:]), 1, 0).astype(w.dtype)
            return lax.scan(lambda total, part: (total + loss(w, part), None), 0.0, parts)[0]

        momenta = 0.9 * momenta + jax.grad(loss_of)(weights)
        return weights - momenta, momenta, x.sum()

    proposals = [*propose_starts(evaluated_of(edited_of(step, (weights, weights, x), mesh)))]
    pins = [e for one in proposals for e in one.edits if isinstance(e, PinArgument)]
    assert {pin.argument for pin in pins} == {0}
    assert all(not pin.spec[0] and "data" in pin.spec[1] for pin in pins)
    (reason,) = {why for one in proposals for why in one.notes[PinValue].reasons}
    assert "are sharded along the dim that a scan runs along" in reason


def test_a_batch_without_a_sharding_gets_one():
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ())
    edited = edited_of(lambda w, x: (w - jax.grad(loss)(w, x), x.sum()), args, mesh)
    proposals = [*propose_starts(evaluated_of(edited))]
    (pin, *_) = (e for one in proposals for e in one.edits if isinstance(e, PinArgument))
    assert pin.spec == (("data",), (), ())


def test_a_step_that_loses_nothing_is_asked_nothing_more():
    mesh = mesh_of({"data": 2, "model": 4})
    args = arguments(mesh, "data", "model", ("data",))
    edited = edited_of(lambda w, x: (w - jax.grad(loss)(w, x), x.sum()), args, mesh)
    kinds = {type(e) for one in propose_starts(evaluated_of(edited)) for e in one.edits}
    assert kinds.isdisjoint({PinValue, PinArgument})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (PinArgument(argument=2, name="x", value="f", spec=((),)), "the step has 2 arguments"),
        (PinArgument(argument=1, name="x", value="f", spec=((),)), "the sharding has 1 dims"),
        (PinValue(body=9, position=0, source="a", value="f", spec=()), "no such value"),
        (PinValue(body=0, position=99, source="a", value="f", spec=()), "no such value"),
        (PinValue(body=0, position=0, source="a", value="f", spec=((), (), (), (), ())), "dims"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit, said):
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ("data",))
    edited = edited_of(lambda w, x: by_reshape(w, x, 2), args, mesh)
    with pytest.raises(UserError, match=said):
        apply(edited, [edit])


def test_a_step_is_repaired_and_computes_the_same():
    """By the prices of a pod, on 8 CPU devices; the plan is followed and says what it repaired."""
    mesh = mesh_of({"data": 8})
    args = arguments(mesh, "data", None, ("data",))

    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        return by_reshape(weights, batch, 2)

    overlapped = jaxoverlap.overlap(step, cluster="h100-sxm:8x1", halves=None)
    plan = overlapped.explain(*args)
    assert any(isinstance(edit, PinValue) for edit in plan.edits), str(plan)
    assert "leaves the batch's sharding on a dim that a loop indexes" in str(plan)
    for one, theirs in zip(overlapped(*args), step(*args), strict=True):
        np.testing.assert_allclose(one, theirs, rtol=2e-5, atol=2e-5)
        assert one.sharding.is_equivalent_to(theirs.sharding, one.ndim)
    again = jaxoverlap.overlap(step, plan=jaxoverlap.Plan.from_json(plan.to_json()))
    assert again.explain(*args).edits == plan.edits


def test_a_batch_is_sharded_over_an_axis_that_shards_nothing():
    """Without a constraint over that axis, and without a shard_map."""
    mesh = mesh_of({"data": 2, "model": 4})
    args = arguments(mesh, "data", None, ("data",))

    def step(weights: Any, x: Any) -> Any:
        return weights - jax.grad(loss)(weights, x), x.sum()

    def constrained(weights: Any, x: Any) -> Any:
        return step(weights, lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "model"))))

    proposals = [*propose_starts(evaluated_of(edited_of(step, args, mesh)))]
    pins = [e for one in proposals for e in one.edits if isinstance(e, PinArgument)]
    assert (("data", "model"), (), ()) in [pin.spec for pin in pins]
    reasons = {why for one in proposals for why in one.notes[PinValue].reasons}
    assert reasons == {"nothing is sharded over model: its devices all compute the same"}
    others = propose_starts(evaluated_of(edited_of(constrained, args, mesh)))
    assert not any(isinstance(e, PinArgument) for one in others for e in one.edits)


def test_rows_of_a_table_are_pinned_where_kernels_wait_for_them():
    mesh = mesh_of({"data": 2, "model": 4})
    weights, _ = arguments(mesh, "data", None, ("data",))
    tokens = jax.device_put(np.zeros((ROWS, TOKENS), np.int32), NamedSharding(mesh, P("data")))

    def step(weights: Any, tokens: Any) -> Any:
        return weights - jax.grad(lambda w: loss(w, w[0][tokens]))(weights), tokens.sum()

    edited = edited_of(step, (weights, tokens), mesh)
    first, *_ = propose_starts(evaluated_of(edited))
    text = (
        "HloModule step\n\nENTRY e {\n  ROOT all-gather = f32[1]{0} all-gather(f32[1]{0} p), "
        'metadata={op_name="jit(step)/gather"}\n}\n'
    )
    for waits_s, number in ((0.0, 0), (0.5, 1)):
        program = SpmdProgram({}, (), text, mesh.size)
        estimate = Estimate(1.0, 0.5, {}, {}, {("e", "all-gather"): waits_s})
        known = evaluated_of(apply(edited, first.edits), program=program, notes=first.notes)
        proposals = [*propose_lookups(replace(known, estimate=estimate))]
        values = [e for one in proposals for e in one.edits if isinstance(e, PinValue)]
        assert len(values) == number
