"""Gradients of embedding lookups are scattered, not all-reduced whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._util.text import human_bytes
from jaxoverlap.plan.edits import ScatterLookup

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
V, D, B, S = 64, 32, 8, 16


def at(spec: P) -> NamedSharding:
    return NamedSharding(MESH, spec)


def loss(table, head, ids):
    x = jax.lax.with_sharding_constraint(table[ids], at(P("data", "model", None)))
    logits = jax.lax.with_sharding_constraint(jnp.tanh(x) @ head, at(P("data", None, "model")))
    return jnp.mean(logits**2)


def step_of(table: P):
    return jax.jit(
        jax.grad(loss, (0, 1)),
        in_shardings=(at(table), at(P(None, "model")), at(P("data"))),
        out_shardings=(at(table), at(P(None, "model"))),
    )


def arguments(dtype=np.float32):
    rng = np.random.default_rng(0)
    table, head = (rng.standard_normal(s).astype(dtype) for s in ((V, D), (D, V)))
    return table, head, rng.integers(0, V, (B, S))


TABLES = {
    "both dims": (P("model", "data"), ("data", "model")),
    "one dim, two axes": (P(("data", "model"), None), ("data", "model")),
    "two axes the other way": (P(("model", "data"), None), ("data", "model")),
    "columns": (P(None, ("data", "model")), ("data", "model")),
    "one axis, and whole over the other": (P("data", None), ("data",)),
}


def scattered_over(plan: jaxoverlap.Plan) -> set[str]:
    """Return the mesh axes over which the only lookup's gradient is scattered; empty if none."""
    edits = [edit for edit in plan.edits if isinstance(edit, ScatterLookup)]
    assert len(edits) == len(plan.applied) <= 1
    return {axis for edit in edits for _, axis, _ in edit.scatters}


@pytest.mark.parametrize("name", TABLES)
def test_numbers(name: str):
    spec, axes = TABLES[name]
    step, args = step_of(spec), arguments()
    overlapped = jaxoverlap.overlap(step)
    assert scattered_over(overlapped.explain(*args)) == set(axes)
    for mine, plain in zip(overlapped(*args), step(*args), strict=True):
        assert mine.sharding.is_equivalent_to(plain.sharding, 2)
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-7)


def test_no_sum_of_the_whole_table_is_left():
    args = arguments()
    plan = jaxoverlap.overlap(step_of(P("model", "data"))).explain(*args)
    sent = (V * D * 3 // 4 + V * D // 4 // 2) * 4
    assert plan.applied[0].endswith(f": {human_bytes(sent)}.")
    text = jaxoverlap.overlap(step_of(P("model", "data"))).lower(*args).compile().as_text()
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert not any(f"[{V},{D}]" in line for line in sums)


def test_a_table_in_bfloat16():
    """To numpy bfloat16 is no number, so that zeros in it are easily missed."""
    plan = jaxoverlap.overlap(step_of(P("model", "data"))).explain(*arguments(jnp.bfloat16))
    assert scattered_over(plan) == {"data", "model"}


def test_a_table_that_is_whole_everywhere_is_left_to_xla():
    args = arguments()
    assert not scattered_over(jaxoverlap.overlap(step_of(P())).explain(*args))


def test_tangents_of_integers_are_no_numbers():
    """A custom_vjp gives float0 for its integers, which compares with no zero."""

    @jax.custom_vjp
    def mine(table, head, ids):
        return loss(table, head, ids)

    def backward(given, cotangent):
        gradients = jax.grad(loss, (0, 1))(*given)
        none = np.zeros(given[2].shape, jax.dtypes.float0)
        return *(g * cotangent for g in gradients), none

    mine.defvjp(lambda *given: (loss(*given), given), backward)
    weights = at(P("model", "data")), at(P(None, "model"))
    step = jax.jit(
        lambda *given: jax.grad(mine, (0, 1, 2), allow_int=True)(*given)[:2],
        in_shardings=(*weights, at(P("data"))),
        out_shardings=weights,
    )
    args = arguments()
    for mine_, plain in zip(jaxoverlap.overlap(step)(*args), step(*args), strict=True):
        np.testing.assert_allclose(mine_, plain, rtol=1e-5, atol=1e-7)
