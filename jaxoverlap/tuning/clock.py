"""Time compiled steps on the devices that are here, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 7


def medians_s(
    steps: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    repeats: int = REPEATS,
) -> list[float]:
    """Time each step in seconds: the median of several runs, one step after the other in turns.

    Turns let other load on the machine meet all steps alike. The first turn is not counted. Each
    run gets arguments of its own, for a step may donate them.

    Args:
        steps: compiled steps, all for the same arguments.
        args, kwargs: trees of arrays, or of ShapeDtypeStructs, for which arrays of ones are made.
    """
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, mine in zip(steps, taken, strict=True):
            fresh, named = jax.block_until_ready(jax.tree.map(_fresh, (args, kwargs)))
            began = time.perf_counter()
            jax.block_until_ready(step(*fresh, **named))
            if turn:
                mine.append(time.perf_counter() - began)
    return [statistics.median(mine) for mine in taken]


def _fresh(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jnp.ones(value.shape, value.dtype, device=value.sharding)
    return jnp.copy(value) if isinstance(value, jax.Array) else value
