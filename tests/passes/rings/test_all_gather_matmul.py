"""Gathering rings give the right numbers; `Ring` also serves the tests of the other two kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.precision import error
from tests.support.rings import Ring, check_gradients, check_numbers, mesh_of

KIND = "all_gather_matmul"
RINGS = {
    "lhs free": Ring("ab,bc->ac", P("model"), P(None, "model"), P(None, "model")),
    "rhs free": Ring("ab,bc->ac", P("model"), P(None, "model"), P("model")),
    "lhs contracted": Ring("ab,bc->ac", P(None, "model"), P(None, "model"), P(None, "model")),
    "rhs contracted": Ring("ab,bc->ac", P("model"), P("model"), P("model")),
    "batch": Ring(
        "gab,gbc->gac", P("model"), P(None, None, "model"), P(None, None, "model")
    ),
    "one of two contracted dims, batched": Ring(
        "gabd,gbcd->gac", P("data", None, "model"), P("data", None, "model"), P("data", None, "model")
    ),
    "four dims and three, as attention's q": Ring(
        "gab,bhd->gahd", P("data", "model"), P(None, "model"), P("data", None, "model")
    ),
    "vector": Ring("b,bc->c", P("model"), P(None, "model"), P("model")),
    "a second axis gathers": Ring(
        "gab,bc->gac",
        P("data", "model"),
        P("data", "model"),
        P("data", None, "model"),
        others=("data all_gather",),
    ),
    "a second axis sums up": Ring(
        "gab,gac->bc", P("data", "model"), P("data", None, "model"), P("data", "model"),
        others=("data reduce_scatter",),
    ),
    "a dim that both axes shard": Ring(
        "ab,bc->ac", P(("data", "model")), P(None, "model"), P("data", "model")
    ),
    "a dim that both axes gather, model the major": Ring(
        "ab,bc->ac", P(("model", "data")), P(None, ("data", "model")), P(None, ("data", "model")),
        others=("data all_gather",),
    ),
    "a contracted dim that both axes gather": Ring(
        "ab,bc->ac", P(("data", "model")), P(("model", "data")), P(("data", "model")),
        others=("data all_gather",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_numbers(name: str):
    check_numbers(RINGS[name], KIND, 4, np.float32)


@pytest.mark.parametrize("axis_size", [2, 8])
@pytest.mark.parametrize("name", ["lhs free", "rhs free", "lhs contracted", "rhs contracted"])
def test_rings_of_other_lengths(name: str, axis_size: int):
    check_numbers(RINGS[name], KIND, axis_size, np.float32)


@pytest.mark.parametrize("name", ["lhs free", "rhs contracted", "a second axis sums up"])
def test_bfloat16(name: str):
    check_numbers(RINGS[name], KIND, 4, jnp.bfloat16)


@pytest.mark.parametrize("name", ["rhs free", "lhs contracted"])
def test_float64(name: str):
    with jax.enable_x64(True):
        check_numbers(RINGS[name], KIND, 4, np.float64)


@pytest.mark.parametrize(
    "name",
    [
        "lhs free",
        "rhs contracted",
        "a second axis gathers",
        "a contracted dim that both axes gather",
    ],
)
def test_gradients(name: str):
    check_gradients(RINGS[name], KIND, 4)


@pytest.mark.parametrize("name", ["lhs free", "lhs contracted"])
def test_the_results_dtype_is_the_one_asked_for(name: str):
    plain, step = RINGS[name].overlapped(mesh_of(4), KIND, preferred_element_type=jnp.float32)
    x, y = RINGS[name].operands(jnp.bfloat16)
    assert step(x, y).dtype == plain(x, y).dtype == jnp.float32
    assert error(step(x, y), RINGS[name].exact(x, y)) < 1e-6


def test_contracted_chunks_are_added_up_in_float32():
    """Sums are in float32: 256 + 1 is 256 in bfloat16, so one device would stay at 256."""
    ring = RINGS["lhs contracted"]
    _, step = ring.overlapped(mesh_of(8), KIND)
    x = np.tile(np.array([256, *[1] * 7], jnp.bfloat16), (8, 1))
    got = step(x, np.ones((8, 8), jnp.bfloat16))
    np.testing.assert_array_equal(got, np.full((8, 8), 263, jnp.bfloat16))
