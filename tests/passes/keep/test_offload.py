"""A step that offloads values computes the same bits, and its device stacks none of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxoverlap
from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.keep.layers import is_backward
from jaxoverlap.passes.keep.offload import offloads, saved
from jaxoverlap.plan.edits import Keep, Offload
from tests.passes.keep.drawn import STEPS, B, D, Drawn, L
from tests.passes.keep.test_keep import evaluated, mesh_of, traced, values_of
from tests.support.seeds import some


def kept(jaxpr, choose=lambda n: True) -> EditedStep | None:
    values = [one.edit() for n, one in enumerate(values_of(jaxpr)) if choose(n)]
    step = EditedStep(jaxpr, mesh_of(), (None,) * len(jaxpr.invars))
    return apply(step, values) if values else None


def offloaded(step: EditedStep) -> EditedStep:
    return apply(step, offloads(step, step.edits))


def compare(drawn: Drawn, choose) -> EditedStep | None:
    """Offload what can be of some kept values, and compare the bits."""
    args = drawn.arguments()
    before = kept(traced(drawn, *args), choose)
    if before is None:
        return None
    after = offloaded(before)
    assert [v.aval for v in after.jaxpr.outvars] == [v.aval for v in before.jaxpr.outvars]
    for one, other in zip(evaluated(after.jaxpr, args), evaluated(before.jaxpr, args), strict=True):
        np.testing.assert_array_equal(one, other)
    return after


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(STEPS, st.randoms(use_true_random=False))
def test_random_steps_compute_the_same_bits(drawn, random):
    compare(drawn, lambda n: random.random() < 0.5)


@pytest.mark.nightly
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.randoms(use_true_random=False))
def test_many_random_steps_compute_the_same_bits(drawn, random):
    compare(drawn, lambda n: random.random() < 0.5)


@pytest.mark.parametrize("way", ["scan", "micro-batches", "nested"])
def test_the_stacks_of_scans_are_offloaded(way):
    after = compare(Drawn(("twice", "dropped"), way, "none", reverse=False, seed=0), lambda n: True)
    assert after is not None and after.has(Offload)
    host = {
        compat.type_text(v)
        for eqn, _ in equations(after.jaxpr)
        if eqn.primitive.name == "scan"
        for v in eqn.outvars
        if compat.in_host_memory(v)
    }
    wanted = {edit.value for edit in after.edits if isinstance(edit, Offload)}
    assert len(host) == len(wanted), "each type of value, with the steps of the scan in front"


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("way", ["micro-batches", "unrolled"])
def test_all_that_waits_is_offloaded(policy, way):
    drawn = Drawn(("twice", "gathered"), way, policy, reverse=True, seed=1)
    jaxpr = traced(drawn, *(args := drawn.arguments()))
    step = EditedStep(jaxpr, mesh_of(), (None,) * len(jaxpr.invars))
    edits = saved(jaxpr)
    rows = B // 2 if way == "micro-batches" else B
    assert f"float32[{rows},{D}]" in {edit.value for edit in edits}, "the layers' inputs"
    assert all(edit.bytes_offloaded > 0 for edit in edits)
    after = apply(step, edits)
    for one, other in zip(evaluated(after.jaxpr, args), evaluated(jaxpr, args), strict=True):
        np.testing.assert_array_equal(one, other)


def test_values_of_layers_written_one_after_the_other_are_offloaded():
    drawn = Drawn(("twice", "dropped"), "unrolled", "none", reverse=False, seed=0)
    after = compare(drawn, lambda n: True)
    assert after is not None
    edits = [edit for edit in after.edits if isinstance(edit, Offload)]
    assert edits and all(len(edit.places) == L - 1 for edit in edits), "one is read back first"
    eqns = after.jaxpr.eqns
    copies = [eqn for eqn in eqns if eqn.primitive.name == "device_put"]
    stored = [eqn for eqn in copies if compat.in_host_memory(eqn.outvars[0])]
    assert len(stored) == len({place for edit in edits for place in edit.places})
    assert len(copies) == 2 * len(stored)
    backward = [n for n, eqn in enumerate(eqns) if is_backward(eqn)]
    assert eqns.index(stored[-1]) < backward[0], "all are stored in the forward pass"
    brought = [eqn for eqn in copies if eqn not in stored]
    assert eqns.index(brought[0]) > backward[0], "and come back one by one"
    assert eqns.index(brought[-1]) > backward[len(backward) // 2]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "halves", "way"),
    some(
        2,
        [
            (AxisType.Auto, None, "scan"),
            (AxisType.Auto, None, "unrolled"),
            (AxisType.Auto, 2, "scan"),
            (AxisType.Auto, 2, "unrolled"),
            (AxisType.Explicit, None, "scan"),
            (AxisType.Explicit, None, "unrolled"),
        ],
    ),
)
def test_a_plan_offloads_on_eight_devices(kind, halves, way, tmp_path):
    drawn = Drawn(("twice", "dropped", "gelu"), way, "none", reverse=True, seed=3)
    step, args = drawn.step, drawn.arguments(mesh_of(kind))
    if kind == AxisType.Explicit:  # a gathered weight, as JAX gathers none of itself
        w, x, key = args
        args = jax.device_put(w, jax.NamedSharding(x.sharding.mesh, jax.P())), x, key
    options = dict(keep=("drawn.py:*",), halves=halves)
    plan = jaxoverlap.overlap(step, **options).explain(*args)
    edits = [*plan.edits]
    last = max(n for n, edit in enumerate(edits) if isinstance(edit, Keep))
    found = offloads(applied(step, args, edits[: last + 1]), kept_of(edits))
    assert found
    edits[last + 1 : last + 1] = found
    with_them = msgspec.structs.replace(plan, edits=tuple(edits))
    with_them.write(tmp_path / "plan.json")
    copies = [jax.tree.map(jnp.copy, args) for _ in range(2)]
    after = jaxoverlap.overlap(step, plan=tmp_path / "plan.json")(*copies[0])
    before = jaxoverlap.overlap(step, plan=plan)(*copies[1])
    for one, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def kept_of(edits) -> list[Keep]:
    return [edit for edit in edits if isinstance(edit, Keep)]


def applied(step, args, edits) -> EditedStep:
    jaxpr = flatten(step.trace(*args).jaxpr)
    mesh = args[1].sharding.mesh
    return apply(EditedStep(jaxpr, mesh, (None,) * len(jaxpr.invars)), edits)


@pytest.mark.parametrize("place", [(9, 0, 2), (0, 99, 2), (0, 0, 0)])
def test_an_edit_that_names_no_stack_is_refused(place):
    args = (drawn := Drawn(("twice",), "scan", "none", reverse=False, seed=0)).arguments()
    step = kept(traced(drawn, *args))
    assert step is not None
    with pytest.raises(UserError, match="offload float32"):
        apply(step, [Offload(source="x.py:1", value="float32[16,8]", places=(place,))])


def test_the_edit_in_words():
    edit = Offload(source="x.py:1", value="f32[2]", places=((0, 1, 2),), bytes_offloaded=2_100_000)
    assert str(edit) == "offload f32[2] of x.py:1, 2.1 MB to the host"
