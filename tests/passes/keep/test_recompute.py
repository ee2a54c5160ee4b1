"""A step whose layers are recomputed computes the same, and saves nothing but their inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import dots, equations
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.keep import keep, recompute
from jaxoverlap.passes.keep.layers import is_backward
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.remats import remats_of
from jaxoverlap.passes.keep.values import recomputed
from jaxoverlap.plan.edits import Recompute
from tests.passes.keep.drawn import STEPS, B, D, Drawn, L
from tests.passes.keep.test_keep import agree, evaluated, mesh_of, traced


def step_of(jaxpr) -> EditedStep:
    return EditedStep(jaxpr, mesh_of(), (None,) * len(jaxpr.invars))


def compare(drawn: Drawn, random) -> None:
    """Recompute a step's layers, singly or in pairs; keep some of what is recomputed then."""
    args = drawn.arguments()
    jaxpr = traced(drawn, *args)
    edits = recompute.recomputations(jaxpr, random.choice((1, 2)))
    if not edits:
        return
    step = recompute.run(step_of(jaxpr), edits)
    values = recomputed(remats_of(opened(step.jaxpr)))
    some = [one.edit() for one in values if random.random() < 0.5]
    whole = evaluated(jaxpr, args)
    agree(evaluated(step.jaxpr, args), whole)
    if some:
        agree(evaluated(keep.run(step, some).jaxpr, args), whole)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(STEPS, st.randoms(use_true_random=False))
def test_random_steps_compute_the_same(drawn, random):
    compare(drawn, random)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.randoms(use_true_random=False))
def test_many_random_steps_compute_the_same(drawn, random):
    compare(drawn, random)


@pytest.mark.parametrize("policy", ["all", "dots"])
def test_a_scan_stacks_the_layer_s_input_alone(policy):
    drawn = Drawn(("twice", "dropped", "named"), "scan", policy, reverse=False, seed=0)
    args = drawn.arguments()
    jaxpr = traced(drawn, *args)
    before = stacks_of(jaxpr)
    (edit,) = recompute.recomputations(jaxpr)
    step = recompute.run(step_of(jaxpr), [edit])
    assert len(before) > 1 and stacks_of(step.jaxpr) == [(L, B, D)]
    assert edit.values == len(before) - 1 or edit.values == len(before)
    assert edit.bytes_freed >= edit.values and "drawn.py:" in edit.source
    assert str(edit).startswith(f"recompute {edit.values} values of the layer at ")
    written = Drawn(("twice", "dropped", "named"), "scan", "none", reverse=False, seed=0)
    assert len(dots(step.jaxpr)) >= len(dots(traced(written, *args)))


def stacks_of(jaxpr) -> list[tuple[int, ...]]:
    """Return the shapes of what the first scan stacks and the step does not return."""
    scan = next(eqn for eqn in opened(jaxpr).eqns if eqn.primitive.name == "scan")
    stacks = (v for v in scan.outvars if v.aval.ndim and v.aval.shape[0] == L and v.aval.ndim > 1)
    return [v.aval.shape for v in stacks]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_layers_written_one_after_the_other_save_their_inputs(count):
    """Four layers with a residual stream: the more are joined, the fewer values are saved."""

    def loss(w, x):
        for n in range(L):
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
            x = x + jnp.tanh(h @ w[n, 0]) @ w[n, 1].T
        return jnp.mean(x**2)

    w, x = jnp.ones((L, 2, D, 4 * D)) / 9, jnp.ones((B, D))
    jaxpr = jax.jit(jax.grad(loss)).trace(w, x).jaxpr
    (edit, *rest) = recompute.recomputations(jaxpr, count)
    places = [place for one in (edit, *rest) for place in one.places]
    assert len(places) in (L // count, L // count + 1), "the square at the end may be one"
    step = recompute.run(step_of(jaxpr), [edit, *rest])
    agree(evaluated(step.jaxpr, (w, x)), evaluated(jaxpr, (w, x)))
    assert wide(step.jaxpr) == [] and len(wide(jaxpr)) >= L, "nothing wide is saved"


def wide(jaxpr) -> list[str]:
    """Return the values of 4 D columns that the forward pass makes and the backward pass reads."""
    eqns = opened(jaxpr).eqns
    forward = {v for eqn in eqns if not is_backward(eqn) for v in eqn.outvars}
    read = {v for eqn in eqns if is_backward(eqn) for v in compat.variables(eqn.invars)}
    return [str(v) for v in forward & read if v.aval.shape == (B, 4 * D)]


def test_an_edit_that_names_no_layer_is_an_error():
    drawn = Drawn(("twice",), "scan", "all", reverse=False, seed=0)
    jaxpr = traced(drawn, *drawn.arguments())
    for place, said in (((9, 0, 0), "has no body 9"), ((0, 0, 1), "save nothing")):
        edit = Recompute(source="a.py:1", values=1, places=(place,))
        with pytest.raises(ValueError, match=rf"recompute 1 values .*{said}"):
            recompute.run(step_of(jaxpr), [edit])


def test_what_the_backward_scan_slices_already_is_not_given_to_it_again():
    """XLA copies what a loop carries twice: here the layers' inputs, and the weights."""
    drawn = Drawn(("twice", "softmax"), "scan", "dots", reverse=False, seed=0)
    jaxpr = traced(drawn, *(args := drawn.arguments()))
    after = recompute.run(step_of(jaxpr), recompute.recomputations(jaxpr)).jaxpr
    scans = [eqn for eqn, _ in equations(after) if eqn.primitive.name == "scan"]
    assert len(scans) == 2
    for scan in scans:
        given = [atom for atom in scan.invars if not compat.is_literal(atom)]
        assert len(given) == len({*given})
    agree(evaluated(after, args), evaluated(jaxpr, args))
