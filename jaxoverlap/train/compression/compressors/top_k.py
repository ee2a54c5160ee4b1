"""TopK: average the largest elements of each worker's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.train.arguments import flag, number
from jaxoverlap.train.compression.compressors.compressor import Averaged, Setting, Worker
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, Request

_FRACTIONS = (0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1)
_INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Send values and places of a fraction of the elements; see `top_k`."""

    memory_passes: ClassVar[int] = 40  # mostly the selection
    fraction: float
    error_feedback: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", number("fraction", self.fraction, above=0, most=1))
        flag("error_feedback", self.error_feedback)

    @property
    def setting(self) -> Setting:
        """Return the fraction of the elements."""
        return self.fraction

    def with_setting(self, setting: Setting) -> TopK:
        """Return the same with another fraction."""
        return replace(self, fraction=setting)

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return the fraction."""
        return float(setting)

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return fractions from 0.1% to 10%, and the default."""
        return tuple(sorted({*_FRACTIONS, self.fraction}))

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> None:
        """Return no state."""

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix: gather all workers' values and places, and add them up in order.

        The order makes the sum the same on all workers to the bit.
        """
        flat = matrix.reshape(-1)
        _, places = lax.top_k(jnp.abs(flat), _count(flat.size, setting))
        values = flat[places].astype(layer.dtype)
        all_values = yield Request("gather", values)
        all_places = yield Request("gather", places.astype(jnp.int32))

        def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
            where, what = one
            return total.at[where].add(what.astype(jnp.float32), unique_indices=True), None

        total, _ = lax.scan(add, jnp.zeros_like(flat), (all_places, all_values))
        kept = None
        if self.error_feedback:
            kept = flat.at[places].add(-values.astype(jnp.float32), unique_indices=True)
            kept = kept.reshape(matrix.shape)
        return Averaged((total / at.workers).reshape(matrix.shape), kept, state)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        count = _count(layer.size, setting)
        return [("gather", count * layer.itemsize), ("gather", count * _INDEX_BYTES)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return the norm of the elements that each fraction leaves, by one sort."""
        squares = jnp.sort(jnp.square(matrix.reshape(-1)))  # rising, so that small ones add first
        left = jnp.concatenate([jnp.zeros(1), jnp.cumsum(squares)])
        kept = jnp.array([squares.size - _count(squares.size, f) for f in settings])
        return jnp.sqrt(left[kept])


def top_k(fraction: float = 0.01, *, error_feedback: bool = True) -> TopK:
    """Return TopK with error feedback: each worker sends its own largest elements.

    Bytes grow with the number of workers, as places differ between them: an all-gather. Source:
    Alistarh et al., The Convergence of Sparsified Gradient Methods (arXiv 1809.10505).

    Args:
        fraction: of the elements, above 0 and at most 1.
        error_feedback: without it, small elements are never sent.

    Raises:
        ValueError: for another fraction.
    """
    return TopK(fraction=fraction, error_feedback=error_feedback)


def _count(size: int, fraction: Setting) -> int:
    return min(size, math.ceil(size * fraction))
