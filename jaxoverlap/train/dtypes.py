"""Which dtype numbers are averaged, perturbed and updated in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

FEWEST_BITS = 16  # of a float that is trained: one of 8 loses nearly every update


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is of floats of fewer than 16 bits, which JAX does not promote."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < FEWEST_BITS


def at_least_float32(dtype: Any) -> Any:
    """Return a dtype of floats or complex numbers, or float32 for all others and narrower ones."""
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)
