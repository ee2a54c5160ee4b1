"""Rings take narrow operands: float8 with a wider result, and whole numbers, which are exact."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap import Skip, ring
from tests.support.precision import error

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SHARDINGS = {  # of the lhs, the rhs and the result
    "all_gather_matmul": (P("model"), P(None, "model"), P(None, "model")),
    "all_gather_matmul, contracted": (P("model"), P("model"), P("model")),
    "matmul_reduce_scatter": (P(None, "model"), P("model"), P("model")),
    "matmul_all_reduce": (P(None, "model"), P("model"), P()),
}
kinds = pytest.mark.parametrize("kind", SHARDINGS)


def both(kind: str, lhs: jax.Array, rhs: jax.Array, result: str) -> tuple[jax.Array, jax.Array]:
    """Return (plain, overlapped) results, once it is certain that there is a ring."""
    one, other, out = (NamedSharding(MESH, spec) for spec in SHARDINGS[kind])

    @jax.jit
    def step(x, w):
        return lax.with_sharding_constraint(lax.dot(x, w, preferred_element_type=result), out)

    arrays = jax.device_put(lhs, one), jax.device_put(rhs, other)
    overlapped = jaxoverlap.overlap(step)
    (entry,) = overlapped.explain(*arrays).entries
    assert isinstance(entry, jaxoverlap.Decision) and entry.kind == kind.split(",")[0]
    got = overlapped(*arrays)
    assert got.dtype == np.dtype(result)
    return step(*arrays), got


@kinds
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_whole_numbers_are_exact(kind: str, dtype: str):
    rng = np.random.default_rng(0)
    low, high = (0, 200) if dtype == "uint8" else (-100, 100)
    lhs, rhs = (jnp.asarray(rng.integers(low, high, s), dtype) for s in ((16, 32), (32, 16)))
    plain, got = both(kind, lhs, rhs, "int32")
    np.testing.assert_array_equal(got, plain)
    np.testing.assert_array_equal(got, np.int64(lhs) @ np.int64(rhs))


@kinds
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("result", ["float32", "bfloat16"])
def test_float8_is_as_exact_as_plain(kind: str, dtype: str, result: str):
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(s)).astype(dtype) for s in ((16, 32), (32, 16)))
    plain, got = both(kind, lhs, rhs, result)
    exact = np.float64(lhs) @ np.float64(rhs)
    eps = float(jnp.finfo(result).eps)
    assert error(got, exact) <= 2 * error(plain, exact) + eps / 2


@pytest.mark.parametrize("by", ["overlap", "operation"])
@kinds
@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]
)
def test_fractions_with_a_whole_result_are_rounded_as_in_plain(kind: str, dtype: str, by: str):
    """Operands are not rounded, and sums only where plain rounds its own: no ring is made."""
    rng = np.random.default_rng(0)
    specs = SHARDINGS[kind]
    lhs, rhs = (
        jax.device_put(
            jnp.asarray(3 * rng.standard_normal(s)).astype(dtype), NamedSharding(MESH, spec)
        )
        for s, spec in zip(((16, 32), (32, 16)), specs, strict=False)
    )

    def of(dot: Any) -> Any:
        numbers = ((1,), (0,)), ((), ())

        @jax.jit
        def step(x: Any, w: Any) -> Any:
            y = dot(x, w, numbers, preferred_element_type=jnp.int32)
            return lax.with_sharding_constraint(y, NamedSharding(MESH, specs[2]))

        return step

    plain = of(lax.dot_general)
    if by == "overlap":
        ours = jaxoverlap.overlap(plain)
        with pytest.warns(UserWarning, match="overlap.. rewrites nothing"):
            (entry,) = ours.explain(lhs, rhs).entries
        got = ours(lhs, rhs)
    else:
        compiled = of(jaxoverlap.dot_general).lower(lhs, rhs).compile()
        (entry,) = jaxoverlap.decisions(compiled)
        got = compiled(lhs, rhs)
    assert isinstance(entry, Skip)
    assert entry.reason == f"{dtype} operands give int32: the sums of chunks would be rounded"
    np.testing.assert_array_equal(got, plain(lhs, rhs))


def test_a_ring_by_hand_refuses_a_whole_result_of_fractions():
    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P("model"), P()), out_specs=P(), check_vma=False)
    def step(x: Any, w: Any) -> Any:
        return ring.all_gather_matmul(x, w, "model", preferred_element_type=jnp.int32)

    with pytest.raises(ValueError, match="preferred_element_type int32 of floating-point operands"):
        step(jnp.ones((16, 32)), jnp.ones((32, 16)))
