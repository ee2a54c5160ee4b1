"""Draw the random directions that parameters are perturbed along, anywhere and again.

An element of a direction is a function of the key, the step, the draw, the parameter's number and
its index in the first dim, and of nothing else: not of the mesh, nor of what is sampled together.
So every device samples the same, a device that holds a shard samples only that shard, and a block
of layers that is alone on the device gets what it would get in its stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxoverlap.train import arguments
from jaxoverlap.train.dtypes import at_least_float32

IMPLEMENTATION = "threefry2x32"  # its bits do not depend on how an array is sharded


def in_12_bits(x: jax.Array) -> jax.Array:
    """Round to 12 significant bits, in float32; in float64 what is float64."""
    wide = x.astype(at_least_float32(x.dtype))
    exponent_bits = jnp.finfo(wide.dtype).nexp
    return jax.lax.reduce_precision(wide, exponent_bits=exponent_bits, mantissa_bits=11)


class Draw(NamedTuple):
    """The address of one direction of all parameters.

    Attributes:
        key: the run's; a typed key of threefry.
        step: int32 [], the step that it is for.
        number: which of the step's directions it is.
    """

    key: jax.Array
    step: jax.Array
    number: jax.Array | int = 0


def new_key(seed: int) -> jax.Array:
    """Return the key of a run.

    Raises:
        ValueError: if the seed is no whole number of 32 bits.
    """
    return jax.random.key(arguments.seed("seed", seed), impl=IMPLEMENTATION)


def numbers(params: Any) -> Any:
    """Number the parameters in the order of the flattened tree."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, range(len(leaves)))


def direction(
    draw: Draw, number: int, shape: tuple[int, ...], row: jax.Array | int | None = None
) -> jax.Array:
    """Draw one parameter's direction: standard normal in 12 bits, float32 [*shape].

    Each row of the first dim has a key of its own.

    Args:
        draw: which direction.
        number: the parameter's.
        shape: the parameter's; without its first dim where `row` is given.
        row: draws this row alone.
    """

    def one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return in_12_bits(jax.random.normal(key, shape, jnp.float32))

    return _by_rows(one, draw, number, shape, row)


def chances(
    draw: Draw, number: int, shape: tuple[int, ...], row: jax.Array | int | None = None
) -> jax.Array:
    """Draw numbers between 0 and 1 for one parameter, in 16 bits, float32 [*shape].

    The arguments are `direction`'s.
    """

    def one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) + 0.5) / 2**16

    return _by_rows(one, draw, number, shape, row)


def stochastic(values: jax.Array, dtype: Any, chance: jax.Array) -> jax.Array:
    """Round float32 values to one of the two nearest values of a dtype, right in the mean.

    Args:
        values: to be rounded.
        dtype: of 16 bits.
        chance: between 0 and 1 for each value.
    """
    nearest = values.astype(dtype)
    left = values - nearest.astype(jnp.float32)
    towards = jnp.where(left > 0, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, towards)
    gap = jnp.abs(other.astype(jnp.float32) - nearest.astype(jnp.float32))
    return jnp.where((jnp.abs(left) > chance * gap) & jnp.isfinite(gap), other, nearest)


def _by_rows(
    make: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    draw: Draw,
    number: int,
    shape: tuple[int, ...],
    row: jax.Array | int | None,
) -> jax.Array:
    """Draw with a key of its own for each row of the first dim."""
    key = jax.random.fold_in(jax.random.fold_in(draw.key, draw.step), draw.number)
    key = jax.random.fold_in(key, number)

    def of_row(row: Any, shape: tuple[int, ...]) -> jax.Array:
        return make(jax.random.fold_in(key, row), shape)

    if row is not None:
        return of_row(row, shape)
    if not shape:
        return of_row(0, ())
    return jax.vmap(lambda row: of_row(row, shape[1:]))(jnp.arange(shape[0]))
