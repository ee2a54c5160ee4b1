"""Pack numbers of 1 to 8 bits into bytes, without a bit to spare."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ONE = np.uint8(1)  # no array of JAX: importing this must not start a backend
PAIR_BYTES = 8  # two float32


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack codes of so many bits, eight codes into `bits` bytes.

    The codes are split into eight runs. Byte j of part p holds bit p of the j-th code of each run,
    the first run's lowest: neighbours are worked on together, as vector units want it.

    Args:
        codes: uint8 [..., n], n a multiple of eight, each below 2**bits.
        bits: 1 to 8.

    Returns:
        uint8 [..., n / 8 · bits].
    """
    runs = codes.reshape(*codes.shape[:-1], 1, 8, -1)
    planes = ((runs >> _numbers(bits, 2)) & _ONE) << _numbers(8, 1)
    return planes.sum(-2, dtype=jnp.uint8).reshape(*codes.shape[:-1], -1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Return the codes that `pack` packed, uint8 [..., n]."""
    parts = packed.reshape(*packed.shape[:-1], 1, bits, -1)
    planes = ((parts >> _numbers(8, 2)) & _ONE) << _numbers(bits, 1)
    return planes.sum(-2, dtype=jnp.uint8).reshape(*packed.shape[:-1], -1)


def pack_with(codes: jax.Array, bits: int, one: jax.Array, other: jax.Array) -> jax.Array:
    """Pack codes, and behind them a pair of float32 [..., 1], which says what they mean."""
    pair = lax.bitcast_convert_type(jnp.concatenate([one, other], -1), jnp.uint8)
    pair = pair.reshape(*codes.shape[:-1], PAIR_BYTES)
    return jnp.concatenate([pack(codes, bits), pair], -1)


def unpack_with(packed: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the codes and the pair that `pack_with` packed."""
    pair = packed[..., -PAIR_BYTES:].reshape(*packed.shape[:-1], 2, 4)
    one, other = jnp.split(lax.bitcast_convert_type(pair, jnp.float32), 2, -1)
    return unpack(packed[..., :-PAIR_BYTES], bits), one, other


def like_matrix(parts: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return padded parts of a matrix's elements, in order, in its shape."""
    return parts.reshape(-1)[: matrix.size].reshape(matrix.shape)


def _numbers(count: int, dims: int) -> jax.Array:
    """Return 0, 1, ... with so many dims behind."""
    return jnp.arange(count, dtype=jnp.uint8).reshape(count, *(1,) * dims)
