"""Draw the random directions that parameters are perturbed along, anywhere and again.

An element of a direction is a function of the key, the step, the draw, the parameter's number and
its row, and of nothing else: not of the mesh, nor of which rows are drawn together. So every
device draws the same, a device that holds a part draws only that part, and a block of layers that
is alone on the device gets what it would get in its stack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATION = "threefry2x32"  # its bits do not depend on how an array is sharded


def in_12_bits(x: jax.Array) -> jax.Array:
    """Round to 12 significant bits, in float32."""
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=11)


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
    """Return the key of a run."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


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
    key = jax.random.fold_in(jax.random.fold_in(draw.key, draw.step), draw.number)
    key = jax.random.fold_in(key, number)

    def of_row(row: Any, shape: tuple[int, ...]) -> jax.Array:
        return in_12_bits(jax.random.normal(jax.random.fold_in(key, row), shape, jnp.float32))

    if row is not None:
        return of_row(row, shape)
    if not shape:
        return of_row(0, ())
    return jax.vmap(lambda row: of_row(row, shape[1:]))(jnp.arange(shape[0]))
