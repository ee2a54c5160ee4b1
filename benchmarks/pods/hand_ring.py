"""An MLP with rings by hand, as a reader of the JAX documentation would write it.

The rings are those of the collective matmuls in "Manual parallelism with shard_map"
(docs.jax.dev/en/latest/notebooks/shard_map.html), written anew for the MLP of
benchmarks/plain_gpt.py: of the gather's two operands the one that moves is sharded along a dim that
the matmul keeps. Nothing ties a hop to its chunk, and gradients are those of autodiff, as there.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.plain_gpt import MLP

AXIS = "tp"


def hand_mlp(mesh: Mesh) -> MLP:
    """Up, GELU, down, both matmuls with a ring over `tp`; weights are gathered over `fsdp`."""
    stream, up_at, down_at = P("fsdp", AXIS, None), P("fsdp", AXIS), P(AXIS, "fsdp")

    @partial(jax.shard_map, mesh=mesh, in_specs=(stream, up_at, down_at), out_specs=stream)
    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        up = lax.all_gather(up, "fsdp", axis=0, tiled=True)
        down = lax.all_gather(down, "fsdp", axis=1, tiled=True)
        return scatter_ring(jax.nn.gelu(gather_ring(x, up)), down)

    return lambda x, up, down, pin: mlp(x, up, down)


def gather_ring(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [batch, sequence / n, hidden] times weight [hidden, mlp / n]: [batch, sequence, mlp / n].

    While one shard of x is multiplied, the next is on its way.
    """
    size, index = lax.axis_size(AXIS), lax.axis_index(AXIS)
    chunks = []
    for step in range(size):
        chunks.append(jnp.einsum("bsd,df->bsf", x, weight))  # of device index - step
        if step < size - 1:
            x = lax.ppermute(x, AXIS, [(i, (i + 1) % size) for i in range(size)])
    return jnp.roll(jnp.concatenate(chunks[::-1], axis=1), (index + 1) * x.shape[1], axis=1)


def scatter_ring(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [batch, sequence, mlp / n] times weight [mlp / n, hidden]: [batch, sequence / n, hidden].

    A sum travels round the ring, and each device adds its part of it.
    """
    size, index = lax.axis_size(AXIS), lax.axis_index(AXIS)
    rows = x.shape[1] // size

    def part(value: jax.Array) -> jax.Array:
        chunk = lax.dynamic_slice_in_dim(x, value % size * rows, rows, axis=1)
        return jnp.einsum("bsf,fd->bsd", chunk, weight)

    total = part(index + 1)
    for step in range(1, size):
        total = lax.ppermute(total, AXIS, [(i, (i - 1) % size) for i in range(size)])
        total += part(index + step + 1)
    return total
