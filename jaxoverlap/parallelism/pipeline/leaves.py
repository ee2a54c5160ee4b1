"""Take leaves of trees apart: which have gradients, and where these are added up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any


def wide_zeros(leaf: jax.Array) -> jax.Array:
    """Return where to add up what is like a leaf: zeros in float32, or its dtype if wider."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def summed_into(total: Tree, part: Tree) -> Tree:
    """Add up gradients in the dtype of the total."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def differentiable(like: Tree, gradients: Tree) -> Tree:
    """Return gradients with None for what has none."""
    return jax.tree.map(lambda a, g: g if is_differentiable(a) else None, like, gradients)


def as_cotangent(like: Tree, gradients: Tree) -> Tree:
    """Return gradients as `jax.vjp` takes them: float0 for what has none."""
    return jax.tree.map(lambda a, g: g if is_differentiable(a) else no_gradient(a), like, gradients)


def dtype_of(leaf: Any) -> Any:
    """Return the dtype of an array, a shape or a number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def no_gradient(leaf: Any) -> np.ndarray:
    """Return the cotangent of what has no gradient."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


def is_differentiable(leaf: Any) -> bool:
    """Return whether a value has a gradient."""
    return bool(jnp.issubdtype(dtype_of(leaf), jnp.inexact))


def picked(tree: Tree, at: jax.Array) -> Tree:
    """Return row `at` of every leaf."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, 0, keepdims=False), tree)
