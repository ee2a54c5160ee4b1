"""Sums over the batch leave their scan as partial sums, and come out as they did."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import overlap
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting.late_sums import late_sums
from jaxoverlap.plan.edits import DropTypes, SumLate, in_order
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods
from tests.support.seeds import some

L, B, S, D, F = 4, 16, 8, 32, 64
FSDP = ("fsdp",)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind,) * 2)


def layer(x, w, dtype):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * w["scale"]
    h = jnp.tanh(h.astype(dtype) @ w["up"] + w["bias"])
    return x + 0.5 * (h @ w["down"]), None


def step_of(*, remat: bool = True, dtype=jnp.float32):
    def loss(w, x):
        run = lambda x, w: layer(x, w, dtype)  # noqa: E731
        x, _ = jax.lax.scan(jax.checkpoint(run) if remat else run, x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), w, gradients), value

    return jax.jit(step, donate_argnums=0)


def arguments(mesh, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    rows = None if AxisType.Explicit in mesh.axis_types else "fsdp"  # JAX gathers none of itself

    def array(spec, *shape, dtype=dtype):
        return jax.device_put(
            jnp.asarray(rng.standard_normal(shape) / 6, dtype), NamedSharding(mesh, spec)
        )

    w = {
        "scale": array(P(), L, D, dtype=jnp.float32),
        "bias": array(P(), L, F),
        "up": array(P(None, rows), L, D, F),
        "down": array(P(None, None, rows), L, F, D),
    }
    return w, array(P("fsdp"), B, S, D)


def proposed(step, *args) -> list[SumLate]:
    """Return the edits for all sums of a step whose batch alone is sharded."""
    jaxpr = flatten(step.trace(*args).jaxpr)
    edited = EditedStep(jaxpr, mesh_of(), (None,) * len(jaxpr.invars))
    lies = {d.index: batch_sharded(d) for d in edited.matmuls}
    return list(late_sums(edited, DimNames(jaxpr), lies))


def batch_sharded(dot) -> Shardings:
    sides = (*dot.eqn.invars, dot.eqn.outvars[0])
    specs = [(FSDP, *[()] * (v.aval.ndim - 1)) if v.aval.ndim == 3 else None for v in sides]
    return Shardings(*specs)


@pytest.mark.parametrize("remat", [True, False])
def test_sums_over_the_batch_are_found(remat):
    edits = proposed(step_of(remat=remat), *arguments(mesh_of()))
    assert len(edits) == 2, "of the scale and of the bias"
    assert {edit.scan for edit in edits} == {1}, "of the backward pass"
    assert all(cut == ((0, FSDP),) for edit in edits for cut in edit.cuts)
    assert str(edits[0]).endswith("of scan 1 over fsdp behind it")


HALVES_AND_REMATS = [(None, True), (2, False), (None, False), (2, True)]


@pytest.mark.rotating
@pytest.mark.parametrize(("halves", "remat"), some(2, HALVES_AND_REMATS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_numbers_shardings_and_donation_are_the_plain_steps(kind, dtype, remat, halves):
    step, mesh = step_of(remat=remat, dtype=dtype), mesh_of(kind)
    mine, theirs = arguments(mesh, dtype), arguments(mesh, dtype)
    plan = overlap(step, halves=halves).explain(*mine)
    late = proposed(step, *arguments(mesh_of(), dtype))
    if plan.split:  # two sums, one of each part
        late = [msgspec.structs.replace(edit, cuts=edit.cuts * 2) for edit in late]
    types = [] if kind == AxisType.Auto or plan.edits else [DropTypes()]
    edits = in_order([*types, *plan.edits, *late])
    followed = overlap(step, plan=msgspec.structs.replace(plan, edits=tuple(edits)))
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(*map(jax.tree.leaves, (followed(*mine), step(*theirs))), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32),
            np.asarray(other, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    assert mine[0]["scale"].is_deleted() and theirs[0]["scale"].is_deleted()


def test_what_the_scan_reads_or_adds_otherwise_stays():
    def loss(w, x):
        def body(carry, w):
            x, seen = carry
            y = jnp.tanh(x @ w)
            total = jnp.sum(y, (0, 1))  # the next step reads it
            return (y + seen, total), (jnp.sum(y * y, (0, 1)) ** 2, jnp.max(y, (0, 1)), total)

        return jax.lax.scan(body, (x, jnp.zeros(D)), w)

    mesh = mesh_of()
    w = jax.device_put(np.ones((L, D, D), "f"), NamedSharding(mesh, P()))
    x = jax.device_put(np.ones((B, S, D), "f"), NamedSharding(mesh, P("fsdp")))
    assert proposed(jax.jit(loss), w, x) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scan": 5}, "the step has 2 scans, counted from 0"),
        ({"output": 9}, "no such sum leaves that scan"),
        ({"cuts": (((0, FSDP),),) * 3}, "no such sum leaves that scan"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(changes, said):
    step, args = step_of(), arguments(mesh_of())
    plan = overlap(step).explain(*args)
    late = msgspec.structs.replace(proposed(step, *args)[0], **changes)
    plan = msgspec.structs.replace(plan, edits=tuple(in_order([*plan.edits, late])))
    with pytest.raises(ValueError, match=said):
        overlap(step, plan=plan).explain(*args)


@marked(pods)
def test_a_pods_loops_have_no_all_reduce_left_where_that_is_faster():
    mesh = jaxoverlap.pod_mesh("gb200:16x4", {"fsdp": 64})
    width, hidden = 2048, 8192

    def array(spec, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    w = {
        "scale": array(P(), L, width, dtype=jnp.float32),
        "bias": array(P(), L, hidden),
        "up": array(P(None, "fsdp"), L, width, hidden),
        "down": array(P(None, None, "fsdp"), L, hidden, width),
    }
    x = array(P("fsdp"), 64, 2048, width)
    step = step_of(dtype=jnp.bfloat16)
    lowered = overlap(step, never_slower=False, halves=None).lower(w, x)
    late = [edit for edit in lowered.plan.edits if isinstance(edit, SumLate)]
    assert len(late) == 2 and "2 sums leave their scan" in str(lowered.plan)
    compiled = lowered.compile()
    bodies = re.findall(r"^%?while_body.*?^}", compiled.as_text(), re.M | re.S)
    assert not any("all-reduce" in body for body in bodies)
    others = tuple(e for e in lowered.plan.edits if not isinstance(e, SumLate))
    without = overlap(step, plan=msgspec.structs.replace(lowered.plan, edits=others))
    assert compiled.simulate().step_s < without.lower(w, x).compile().simulate().step_s
