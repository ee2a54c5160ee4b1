"""Replace computed values by the values before them, unless all are finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def all_fine(tree: Any) -> jax.Array:
    """Return whether all elements of a tree are finite, bool []."""
    fine = jnp.ones((), bool)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            fine = fine & jnp.isfinite(leaf).all()
    return fine


def still_fine(before: Any, after: Any) -> jax.Array:
    """Return whether all elements of a tree are finite, or were not before, bool []."""
    fine = jnp.ones((), bool)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            fine = fine & (jnp.isfinite(new) | ~jnp.isfinite(old)).all()
    return fine


def kept_if(fine: jax.Array, after: Any, before: Any) -> Any:
    """Return the values after where `fine` is true, else the values before.

    Args:
        fine: [] for all, or [workers] for trees with a leading dim of workers.
        after, before: trees alike.
    """

    def one(new: jax.Array, old: jax.Array) -> jax.Array:
        dims = (1,) * (new.ndim - fine.ndim)
        return jnp.where((fine > 0).reshape(*fine.shape, *dims), new, old)

    return jax.tree.map(one, after, before)
