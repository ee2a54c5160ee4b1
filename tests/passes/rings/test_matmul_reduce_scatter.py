from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.rings import Ring, check_gradients, check_numbers

KIND = "matmul_reduce_scatter"
RINGS = {
    "lhs free": Ring("ab,bc->ac", P(None, "model"), P("model"), P("model")),
    "rhs free": Ring("ab,bc->ac", P(None, "model"), P("model"), P(None, "model")),
    "only the rhs is sharded": Ring("ab,bc->ac", P(), P("model"), P("model")),
    "batch": Ring("gab,gbc->gac", P(None, None, "model"), P(None, "model"), P("model")),
    "two contracted dims, as attention's output": Ring(
        "gahd,hdc->gac", P("data", None, "model"), P("model"), P("data", "model")
    ),
    "vectors": Ring("b,bc->c", P("model"), P("model"), P("model")),
    "a second axis gathers": Ring(
        "gab,bc->gac", P("data", None, "model"), P("model", "data"), P("data", "model"),
        others=("data all_gather",),
    ),
    "a second axis sums up": Ring(
        "gab,gac->bc", P("data", "model"), P("data", "model"), P("data", "model"),
        others=("data reduce_scatter",),
    ),
    "a dim that both axes shard": Ring(
        "ab,bc->ac", P("data", "model"), P("model"), P(("data", "model"))
    ),
    "a dim that both axes scatter": Ring(
        "ab,bc->ac", P(None, ("data", "model")), P(("data", "model")), P(("data", "model")),
        others=("data reduce_scatter",),
    ),
    "a dim that both axes scatter, model the major": Ring(
        "ab,bc->ac", P(None, ("data", "model")), P(("data", "model")), P(None, ("model", "data")),
        others=("data reduce_scatter",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_numbers(name: str):
    check_numbers(RINGS[name], KIND, 4, np.float32)


@pytest.mark.parametrize("axis_size", [2, 8])
@pytest.mark.parametrize("name", ["lhs free", "rhs free"])
def test_rings_of_other_lengths(name: str, axis_size: int):
    check_numbers(RINGS[name], KIND, axis_size, np.float32)


@pytest.mark.parametrize("axis_size", [2, 4, 8])
def test_bfloat16(axis_size: int):
    check_numbers(RINGS["lhs free"], KIND, axis_size, jnp.bfloat16)


def test_float64():
    with jax.enable_x64(True):
        check_numbers(RINGS["rhs free"], KIND, 4, np.float64)


@pytest.mark.parametrize(
    "name",
    ["lhs free", "rhs free", "batch", "a second axis sums up", "a dim that both axes scatter"],
)
def test_gradients(name: str):
    check_gradients(RINGS[name], KIND, 4)
