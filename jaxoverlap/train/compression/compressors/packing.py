"""Pack numbers of 1 to 8 bits into bytes, without a bit to spare."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp

_ONE = jnp.uint8(1)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack codes of so many bits, eight codes into `bits` bytes.

    The codes are cut into eight runs. Byte j of part p holds bit p of the j-th code of each run,
    the first run's lowest: neighbours are worked on together, as vector units want it.

    Args:
        codes: uint8 [..., n], n a multiple of eight, each below 2**bits.
        bits: 1 to 8.

    Returns:
        uint8 [..., n / 8 · bits].
    """
    runs = jnp.split(codes, 8, axis=-1)
    parts = [
        _either(((run >> p) & _ONE) << place for place, run in enumerate(runs)) for p in range(bits)
    ]
    return jnp.concatenate(parts, axis=-1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Return the codes that `pack` packed, uint8 [..., n]."""
    parts = jnp.split(packed, bits, axis=-1)
    runs = [
        _either(((part >> place) & _ONE) << p for p, part in enumerate(parts)) for place in range(8)
    ]
    return jnp.concatenate(runs, axis=-1)


def _either(values: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.or_, values)
