"""Build steps for the `jaxoverlap` command: functions that take a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap


def build(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of two matmuls over the mesh's last axis: a gather and a scatter to hide."""
    return _step(mesh, (8192, 4096, 16384))


def small(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return the same step at a size that a CPU can run."""
    return _step(mesh, (64, 32, 128))


def _step(mesh: Mesh, sizes: tuple[int, int, int]) -> tuple[Any, tuple[Any, ...]]:
    axis = mesh.axis_names[-1]

    def at(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    @jax.jit
    def step(x, up, down):
        inner = jax.lax.with_sharding_constraint(jnp.einsum("sd,df->sf", x, up), at(None, axis))
        return jax.lax.with_sharding_constraint(inner @ down, at(axis, None))

    def like(shape: tuple[int, int], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at(*spec))

    rows, hidden, mlp = sizes
    weights = like((hidden, mlp), None, axis), like((mlp, hidden), axis, None)
    return step, (like((rows, hidden), axis, None), *weights)


def gathered_over_tp(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a matmul on axes data and tp that gathers its result over tp: data alone is faster."""

    def like(*spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec))
        )

    step = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P("data")))
    return step, (like("data"), like(None, "tp"))


def overlapped(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    step, args = build(mesh)
    return jaxoverlap.overlap(step), args


def gathered(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a step that gathers its result, which nothing hides: no matmul becomes a ring."""
    axis = mesh.axis_names[-1]
    x = jax.ShapeDtypeStruct(
        (8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P(axis, None))
    )
    gathered = NamedSharding(mesh, P())
    return jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, gathered)), (x,)


def whole(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a step in which nothing is sharded, so that there is nothing to hide."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    return jax.jit(lambda x: x @ x), (x,)


def no_pair(mesh: Mesh) -> Any:
    return build(mesh)[0]


def broken(mesh: Mesh) -> Any:
    raise RuntimeError("no such checkpoint")
