"""Represent the sharding of values on a mesh as axes by dim, and derive one device's shapes.

Written against jax 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import sharding_impls
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes on each dim, major to minor."""


def spec_of(sharding: Any, mesh: Mesh, ndim: int) -> Spec | None:
    """Return the mesh axes on each dim of a value; None if its sharding splits a mesh axis."""
    if not isinstance(sharding, NamedSharding):
        try:
            spec = sharding_impls.parse_flatten_op_sharding(
                sharding._to_xla_hlo_sharding(ndim), mesh
            )[0]
        except (ValueError, NotImplementedError, StopIteration, AssertionError):
            return None  # it splits a mesh axis
    else:
        spec = sharding.spec
    return compat.axes_by_dim(spec, ndim)


def sharding_of(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def trace_on(mesh: Mesh, fn: Callable[..., Any], structs: Sequence[Any]) -> Any:
    """Trace a function where all axes of a mesh are manual."""
    with jax.disable_jit(False):
        return jax.make_jaxpr(fn, axis_env=list(mesh.shape.items()))(*structs)


def num_blocks(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of shards of a dim that is sharded over these mesh axes."""
    return math.prod(mesh.shape[a] for a in axes)


def block_index(mesh: Mesh, axes: Sequence[str]) -> Any:
    """Return which block of a dim this device has, where its axes are manual."""
    index: Any = 0
    for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def local_structs(
    mesh: Mesh, avals: Sequence[Any], specs: Sequence[Spec]
) -> list[jax.ShapeDtypeStruct]:
    """Return the types of values on one device."""
    return [
        jax.ShapeDtypeStruct(sharding_of(mesh, spec).shard_shape(a.shape), a.dtype)
        for a, spec in zip(avals, specs, strict=True)
    ]
