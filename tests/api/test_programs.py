"""`programs()` shows the step after each edit, and each of them computes what the step computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap import overlap, pod_mesh
from jaxoverlap._jax import compat
from tests.support.pods import needs_plugin

AXES = {"data": 2, "model": 4}


def mlp(mesh, *, explicit: bool = False):
    """Return a step in Megatron's layout, and the shardings of its arguments."""

    def put(value, *spec):
        if explicit:
            return jax.sharding.reshard(value, P(*spec))
        return lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))

    @jax.jit
    def step(up, down, x):
        def loss(weights):
            out = {"out_sharding": P("data", None, "model")} if explicit else {}
            h = put(jnp.tanh(jnp.dot(put(x, "data"), weights[0], **out)), "data", None, "model")
            out = {"out_sharding": P("data", "model")} if explicit else {}
            return (put(jnp.dot(h, weights[1], **out), "data", "model") ** 2).mean()

        return jax.value_and_grad(loss)((up, down))

    return step, [P(None, "model"), P("model"), P("data", "model")]


def mesh_of(kind: AxisType):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("halves", [None, 2])
def test_each_program_computes_what_the_step_computes(kind: AxisType, halves: int | None):
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    step, specs = mlp(mesh, explicit=kind is AxisType.Explicit)
    values = [rng.standard_normal(shape).astype("f") for shape in ((32, 64), (64, 32), (8, 16, 32))]

    def placed(mesh):
        pairs = zip(values, specs, strict=True)
        return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in pairs]

    with jax.set_mesh(mesh):
        expected = jax.tree.leaves(step(*placed(mesh)))
        programs = overlap(step, halves=halves).programs(*placed(mesh))
    edits = [program.edit for program in programs]
    assert edits[0] == "the original step" and len(set(edits)) == len(edits) > 1
    assert any("split the batch" in edit for edit in edits) == (halves is not None)
    for program in programs:
        # Between the first and the last, types have no shardings.
        outer = program in (programs[0], programs[-1])
        where = mesh if outer else mesh_of(AxisType.Auto)
        with jax.set_mesh(where):
            got = jax.jit(lambda *a, p=program: compat.evaluate(p.jaxpr, a))(*placed(where))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6, err_msg=program.edit)


def test_a_diff_has_only_what_an_edit_changed():
    mesh = mesh_of(AxisType.Auto)
    step, specs = mlp(mesh)
    args = [
        jax.ShapeDtypeStruct(shape, "f", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((32, 64), (64, 32), (8, 16, 32)), specs, strict=True)
    ]
    first, pinned, *_ = overlap(step, halves=None).programs(*args)
    assert first.diff == first.text
    added = [line for line in pinned.diff.splitlines() if line.startswith("+")]
    gone = [line for line in pinned.diff.splitlines() if line.startswith("-")]
    assert len(gone) == 1 and "in (" in gone[0], "names are kept, so only the results differ"
    assert sum("sharding_constraint" in line for line in added) == 2
    assert str(pinned).startswith(f"# {pinned.edit}\n@@"), "CPU devices have no prices"


def test_a_step_that_stays_as_it_is_has_one_program():
    x = jnp.ones((8, 8))
    x = jax.device_put(x, NamedSharding(mesh_of(AxisType.Auto), P("data")))
    with pytest.warns(UserWarning, match="rewrites nothing"):
        (only,) = overlap(jax.jit(lambda x: x + 1)).programs(x)
    assert only.edit == "the original step" and only.text == str(only).partition("\n")[2]


@needs_plugin
@pytest.mark.pods
def test_programs_for_a_pod_have_estimated_times():
    mesh = pod_mesh("h100-sxm:1x8", AXES)
    step, specs = mlp(mesh)
    args = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((4096, 16384), (16384, 4096), (8, 2048, 4096)), specs, strict=True)
    ]
    overlapped = overlap(step)
    plan, programs = overlapped.explain(*args), overlapped.programs(*args)
    assert plan.price is not None
    assert programs[0].step_s == plan.price.plain_s
    assert programs[-1].step_s == pytest.approx(plan.price.step_s, rel=1e-9)
    assert all("ms (estimated)\n" in str(program) for program in programs)
