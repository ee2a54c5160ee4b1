"""No compression: all gradients in one fused all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxoverlap.train.compression.compressors.compressor import Averaged, Setting, Worker
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, WireRequest


@dataclass(frozen=True, kw_only=True)
class NoCompression:
    """Send matrices as they are."""

    memory_passes: ClassVar[int] = 0
    setting: int = 1
    error_feedback: bool = False

    def with_setting(self, setting: Setting) -> NoCompression:
        """Return the same."""
        return self

    def at(self, setting: Setting, layer: Layer) -> Setting:
        """Return the only setting."""
        return 1

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return the only setting."""
        return (1,)

    def init(self, layer: Layer, key: jax.Array, settings: Sequence[Setting]) -> None:
        """Return no state."""

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix: one mean."""
        mean = yield WireRequest("mean", matrix.astype(layer.dtype))
        return Averaged(mean.astype(jnp.float32), None, state)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        return [("mean", layer.size * layer.itemsize)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return no error."""
        return jnp.zeros(len(settings))


def none() -> NoCompression:
    """Return no compression: what the others are compared with."""
    return NoCompression()
