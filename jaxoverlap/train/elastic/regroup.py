"""Move a state of local updates to other workers, of which some stay and others are new.

Nothing here waits for a process that is gone: what stays is put together from the arrays that each
process has, and only processes that are there take part in the one collective, `from_worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxoverlap.train.placement import is_key


def restricted(state: Any, mesh: Mesh, axis: str) -> Any:
    """Return a state of the workers of a mesh from one of these and others.

    Each device keeps the arrays that it has; nothing is sent or copied.

    Args:
        state: of arrays on a mesh that has all devices of `mesh`; leaves that differ between
            workers have a leading dim of workers, sharded over `axis`.
        mesh: of the workers that stay, in any order.
        axis: of the workers, in both meshes.
    """

    def one(leaf: jax.Array) -> jax.Array:
        spec, shape = _spec_of(leaf), leaf.shape
        if _differs(spec, axis):
            shape = (mesh.shape[axis], *shape[1:])
        return _from_devices(shape, NamedSharding(mesh, spec), _by_device(leaf))

    return _as_data(one, state)


def placed(tree: Any, mesh: Mesh) -> Any:
    """Replicate leaves that all processes have alike over a mesh; leaves on the mesh stay.

    `jax.device_put` would compare the values of all processes of the job, also of those lost.
    """

    def one(leaf: Any) -> jax.Array:
        at = getattr(leaf, "sharding", None)
        if isinstance(at, NamedSharding) and at.mesh == mesh:
            return leaf
        value = np.asarray(leaf)
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, P()), lambda index: value[index]
        )

    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), tree)
    return _as_data(one, arrays)


def without_workers(state: Any, axis: str) -> Any:
    """Return the shapes of `LocalUpdates.consolidate(state)` from those of a state of workers."""

    def one(leaf: Any) -> Any:
        spec = _spec_of(leaf)
        if not _differs(spec, axis):
            return leaf
        at = NamedSharding(leaf.sharding.mesh, P(*spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=at)

    return jax.tree.map(one, state)


def from_worker(tree: Any, shapes: Any, mesh: Mesh, axis: str, row: int) -> Any:
    """Return a tree that some workers have on all workers of a mesh, to the bit.

    Args:
        tree: of arrays, replicated over the workers' axis, on a mesh that has the devices of worker
            `row`; None in processes that have none of it.
        shapes: the same as shapes with shardings on `mesh`; of a leaf that is no array its value.
        mesh, axis: of all workers that take part.
        row: the worker whose values are taken, as an index along `axis`.
    """
    workers = mesh.shape[axis]

    def stacked(shape: Any, leaf: Any) -> jax.Array:
        at = NamedSharding(mesh, P(axis, *_spec_of(shape)))
        own = {} if leaf is None else _by_device(leaf)
        part = at.shard_shape((workers, *shape.shape))
        zeros = np.zeros(part, shape.dtype)
        arrays = {d: own[d][None] if d in own else zeros for d in at.addressable_devices}
        return _from_devices((workers, *shape.shape), at, arrays)

    def of_one(tree: Any) -> Any:
        mine = lax.axis_index(axis) == row

        def one(value: jax.Array) -> jax.Array:
            as_bytes = _as_bytes(value.squeeze(0))
            sent = lax.psum(jnp.where(mine, as_bytes, jnp.zeros_like(as_bytes)), axis)
            return _from_bytes(sent, value.dtype)

        return jax.tree.map(one, tree)

    leaves, treedef = jax.tree.flatten(shapes)
    values = [None] * len(leaves) if tree is None else map(_data_of, jax.tree.leaves(tree))
    plain = jax.tree.map(_data_shape, shapes)
    given = treedef.unflatten(map(stacked, jax.tree.leaves(plain), values))
    program = jax.jit(
        jax.shard_map(
            of_one,
            mesh=mesh,
            in_specs=(jax.tree.map(lambda s: P(axis, *_spec_of(s)), plain),),
            out_specs=jax.tree.map(_spec_of, plain),
            check_vma=False,
        )
    )
    return jax.tree.map(_wrapped, program(given), jax.tree.map(_key_impl, shapes))


def merged(state: Any, stays: Any, axis: str) -> Any:
    """Return a state in which the workers that stay have what they had.

    Args:
        state: of all workers.
        stays: of those that stay, on a part of its mesh; None in processes without any.
        axis: of the workers.
    """
    if stays is None:
        return state

    def one(leaf: jax.Array, own: jax.Array) -> jax.Array:
        if not _differs(_spec_of(leaf), axis):
            return leaf
        arrays = _by_device(leaf) | _by_device(own)
        assert isinstance(leaf.sharding, NamedSharding)
        return _from_devices(leaf.shape, leaf.sharding, arrays)

    return _as_data(one, state, stays)


def _differs(spec: P, axis: str) -> bool:
    return bool(len(spec)) and spec[0] == axis


def _spec_of(leaf: Any) -> P:
    return leaf.sharding.spec


def _by_device(leaf: jax.Array) -> dict[Any, Any]:
    """Return the parts of an array that this process has, by their device."""
    return {shard.device: shard.data for shard in leaf.addressable_shards}


def _from_devices(shape: Sequence[int], at: NamedSharding, parts: dict[Any, Any]) -> jax.Array:
    arrays = [jax.device_put(parts[device], device) for device in at.addressable_devices]
    return jax.make_array_from_single_device_arrays(tuple(shape), at, arrays)


# -- keys of jax.random, as their numbers ---------------------------------------------------------


def _key_impl(leaf: Any) -> str:
    """Return the name of a key's implementation; "" for what is no key."""
    return str(jax.random.key_impl(jnp.zeros((), leaf.dtype))) if is_key(leaf) else ""


def _data_of(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _data_shape(leaf: Any) -> Any:
    if not is_key(leaf):
        return leaf
    found = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=leaf.sharding)


def _wrapped(leaf: jax.Array, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(leaf, impl=impl) if impl else leaf


def _as_data(change: Callable[..., jax.Array], *trees: Any) -> Any:
    """Map over arrays, with keys as their numbers."""

    def one(*leaves: Any) -> jax.Array:
        return _wrapped(change(*map(_data_of, leaves)), _key_impl(leaves[0]))

    return jax.tree.map(one, *trees)


# -- bytes, whose sum with zeros is exact ---------------------------------------------------------


def _as_bytes(value: jax.Array) -> jax.Array:
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint8)
    return value if value.dtype == jnp.uint8 else lax.bitcast_convert_type(value, jnp.uint8)


def _from_bytes(value: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return value.astype(jnp.bool_)
    return value if dtype == jnp.uint8 else lax.bitcast_convert_type(value, dtype)
