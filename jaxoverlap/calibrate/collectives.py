"""Hold the bodies of the collectives that `--here` times: each takes and gives what it carries."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxoverlap.plan.collectives import PERMUTE

Body = Callable[..., tuple[jax.Array, ...]]


def permute(x: jax.Array) -> tuple[jax.Array, ...]:
    """Send all to the next device."""
    size = lax.axis_size("x")
    return (lax.ppermute(x, "x", [(i, (i + 1) % size) for i in range(size)]),)


def gather(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Gather an array that waits for the last gather's."""
    whole = lax.all_gather(x, "x", tiled=True)
    return x.at[0].set(before[0]), whole


def scatter(x: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """Scatter the sum of an array that waits for the last one's."""
    return x.at[0].set(before[0]), lax.psum_scatter(x, "x", tiled=True)


def reduce(x: jax.Array) -> tuple[jax.Array, ...]:
    """Take the mean over devices."""
    return (lax.psum(x, "x") / lax.axis_size("x"),)


def exchange(x: jax.Array) -> tuple[jax.Array, ...]:
    """Exchange equal parts."""
    return (lax.all_to_all(x, "x", 0, 0, tiled=True),)


# Each has its body, the lengths of the arrays that it carries, and its passes over the bytes.
COLLECTIVES: dict[str, tuple[Body, Callable[[int, int], tuple[int, ...]], int]] = {
    "all-gather": (gather, lambda count, n: (count // n, count), 1),
    "reduce-scatter": (scatter, lambda count, n: (count, count // n), 1),
    "all-reduce": (reduce, lambda count, n: (count,), 2),
    "all-to-all": (exchange, lambda count, n: (count,), 1),
    PERMUTE: (permute, lambda count, n: (count,), 1),
}
