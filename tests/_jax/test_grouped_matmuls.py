"""Grouped matmuls are lowered for a pod as batched ones, and for nothing else."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax.grouped_matmuls import even_groups
from tests.support.pods import needs_plugin

D = lax.RaggedDotDimensionNumbers

CASES = {  # dimension numbers, and shapes of the operands, with 12 rows in 3 groups
    "forward": (D((((1,), (1,)), ((), ())), (0,), (0,)), (12, 5), (3, 5, 7)),
    "gradient of the rows": (D((((1,), (2,)), ((), ())), (0,), (0,)), (12, 7), (3, 5, 7)),
    "gradient of the weights": (D((((0,), (0,)), ((), ())), (0,), ()), (12, 5), (12, 7)),
    "groups last": (D((((1,), (0,)), ((), ())), (0,), (2,)), (12, 5), (5, 7, 3)),
    "batched": (D((((2,), (2,)), ((0,), (0,))), (1,), (1,)), (2, 12, 5), (2, 3, 5, 7)),
    "rows are the batch": (D((((1,), (1,)), ((0,), (0,))), (0,), ()), (12, 5), (12, 5, 7)),
}


@pytest.mark.parametrize("case", CASES)
def test_where_groups_are_even_the_batched_matmul_is_the_grouped_one(case):
    numbers, lhs, rhs = CASES[case]
    x, w = (
        np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate((lhs, rhs))
    )
    sizes = jnp.full((*lhs[:1], 3) if case == "batched" else (3,), 4)
    expected = lax.ragged_dot_general(x, w, sizes, numbers)
    made = even_groups(x, w, sizes, numbers=numbers, dtype=None, rows={})
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [12, 6, 7, 2])
def test_rows_without_a_token_are_not_computed(rows):
    numbers, lhs, rhs = CASES["forward"]
    x, w = jnp.ones(lhs), jnp.ones(rhs)
    made = even_groups(x, w, jnp.full((3,), 4), numbers=numbers, dtype=None, rows={12: rows})
    assert made.shape == (12, 7)
    assert np.count_nonzero(made[:, 0]) == max(rows // 3, 1) * 3


def layer(x, w, *, room: int):
    """Send 64 rows of each of 8 devices to a buffer with room for more, and multiply."""
    even = jnp.full((8,), 8)
    there = lax.ragged_all_to_all(
        x, jnp.zeros((room, x.shape[1]), x.dtype), jnp.arange(8) * 8, even,
        jnp.full((8,), lax.axis_index("x") * 8), even, axis_name="x",
    )  # fmt: skip
    return lax.ragged_dot(there, w, jnp.full((4,), 16))


@needs_plugin
def test_a_pod_multiplies_rows_with_one_weight_and_only_those_that_are_sent():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
        for s in ((512, 128), (32, 128, 256))
    )
    for room in (64, 512):
        step = jax.shard_map(
            lambda x, w, room=room: layer(x, w, room=room), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
            check_vma=False,
        )  # fmt: skip
        text = jax.jit(step).lower(x, w).as_text()
        (dot,) = re.findall(r"stablehlo.dot_general .*", text)
        assert "tensor<4x16x128xbf16>" in dot and "tensor<4x128x256xbf16>" in dot
        assert "ragged_dot" not in text


@needs_plugin
def test_an_export_for_gpus_keeps_the_grouped_matmul():
    jaxoverlap.pod_mesh("h100-sxm:1x8", {"x": 8})
    _, lhs, rhs = CASES["forward"]
    shapes = jax.ShapeDtypeStruct(lhs, jnp.bfloat16), jax.ShapeDtypeStruct(rhs, jnp.bfloat16)
    step = jax.jit(lambda x, w: lax.ragged_dot(x, w, jnp.full((3,), 4)))
    exported = jax.export.export(step, platforms=["cuda"])(*shapes)
    assert "ragged_dot" in exported.mlir_module()
