"""TopK: average the largest elements of each worker's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap._util.expect import expect
from jaxoverlap._util.limits import checked, number
from jaxoverlap.train.compression.compressors import two_bits
from jaxoverlap.train.compression.compressors.compressor import (
    Averaged,
    OneSetting,
    Setting,
    Worker,
)
from jaxoverlap.train.compression.compressors.packing import PAIR_BYTES, like_matrix, pack, unpack
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, WireRequest

_FRACTIONS = (0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1)
_INDEX_BYTES = 4
CHUNK = 4096  # elements, as SparseLoCo's
_PLACE_BITS = 12  # of an index in a chunk


@dataclass(frozen=True)
@checked
class TopK(OneSetting):
    """TopK with error feedback: each worker sends its own largest elements.

    Bytes grow with the number of workers, as indices differ between them: an all-gather. Source:
    Alistarh et al., The Convergence of Sparsified Gradient Methods (arXiv 1809.10505).

    Args:
        fraction: of the elements, above 0 and at most 1.
        error_feedback: without it, small elements are never sent.
        bits: 2 sends an element as its sign and one of two magnitudes (`two_bits`), and chooses
            elements in chunks of 4096, whose indices take 12 bits: 14 bits an element, and 8 bytes
            a chunk. Of each chunk the fraction is rounded up to a multiple of eight elements.
            With `uniform(..., error_decay=0.95)` and `local_sgd` these are SparseLoCo's outer
            gradients (arXiv 2508.15706), whose 2-bit code book was not found: a reconstruction.

    Raises:
        ValueError: for another fraction, or other bits.
    """

    field: ClassVar[str] = "fraction"
    memory_passes: ClassVar[int] = 40  # mostly the selection
    fraction: Annotated[float, partial(number, above=0, most=1)] = 0.01
    _: KW_ONLY
    error_feedback: bool = True
    bits: int | None = None

    def __post_init__(self) -> None:
        expect(self.bits in (None, 2), "bits", self.bits, "2, or None for values as they are")

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return fractions from 0.1% to 10%, and the default."""
        return tuple(sorted({*_FRACTIONS, self.fraction}))

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix: gather all workers' values and indices, and add them up in order.

        The order makes the sum the same on all workers to the bit.
        """
        if self.bits is not None:
            return (yield from self._average_of_codes(matrix, state, setting, at))
        flat = matrix.reshape(-1)
        _, places = lax.top_k(jnp.abs(flat), _count(flat.size, setting))
        values = flat[places].astype(layer.dtype)
        all_values = yield WireRequest("gather", values)
        all_places = yield WireRequest("gather", places.astype(jnp.int32))

        def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
            where, what = one
            return total.at[where].add(what.astype(jnp.float32), unique_indices=True), None

        total, _ = lax.scan(add, jnp.zeros_like(flat), (all_places, all_values))
        kept = None
        if self.error_feedback:
            kept = flat.at[places].add(-values.astype(jnp.float32), unique_indices=True)
            kept = kept.reshape(matrix.shape)
        return Averaged((total / at.workers).reshape(matrix.shape), kept, state)

    def _average_of_codes(
        self, matrix: jax.Array, state: Any, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix in chunks, values in 2 bits and indices in 12."""
        chunks = _in_chunks(matrix)
        count = _count_of_chunk(setting)
        _, places = lax.top_k(jnp.abs(chunks), count)
        codes = two_bits.quantize(jnp.take_along_axis(chunks, places, -1))
        sent = jnp.concatenate([codes, _pack_places(places)], -1)
        everyone = yield WireRequest("gather", sent)
        cut = codes.shape[-1]

        def add(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            where, what = _unpack_places(one[:, cut:]), two_bits.dequantize(one[:, :cut])
            rows = jnp.arange(len(total))[:, None]
            return total.at[rows, where].add(what, unique_indices=True), None

        total, _ = lax.scan(add, jnp.zeros_like(chunks), everyone)
        kept = None
        if self.error_feedback:
            own, _ = add(jnp.zeros_like(chunks), sent)
            kept = like_matrix(chunks - own, matrix)
        return Averaged(like_matrix(total / at.workers, matrix), kept, state)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        if self.bits is not None:
            count = _count_of_chunk(setting)
            of_chunk = PAIR_BYTES + count * (self.bits + _PLACE_BITS) / 8
            return [("gather", math.ceil(layer.size / CHUNK) * of_chunk)]
        count = _count(layer.size, setting)
        return [("gather", count * layer.itemsize), ("gather", count * _INDEX_BYTES)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return the norm of what each fraction loses of a matrix, by one sort."""
        if self.bits is not None:
            return self._errors_of_codes(matrix, settings)
        squares = jnp.sort(jnp.square(matrix.reshape(-1)))  # rising, so that small ones add first
        left = jnp.concatenate([jnp.zeros(1), jnp.cumsum(squares)])
        kept = jnp.array([squares.size - _count(squares.size, f) for f in settings])
        return jnp.sqrt(left[kept])

    def _errors_of_codes(self, matrix: jax.Array, settings: Sequence[Setting]) -> jax.Array:
        chunks = _in_chunks(matrix)
        counts = [_count_of_chunk(fraction) for fraction in settings]
        sizes, _ = lax.top_k(jnp.abs(chunks), max(counts))  # falling
        whole = jnp.sum(chunks**2)

        def one(count: int) -> jax.Array:
            part = sizes[:, :count]
            lost = jnp.sum((part - two_bits.dequantize(two_bits.quantize(part))) ** 2)
            return jnp.sqrt(jnp.maximum(whole - jnp.sum(part**2), 0) + lost)

        return jnp.stack([one(count) for count in counts])


top_k = TopK  # the name by which it is made


def _count(size: int, fraction: Setting) -> int:
    return min(size, math.ceil(size * fraction))


# -- chunks, whose places are 12 bits -------------------------------------------------------------


def _count_of_chunk(fraction: Setting) -> int:
    return min(CHUNK, 8 * math.ceil(CHUNK * fraction / 8))


def _in_chunks(matrix: jax.Array) -> jax.Array:
    """Return a matrix as [chunks, 4096], with zeros behind."""
    flat = matrix.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % CHUNK)).reshape(-1, CHUNK)


def _pack_places(places: jax.Array) -> jax.Array:
    """Return numbers below 4096, [..., n], as uint8 [..., 1.5 n]."""
    high = pack((places >> 8).astype(jnp.uint8), _PLACE_BITS - 8)
    return jnp.concatenate([(places & 255).astype(jnp.uint8), high], -1)


def _unpack_places(packed: jax.Array) -> jax.Array:
    low, high = jnp.split(packed, [packed.shape[-1] * 8 // _PLACE_BITS], -1)
    return low.astype(jnp.int32) + (unpack(high, _PLACE_BITS - 8).astype(jnp.int32) << 8)
