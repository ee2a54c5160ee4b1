"""A train step on two mesh axes: one within NVLink domains, and one across them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap

POD, AXES = "h100-sxm:2x8", {"data": 2, "model": 8}
_DEPTH = 4


def two_axes(pod: str = POD, rows: int = 8192, wide: int = 512):
    """A train step on two axes, and its arguments: a scan over layers, and a layer behind it."""
    mesh = jaxoverlap.pod_mesh(pod, AXES)

    def at(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    def layer(x, weights):
        up, down = weights
        h = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ up), at("data", "model"))
        return jax.lax.with_sharding_constraint(x + h @ down, at("data", None)), None

    def loss(weights, x):
        y, _ = jax.lax.scan(layer, x, weights)
        y, _ = layer(y, jax.tree.map(lambda w: w[0], weights))
        return (y.astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value

    def struct(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at(*spec))

    weights = (
        struct((_DEPTH, wide, 4 * wide), None, "data", "model"),
        struct((_DEPTH, 4 * wide, wide), None, "model", "data"),
    )
    return step, (weights, struct((rows, wide), "data", None))
