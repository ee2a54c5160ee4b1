"""Two bits a value: its sign, and whether it is larger than the mean magnitude of its bucket."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.train.compression.compressors.packing import pack, unpack

LEVELS_BYTES = 8  # of a bucket: two magnitudes, float32


def quantize(values: jax.Array) -> jax.Array:
    """Send each value as plus or minus one of its bucket's two magnitudes.

    The magnitudes are the means of those above the mean and of the others, so a bucket never loses
    more than it has, and with error feedback what is kept stays bounded.

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

    levels = jnp.concatenate([mean_where(~high), mean_where(high)], -1)
    codes = high.astype(jnp.uint8) + 2 * (values < 0).astype(jnp.uint8)
    as_bytes = lax.bitcast_convert_type(levels, jnp.uint8).reshape(*values.shape[:-1], LEVELS_BYTES)
    return jnp.concatenate([pack(codes, 2), as_bytes], -1)


def dequantize(packed: jax.Array) -> jax.Array:
    """Return the values that `quantize` sent, float32 [..., n]."""
    codes = unpack(packed[..., :-LEVELS_BYTES], 2)
    levels = packed[..., -LEVELS_BYTES:].reshape(*packed.shape[:-1], 2, 4)
    low, high = jnp.split(lax.bitcast_convert_type(levels, jnp.float32), 2, -1)
    size = jnp.where(codes & 1 > 0, high, low)
    return jnp.where(codes & 2 > 0, -size, size)
