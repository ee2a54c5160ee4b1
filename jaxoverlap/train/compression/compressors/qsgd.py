"""QSGD in buckets: average gradients as integers of a few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap._util.limits import checked, whole
from jaxoverlap.train.compression.compressors import two_bits
from jaxoverlap.train.compression.compressors.compressor import (
    Averaged,
    OneSetting,
    Setting,
    Worker,
)
from jaxoverlap.train.compression.compressors.packing import (
    PAIR_BYTES,
    like_matrix,
    pack_with,
    unpack_with,
)
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.wire import Average, Kind, WireRequest

Levels = Literal["range", "means"]
BUCKET = 512  # elements that share a range


@dataclass(frozen=True)
@checked
class QSGD(OneSetting):
    """Quantisation with stochastic rounding, which is right in the mean.

    Each bucket of 512 elements is rounded to 2**bits values from its least to its greatest, up or
    down by chance, and packed into bytes. Sources: Alistarh et al., QSGD (arXiv 1610.02132), in
    the max-min form of torch_cgx, whose average (scatter, reduce, quantise again, gather) is this
    one.

    Args:
        bits: of an element, 1 to 8.
        error_feedback: whether what rounding loses is added to the next gradient; wanted for
            outer gradients, which come seldom. For normally distributed gradients the error
            settles at 0.24 of one with 4 bits, 0.6 with 3 and about ten times one with 2.
        levels: "range" as above; "means", with 2 bits, sends a value as its sign and one of two
            magnitudes of its bucket (`two_bits`), without chance: biased, and with error feedback
            far closer than 2 bits of the range. For outer gradients of `MuLoCo`'s kind
            (arXiv 2505.23725), whose 2-bit code book was not found: a reconstruction.

    Raises:
        ValueError: for other bits or levels, or one bit with error feedback.
    """

    field: ClassVar[str] = "bits"
    memory_passes: ClassVar[int] = 12  # ranges, codes, packing, and back
    bits: Annotated[int, partial(whole, least=1, most=8)] = 4
    _: KW_ONLY
    error_feedback: bool = False
    levels: Levels = "range"

    def __post_init__(self) -> None:
        if self.error_feedback and self.bits == 1:
            raise ValueError(
                "bits=1 with error_feedback=True: one bit of a bucket's range loses more than the "
                "gradient has, and what is kept would grow without end; give 2 bits or more, or "
                "no error feedback"
            )
        if self.levels == "means" and self.bits != 2:
            raise ValueError(
                f'bits={self.bits} with levels="means": a sign and one of two magnitudes are 2 '
                "bits; give bits=2"
            )

    def candidates(self, layer: Layer) -> tuple[Setting, ...]:
        """Return 2 to 8 bits, and the default; 2 alone where levels are means."""
        if self.levels == "means":
            return (self.bits,)
        return tuple(sorted({*range(2, 9), self.bits}))

    def average(
        self, matrix: jax.Array, state: Any, *, layer: Layer, setting: Setting, at: Worker
    ) -> Average:
        """Average a matrix: parts to their workers, means of parts back to all.

        Both exchanges are quantised; the error of the second is added to that of the part's worker.
        """
        bits, workers = int(setting), at.workers
        first, second = jax.random.split(at.key)
        mine = _in_buckets(matrix, workers)  # [workers, buckets, 512]
        packed = self._quantize(mine, bits, first)
        parts = yield WireRequest("exchange", packed)
        mean = self._dequantize(parts, bits).mean(0)
        again = self._quantize(mean, bits, second)
        gathered = yield WireRequest("gather", again)
        whole = self._dequantize(gathered, bits)
        if not self.error_feedback:
            return Averaged(like_matrix(whole, matrix), None, state)
        kept = mine - self._dequantize(packed, bits)
        lost = (mean - self._dequantize(again, bits)) * workers
        own = lax.dynamic_index_in_dim(kept, at.number, keepdims=False) + lost
        kept = lax.dynamic_update_index_in_dim(kept, own, at.number, 0)
        return Averaged(like_matrix(whole, matrix), like_matrix(kept, matrix), state)

    def _quantize(self, values: jax.Array, bits: int, key: jax.Array) -> jax.Array:
        return two_bits.quantize(values) if self.levels == "means" else quantize(values, bits, key)

    def _dequantize(self, packed: jax.Array, bits: int) -> jax.Array:
        return two_bits.dequantize(packed) if self.levels == "means" else dequantize(packed, bits)

    def requests(self, layer: Layer, setting: Setting, workers: int) -> list[tuple[Kind, float]]:
        """Return kind and bytes of each value that `average` yields for one matrix, in order."""
        part = _buckets(layer.size, workers) * (BUCKET // 8 * int(setting) + PAIR_BYTES)
        return [("exchange", part * workers), ("gather", part)]

    def errors(self, matrix: jax.Array, state: Any, settings: Sequence[Setting]) -> jax.Array:
        """Return the root of the expected square of what a worker's own quantisation loses."""
        x = _in_buckets(matrix, 1)
        if self.levels == "means":
            lost = jnp.linalg.norm(x - two_bits.dequantize(two_bits.quantize(x)))
            return jnp.full(len(settings), lost)
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)

        def one(bits: int) -> jax.Array:
            step = (high - low) / (2**bits - 1)
            place = (x - low) / jnp.where(step > 0, step, 1)
            share = place - jnp.floor(place)
            return jnp.sqrt(jnp.sum(share * (1 - share) * step**2))

        return jnp.stack([one(int(bits)) for bits in settings])


qsgd = QSGD  # the name by which it is made


def quantize(values: jax.Array, bits: int, key: jax.Array) -> jax.Array:
    """Round each bucket to 2**bits values of its range and pack it, its range behind.

    Args:
        values: float32 [..., buckets, 512].
        bits: 1 to 8.
        key: of the rounding.

    Returns:
        uint8 [..., buckets, 64 · bits + 8].
    """
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    place = (values - low) / jnp.where(step > 0, step, 1)
    up = _sixteen_bits(key, values.shape)
    codes = jnp.clip(jnp.floor(place + up), 0, 2**bits - 1).astype(jnp.uint8)
    return pack_with(codes, bits, low, step)


def dequantize(packed: jax.Array, bits: int) -> jax.Array:
    """Return the values that `quantize` rounded to, float32 [..., buckets, 512]."""
    codes, low, step = unpack_with(packed, bits)
    return low + step * codes.astype(jnp.float32)


def _sixteen_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return numbers between 0 and 1 at random, two from each 32 bits, the last dim being even."""
    both = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    halves = jnp.concatenate([both & jnp.uint32(0xFFFF), both >> 16], axis=-1)
    return (halves.astype(jnp.float32) + 0.5) / 2**16


def _buckets(size: int, workers: int) -> int:
    """Return the buckets of each worker's part."""
    return math.ceil(size / (BUCKET * workers))


def _in_buckets(matrix: jax.Array, workers: int) -> jax.Array:
    """Reshape a matrix to [workers, buckets, 512], padded by copies of its last element."""
    missing = _buckets(matrix.size, workers) * workers * BUCKET - matrix.size
    flat = jnp.pad(matrix.reshape(-1), (0, missing), mode="edge")
    return flat.reshape(workers, -1, BUCKET)
