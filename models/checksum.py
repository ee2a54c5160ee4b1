"""Checksums of arrays, independent of mesh and processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _of_all(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_of_one(leaf) for leaf in leaves])


def checksums(tree: Any) -> np.ndarray:
    """Return a checksum of each leaf of a tree, uint32 [leaves].

    It is the sum of the elements' bits, each times an odd number that depends on its place, modulo
    2**32: a change of one element always shows. Sums of whole numbers have no order, so that it is
    the same on every mesh.
    """
    leaves = jax.tree.leaves(tree)
    return np.asarray(_of_all(leaves)) if leaves else np.zeros(0, np.uint32)


def _of_one(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, dim
        )
    return (words * (position * jnp.uint32(2654435769) | jnp.uint32(1))).sum(dtype=jnp.uint32)
