"""Rings are partitioned only where they may be faster."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from tests.support.pods import pytestmark as pods

pytestmark = pods


def fsdp(size: int, rows: int) -> tuple[jaxoverlap.Overlapped, tuple[jax.ShapeDtypeStruct, ...]]:
    """Return a step whose weight is sharded over 64 GPUs, and gathered for each of two matmuls."""
    mesh = jaxoverlap.pod_mesh("h100-sxm:8x8", {"data": 64})

    def step(x, v, w):
        x = jnp.tanh(x @ v)
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))

    at = NamedSharding(mesh, P("data"))
    shapes = ((64 * rows, size), (size, size), (size, size))
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at) for shape in shapes)
    return jaxoverlap.overlap(jax.jit(step)), args


@pytest.mark.parametrize(("size", "rows", "are_slow"), [(1024, 64, True), (8192, 65536, False)])
def test_rings_whose_hops_take_longer_than_the_step_are_not_partitioned(
    size: int, rows: int, are_slow: bool
):
    """63 hops between hosts for each weight, next to matmuls of microseconds or milliseconds."""
    step, args = fsdp(size, rows)
    plan = step.explain(*args)
    slow = [row for row in plan.trail if "alone take" in row.why_not]
    assert bool(slow) == are_slow
    for row in slow:
        assert row.evaluation.step_s is None
        took = re.search(
            r"its hops between hosts alone take ([\d.]+) ms, .* ([\d.]+) ms", row.why_not
        )
        assert took and float(took[1]) > float(took[2])
