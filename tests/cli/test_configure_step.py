"""A user's own step over the meshes that its builder takes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.cli.configure_step import rank, shown
from tests.support.pods import pytestmark  # noqa: F401 - it marks the tests of this file

STEP = f"{__name__}:build"


def build(mesh):
    """A matmul whose batch is over data and whose columns are over model; 8 columns' worth."""
    if mesh.shape["model"] > 4:
        raise ValueError("columns go over at most 4")

    def like(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def step(weights, x):
        return jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32) ** 2))(weights)

    return jax.jit(step), (like(P(None, "model"), 2048, 8192), like(P("data", None), 8192, 2048))


def test_meshes_are_ranked_and_refusals_told():
    ranked = rank(STEP, "h100-sxm:1x8", ["data", "model"], compiled=1)
    taken = [one for one in ranked if not one.refused]
    assert [one.estimated_s for one in taken] == sorted(one.estimated_s for one in taken)
    assert len(taken) == 3
    assert taken[0].simulated_s and taken[0].simulated_bytes
    assert taken[1].simulated_s is None
    text = shown(ranked, "h100-sxm:1x8")
    assert "columns go over at most 4" in text
    assert "data=2 model=4" in text


def test_a_builder_that_takes_no_mesh_is_told():
    with pytest.raises(ValueError, match="takes no mesh of data, other"):
        rank(f"{__name__}:no_mesh", "h100-sxm:1x8", ["data", "other"], compiled=0)


def no_mesh(mesh):
    raise ValueError(f"no mesh of {tuple(mesh.shape)} will do")
