"""Columns of fused weights are permuted by device; parts and gradients are what they were."""

from __future__ import annotations

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

from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts import columns
from jaxoverlap.plan.edits import InterleaveColumns
from tests.support.edited import edited_of, evaluated, mesh_of
from tests.support.evaluated import evaluated_of

B, S, D, HEADS, DIM, LAYERS = 8, 4, 16, 8, 4, 2
N = HEADS * DIM
MESHES = ({"fsdp": 2, "tp": 4}, {"tp": 8}, {"data": 2, "fsdp": 2, "tp": 2})


def by_split(y: Any) -> Any:
    return jnp.split(y, 3, -1)


def by_slices(y: Any) -> Any:
    return y[..., :N], y[..., N : 2 * N], y[..., 2 * N :]


def by_heads(y: Any) -> Any:
    parts = jnp.unstack(y.reshape(*y.shape[:-1], 3, HEADS, DIM), axis=-3)
    return tuple(part.reshape(*y.shape[:-1], N) for part in parts)


def by_index(y: Any) -> Any:
    y = y.reshape(*y.shape[:-1], 3, HEADS, DIM).transpose(2, 0, 3, 1, 4)
    return tuple(y[n].transpose(0, 2, 1, 3).reshape(*y.shape[1:2], S, N) for n in range(3))


def by_groups(y: Any) -> Any:
    """Return queries of all heads, keys and values of half of them, as grouped attention has."""
    q, k, v = jnp.split(y.reshape(*y.shape[:-1], 2 * HEADS, DIM), [HEADS, 3 * HEADS // 2], axis=-2)
    k, v = (jnp.repeat(x, 2, -2) for x in (k, v))
    return tuple(x.reshape(*y.shape[:-1], N) for x in (q, k, v))


def unevenly(y: Any) -> Any:
    """Return parts that the devices do not divide."""
    a, b, c = jnp.split(y, [N + 2, 2 * N - 2], -1)
    return a[..., :N], b[..., :1], c[..., :N]


PARTS = {fn.__name__: fn for fn in (by_split, by_slices, by_heads, by_index, by_groups)}


def step_of(parts: Any, *, scanned: bool, remat: bool, einsum: str = "bsd,dn->bsn") -> Any:
    def layer(x: Any, w: Any) -> Any:
        fused, out = w
        a, b, c = parts(jnp.einsum(einsum, x, fused))
        return x + (jnp.tanh(a) * b + c) @ out, None

    run = jax.checkpoint(layer) if remat else layer

    def loss(weights: Any, x: Any) -> Any:
        if scanned:
            return jnp.mean(lax.scan(run, x, weights)[0] ** 2)
        for n in range(LAYERS):
            x, _ = run(x, tuple(w[n] for w in weights))
        return jnp.mean(x**2)

    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    return step


def arguments(mesh: Mesh, size: int, *, transposed: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def array(spec: tuple[Any, ...], *shape: int) -> Any:
        spec = tuple(a if a in mesh.shape else None for a in spec)
        value = jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    fused = (None, "tp", "fsdp"), (LAYERS, size, D)
    if not transposed:
        fused = (None, "fsdp", "tp"), (LAYERS, D, size)
    out = array((None, "tp", "fsdp"), LAYERS, N, D)
    return (array(fused[0], *fused[1]), out), array(("fsdp",), B, S, D)


def proposed(step: Any, args: Any, mesh: Mesh) -> tuple[EditedStep, list[InterleaveColumns]]:
    """Return a step, and the edits that are proposed where all columns are sharded over `tp`."""
    edited = edited_of(step, args, mesh)

    def sharded(var: Any) -> Any:
        wide = [dim for dim, size in enumerate(var.aval.shape) if size >= N]
        return tuple(("tp",) if dim in wide[-1:] else () for dim in range(var.aval.ndim))

    known = {
        dot.index: Shardings(*map(sharded, (*dot.eqn.invars, *dot.eqn.outvars)))
        for dot in edited.matmuls
    }
    proposals = [*columns.propose(evaluated_of(edited, shardings=known))]
    return edited, [edit for one in proposals for edit in one.edits]  # type: ignore[misc]


def check_numbers(step: Any, args: Any, mesh: Mesh) -> list[InterleaveColumns]:
    """Compare a step whose columns are permuted with the step without devices."""
    edited, edits = proposed(step, args, mesh)
    wanted = jax.tree.leaves(jax.jit(step)(*jax.tree.map(np.asarray, args)))
    got = evaluated(apply(edited, edits).jaxpr, args)
    for one, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, theirs, rtol=2e-5, atol=2e-5)
    return edits


DRAWN = given(
    axes=st.sampled_from(MESHES),
    name=st.sampled_from([*PARTS]),
    scanned=st.booleans(),
    remat=st.booleans(),
    transposed=st.booleans(),
)


@settings(max_examples=8, deadline=None)
@DRAWN
def test_no_number_changes(axes, name, scanned, remat, transposed):
    check_drawn(axes, name, scanned, remat, transposed)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@DRAWN
def test_no_number_of_300_changes(axes, name, scanned, remat, transposed):
    check_drawn(axes, name, scanned, remat, transposed)


def check_drawn(axes, name, scanned, remat, transposed) -> None:
    einsum = "bsd,nd->bsn" if transposed else "bsd,dn->bsn"
    step = step_of(PARTS[name], scanned=scanned, remat=remat, einsum=einsum)
    mesh = mesh_of(axes)
    size = 2 * N if name == "by_groups" else 3 * N
    edits = check_numbers(step, arguments(mesh, size, transposed=transposed), mesh)
    runs = 1 if scanned else LAYERS
    if name == "by_groups" and axes["tp"] == 8:
        assert not edits, "four heads of keys are not for eight devices"
        return
    forward = 2 if remat else 1
    assert len(edits) >= runs * (forward + 2) - 1, "the first layer's input needs no gradient"
    assert all(edit.axes == ("tp",) for edit in edits)


@pytest.mark.parametrize("name", [*PARTS])
def test_every_matmul_of_a_fused_weight_is_found(name):
    step, mesh = step_of(PARTS[name], scanned=True, remat=False), mesh_of(MESHES[0])
    _, edits = proposed(step, arguments(mesh, 2 * N if name == "by_groups" else 3 * N), mesh)
    sections = (N, N // 2, N // 2) if name == "by_groups" else (N, N, N)
    assert [edit.sections for edit in edits] == [sections] * 3
    assert [edit.parted for edit in edits].count(2) == 1, "one is forward"
    said = "give each device along tp its share of the 3 parts of matmul 0 at "
    assert str(edits[0]).startswith(said)


@pytest.mark.parametrize("parts", [unevenly, lambda y: (y[..., :N],) * 3])
def test_columns_that_are_no_even_parts_stay(parts):
    step, mesh = step_of(parts, scanned=True, remat=False), mesh_of(MESHES[0])
    assert proposed(step, arguments(mesh, 3 * N), mesh)[1] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"site": 99}, "and no 99"),
        ({"sections": (N, 2 * N)}, f"the matmul's parts have ({N}, {N}, {N}) columns"),
        ({"parted": 0}, "it names no dim"),
        ({"dims": (None, None, 2)}, "it names no dim"),
        ({"axes": ("model",)}, "'model' is no axis"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(changes, said):
    step, mesh = step_of(by_split, scanned=True, remat=False), mesh_of(MESHES[0])
    edited, edits = proposed(step, arguments(mesh, 3 * N), mesh)
    with pytest.raises(UserError, match=re.escape(said)):
        apply(edited, [msgspec.structs.replace(edits[0], **changes)])
