"""Devices compute an optimizer's matrices in turn, with the numbers of plain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.hardware.pods import pod_mesh
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.layouts import matrices
from jaxoverlap.plan.edits import StackMatrices
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.pods import marked
from tests.support.pods import pytestmark as pods

MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 2, "more": 2})
SPECS = (P("data"), P(None, "data"), P("data", "model"))


def iterations(x, scan):
    """Return a matrix after two iterations of Muon's polynomial, written out or in a loop."""

    def once(x, _=None):
        gram = x @ x.T
        return 1.5 * x - (0.5 * gram + 0.1 * gram @ gram) @ x, None

    x = x / (jnp.linalg.norm(x) + 1e-3)
    return jax.lax.scan(once, x, None, length=2)[0] if scan else once(once(x)[0])[0]


def muon(sizes, scan=False):
    """Return a step of a product of matrices, each with an update of its own."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w @ w.T) + x
        return jnp.mean(x**2)

    def step(ws, ms, x):
        value, gs = jax.value_and_grad(loss)(ws, x)
        ms = [0.9 * m + g for m, g in zip(ms, gs, strict=True)]
        ws = [w - 0.1 * iterations(m, scan) for w, m in zip(ws, ms, strict=True)]
        return ws, ms, value

    def made(mesh, spec):
        rng = np.random.default_rng(len(sizes))

        def at(*dims, spec):
            spec = P(*(a if a in mesh.axis_names else None for a in spec))
            value = rng.standard_normal(dims).astype(np.float32) / 4
            return jax.device_put(value, NamedSharding(mesh, spec))

        ws = [at(16, size, spec=spec) for size in sizes]
        ms = [at(16, size, spec=spec) for size in sizes]
        return ws, ms, at(32, 16, spec=("data",))

    return step, made


def compare(sizes, scan, axes, spec):
    mesh = mesh_of(axes)
    step, made = muon(sizes, scan)
    args = made(mesh, spec)
    before = edited_of(step, args, mesh)
    alone = [np.asarray(v) for v in jax.tree.leaves(args)]
    wanted = jax.tree.leaves(jax.jit(step)(*jax.tree.unflatten(jax.tree.structure(args), alone)))
    for edits in matrices.proposals(before):
        results = evaluated(apply(before, edits).jaxpr, args)
        for one, other in zip(results, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=3e-4, atol=1e-5)
    return [*matrices.proposals(before)]


DRAWN = (
    st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(MESHES),
    st.sampled_from(SPECS),
)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(*DRAWN)
def test_numbers_are_those_without_devices(sizes, scan, axes, spec):
    proposed = compare(sizes, scan, axes, spec)
    alike = max(sizes.count(size) for size in sizes)
    assert bool(proposed) == (alike > 1)
    for edits in proposed:
        assert sorted(len(e.first) for e in edits) == sorted(
            n for size in {*sizes} if (n := sizes.count(size)) > 1
        )


@pytest.mark.nightly
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(*DRAWN)
def test_many_numbers_are_those_without_devices(sizes, scan, axes, spec):
    compare(sizes, scan, axes, spec)


def test_matrices_that_need_each_other_are_not_stacked():
    mesh = mesh_of({"data": 8})

    def step(ws, x):
        first = iterations(ws[0], scan=False)
        second = iterations(ws[1] + first, scan=False)
        return [first, second], jnp.sum(x @ ws[0])

    at = NamedSharding(mesh, P("data"))
    w, x = (jax.device_put(jnp.ones(dims), at) for dims in ((16, 16), (32, 16)))
    assert not [*matrices.proposals(edited_of(step, ([w, w], x), mesh))]


def test_an_edit_that_names_no_matrices_is_an_error():
    mesh = mesh_of({"data": 8})
    step, made = muon([8, 8])
    edit = StackMatrices(source="a.py:1", first=(0, 1), axes=("data",))
    with pytest.raises(ValueError, match="no such matrices are computed alike"):
        apply(edited_of(step, made(mesh, P("data")), mesh), [edit])


@marked(pods)
def test_optax_s_muon_is_repaired_on_a_pod():
    mesh = pod_mesh("h100-sxm:8x8", {"fsdp": 64})
    tx = optax.contrib.muon(1e-3)

    def given(*dims):
        at = NamedSharding(mesh, P("fsdp"))
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=at)

    def loss(ws, x):
        for w in ws.values():
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    @jax.jit
    def step(ws, state, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        updates, state = tx.update(gradients, state, ws)
        return optax.apply_updates(ws, updates), state, value

    ws = {f"w{n}": given(2048, 2048) for n in range(4)}
    state = jax.tree.map(
        lambda v: given(*v.shape) if v.ndim > 1 else jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.eval_shape(tx.init, ws),
    )
    overlapped = jaxoverlap.overlap(step, never_slower=False)
    plan = overlapped.explain(ws, state, given(1024, 2048))
    (edit,) = (e for e in plan.edits if isinstance(e, StackMatrices))
    assert len(edit.first) == 4 and edit.axes == ("fsdp",)
    assert plan.price and plan.price.saved_s["matrices"] > 0.5 * plan.price.plain_s
    assert any("multiply matrices of the optimizer that are sharded" in n for n in plan.notes)
