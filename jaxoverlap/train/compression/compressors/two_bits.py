"""Two bits a value: its sign, and whether it is larger than the mean magnitude of its bucket."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxoverlap.train.compression.compressors.packing import pack_with, unpack_with


def quantize(values: jax.Array) -> jax.Array:
    """Send each value as plus or minus one of its bucket's two magnitudes.

    The magnitudes are the means of those above the mean and of the others, so a bucket never loses
    more than it has, and with error feedback the error stays bounded.

    Args:
        values: float32 [..., n], a bucket each; n a multiple of eight.

    Returns:
        uint8 [..., n / 4 + 8].
    """
    size = jnp.abs(values)
    high = size > size.mean(-1, keepdims=True)

    def mean_where(which: jax.Array) -> jax.Array:
        count = jnp.maximum(which.sum(-1, keepdims=True), 1)
        return jnp.where(which, size, 0).sum(-1, keepdims=True) / count

    codes = high.astype(jnp.uint8) + 2 * (values < 0).astype(jnp.uint8)
    return pack_with(codes, 2, mean_where(~high), mean_where(high))


def dequantize(packed: jax.Array) -> jax.Array:
    """Return the values that `quantize` sent, float32 [..., n]."""
    codes, low, high = unpack_with(packed, 2)
    size = jnp.where(codes & 1 > 0, high, low)
    return jnp.where(codes & 2 > 0, -size, size)
