"""Replace computed values by the values before them, unless all are finite."""

from __future__ import annotations

from collections.abc import Sequence
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


def stays_fine(
    before: Any, after: Any, strict: Sequence[bool] | None = None, *, dims: int = 0
) -> jax.Array:
    """Return whether all elements are finite, were not before, or are a legal -inf; bool.

    Args:
        before, after: trees alike, of a step.
        strict: for each leaf whether -inf is not legal; None for all. It is where a running maximum
            begins and what masks hold, and so no sign of a step that diverged.
        dims: leading dims of all leaves, for each of whose indices the result says so.
    """
    fine = jnp.ones((), bool)
    leaves = jax.tree.leaves(before), jax.tree.leaves(after)
    strict = [True] * len(leaves[0]) if strict is None else strict
    for old, new, is_strict in zip(*leaves, strict, strict=True):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            legal = jnp.isfinite(new) | ~jnp.isfinite(old)
            if not is_strict and not jnp.iscomplexobj(new):
                legal |= jnp.isneginf(new)
            fine = fine & legal.all(range(dims, new.ndim))
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
