from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.rings import Ring, check_gradients, check_numbers, mesh_of

KIND = "matmul_all_reduce"
RINGS = {
    "matrix": Ring("ab,bc->ac", P(None, "model"), P("model"), P()),
    "only the lhs is sharded": Ring("ab,bc->ac", P(None, "model"), P(), P()),
    "batched": Ring("gab,gbc->gac", P(None, None, "model"), P(None, "model"), P()),
    "the batch is sharded": Ring("gab,bc->gac", P("data", None, "model"), P("model"), P("data")),
    "two contracted dims": Ring("gahd,hdc->gac", P("data", None, "model"), P("model"), P("data")),
    "vectors": Ring("b,bc->c", P("model"), P("model"), P()),
    "a replicated weight's gradient": Ring(
        "gab,gac->bc", P("data", "model"), P("data", "model"), P(), others=("data all_reduce",)
    ),
    "a second axis gathers": Ring(
        "gab,bc->gac", P("data", None, "model"), P("model", "data"), P("data"),
        others=("data all_gather",),
    ),
    "the only dim to cut is sharded by another axis": Ring(
        "ab,b->a", P("data", "model"), P("model"), P("data")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_numbers(name: str):
    check_numbers(RINGS[name], KIND, 4, np.float32)


@pytest.mark.parametrize("axis_size", [2, 8])
def test_rings_of_other_lengths(axis_size: int):
    check_numbers(RINGS["matrix"], KIND, axis_size, np.float32)


@pytest.mark.parametrize("axis_size", [2, 8])
def test_bfloat16(axis_size: int):
    check_numbers(RINGS["matrix"], KIND, axis_size, jnp.bfloat16)


def test_float64():
    with jax.enable_x64(True):
        check_numbers(RINGS["batched"], KIND, 4, np.float64)


@pytest.mark.parametrize("name", ["matrix", "a replicated weight's gradient"])
def test_gradients(name: str):
    check_gradients(RINGS[name], KIND, 4)


def test_every_device_has_the_same_sum():
    """The sum of a chunk is made on one device and copied: replicas cannot drift apart."""
    ring = RINGS["matrix"]
    _, step = ring.overlapped(mesh_of(8), KIND)
    shards = [np.asarray(s.data) for s in step(*ring.operands(np.float32)).addressable_shards]
    assert len(shards) == 8
    for shard in shards[1:]:
        np.testing.assert_array_equal(shard, shards[0])
