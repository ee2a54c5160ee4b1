"""A Megatron block for a pod."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

POD = "h100-sxm:1x8"


def megatron(mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a layer of two matmuls, gathered before and scattered after."""
    at = NamedSharding(mesh, P("tp"))

    def step(x, up, down):
        return jax.lax.with_sharding_constraint(jax.nn.gelu(x @ up) @ down, at)

    shapes = {"x": ((8192, 4096), P("tp")), "up": ((4096, 16384), P(None, "tp"))}
    shapes["down"] = ((16384, 4096), P("tp"))
    args = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes.values()
    )
    return jax.jit(step), args
