"""Split a dim into chunks, and run undecomposed collectives with the same chunking.

The local dim of size `outer * chunks * pieces * size` is seen as

    view(outer, chunks, pieces, size)

Chunk `k` is `view[:, k]`, what one device of the ring holds; piece `j` of it is `view[:, k, j]`,
what travels at once. `outer` is more than 1 where another mesh axis, gathered before, is major on
the same dim: then a chunk is not contiguous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_ties = ContextVar("ties", default=True)


@contextlib.contextmanager
def without_ties(without: bool) -> Iterator[None]:
    """Make the rings that are traced in this block without ties, if so.

    XLA:CPU runs what is ready, and merges no matmuls: there a tie only keeps a hop from starting
    while the matmul before it runs.
    """
    token = _ties.set(not without)
    try:
        yield
    finally:
        _ties.reset(token)


def tied[Tree](values: Tree, tie: Callable[[Tree], Tree] = lax.optimization_barrier) -> Tree:
    """Tie values, so that what reads one waits for all; or leave them where ties only delay."""
    return tie(values) if _ties.get() else values


@dataclass(frozen=True)
class Chunking:
    """The split of a dim into chunks and pieces; see the module.

    Attributes:
        chunks: devices of the ring; 1 for a dim that holds one device's chunk.
        pieces: pieces of each chunk.
        outer: shares of another axis, each of which has its own part of every chunk.
    """

    chunks: int
    pieces: int = 1
    outer: int = 1

    def size(self, whole: int) -> int:
        """Return the size of one piece in each outer share.

        Raises:
            ValueError: if a dim of size `whole` cannot be split so.
        """
        parts = self.outer * self.chunks * self.pieces
        if whole % parts:
            outer = f"{self.outer} x " if self.outer > 1 else ""
            raise ValueError(
                f"a dim of size {whole} does not divide into {outer}{self.chunks} chunks of "
                f"{self.pieces} pieces: give it a size that {parts} divides, or take fewer slices"
            )
        return whole // parts

    def shard(self) -> Chunking:
        """Return the chunking of a dim that holds one chunk only."""
        return replace(self, chunks=1)


def take(array: Array, dim: int, cut: Chunking, chunk: Any = None, piece: int = 0) -> Array:
    """Take one piece of one chunk along a dim; of every chunk, in order, if `chunk` is None."""
    size = cut.size(array.shape[dim])
    if chunk is None and cut.pieces == 1:
        return array
    if cut.outer == 1 and (chunk is not None or cut.chunks == 1):
        sizes = _with(array.shape, dim, size)
        starts = _starts(array, dim, cut, chunk, piece, size)
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
    view, starts, sizes = _window(array, dim, cut, chunk, piece)
    taken = lax.dynamic_slice(view, starts, sizes, allow_negative_indices=False)
    return taken.reshape(_with(array.shape, dim, _count(cut, chunk) * size))


def put(
    array: Array, part: Array, dim: int, cut: Chunking, chunk: Any = None, piece: int = 0
) -> Array:
    """Replace what `take` takes of an array by `part`."""
    size = cut.size(array.shape[dim])
    if chunk is None and cut.pieces == 1:
        return part
    if cut.outer == 1 and (chunk is not None or cut.chunks == 1):
        starts = _starts(array, dim, cut, chunk, piece, size)
        return lax.dynamic_update_slice(array, part, starts, allow_negative_indices=False)
    view, starts, sizes = _window(array, dim, cut, chunk, piece)
    part = part.reshape(sizes)
    whole = lax.dynamic_update_slice(view, part, starts, allow_negative_indices=False)
    return whole.reshape(array.shape)


def room(part: Array, dim: int, cut: Chunking, chunk: Any = None) -> Array:
    """Make zeros for all chunks and pieces, of which `part` is one to `put`."""
    size = part.shape[dim] // _count(cut, chunk)
    whole = cut.outer * cut.chunks * cut.pieces * size
    return zeros(_with(part.shape, dim, whole), part.dtype, part)


def zeros(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    """Make zeros to be written into, once `after` is there.

    Plain ones need nothing, so XLA makes them at any time, and makes one buffer for all of a shape:
    those of the head's gathered weight were made before the first layer of a 7B step, with those of
    the embedding's gradient, which comes last.
    """
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), after))
    return jnp.full(shape, zero)


def join(parts: list[Array], dim: int, cut: Chunking) -> Array:
    """Join all pieces of one chunk, in order."""
    if len(parts) == 1:
        return parts[0]
    if cut.outer == 1:
        return lax.concatenate(parts, dim)
    views = [p.reshape(_with(p.shape, dim, cut.outer, 1, p.shape[dim] // cut.outer)) for p in parts]
    whole = sum(p.shape[dim] for p in parts)
    return lax.concatenate(views, dim + 1).reshape(_with(parts[0].shape, dim, whole))


# -- whole collectives ----------------------------------------------------------------------------


def gather(part: Array, dim: int, axis: str, cut: Chunking, *, invarying: bool = False) -> Array:
    """Gather all devices' parts of a dim: view(outer, size) -> view(outer, chunks, size).

    Under `check_vma` only an `invarying` one has a type that says it is alike on all devices.
    """
    to = "invarying" if invarying else "varying"
    if cut.outer == 1:
        return lax.all_gather(part, axis, axis=dim, tiled=True, to=to)
    view = part.reshape(_with(part.shape, dim, cut.outer, -1))
    whole = lax.all_gather(view, axis, axis=dim + 1, to=to)
    return whole.reshape(_with(part.shape, dim, cut.chunks * part.shape[dim]))


def scatter(part: Array, dim: int, axis: str, cut: Chunking) -> Array:
    """Scatter all devices' sum, a chunk each: view(outer, chunks, size) -> view(outer, size)."""
    if cut.outer == 1:
        return lax.psum_scatter(part, axis, scatter_dimension=dim, tiled=True)
    view = part.reshape(_with(part.shape, dim, cut.outer, cut.chunks, -1))
    mine = lax.psum_scatter(view, axis, scatter_dimension=dim + 1)
    return mine.reshape(_with(part.shape, dim, part.shape[dim] // cut.chunks))


def exchange(
    part: Array, dim: int, cut: Chunking, wanted: int, wanted_cut: Chunking, axis: str
) -> Array:
    """Exchange a dim that is sharded for one that is wanted so.

    `dim`: view(outer, size) -> view(outer, chunks, size); `wanted` the other way round.
    """
    n = cut.chunks
    if cut.outer == wanted_cut.outer == 1:
        return lax.all_to_all(part, axis, split_axis=wanted, concat_axis=dim, tiled=True)
    shape = _with(part.shape, dim, n * part.shape[dim])
    shape = _with(shape, wanted, part.shape[wanted] // n)
    dims: dict[int, tuple[int, ...]] = {dim: (cut.outer, -1), wanted: (wanted_cut.outer, n, -1)}
    view = part.reshape([s for d in range(part.ndim) for s in _sizes(part.shape[d], dims.get(d))])
    split = wanted + 1 + (dim < wanted)  # the view has one dim more for `dim` ...
    concat = dim + 1 + (wanted < dim)  # ... and one for `wanted`, once the split one has gone
    return lax.all_to_all(view, axis, split_axis=split, concat_axis=concat).reshape(shape)


# -- the view -------------------------------------------------------------------------------------


def _window(
    array: Array, dim: int, cut: Chunking, chunk: Any, piece: int
) -> tuple[Array, list[Any], list[int]]:
    """Return the view of an array, and the start and the size of a piece in it."""
    size = cut.size(array.shape[dim])
    view = array.reshape(_with(array.shape, dim, cut.outer, cut.chunks, cut.pieces, size))
    starts: list[Any] = [np.int32(0)] * view.ndim
    starts[dim + 1 : dim + 3] = [np.int32(0) if chunk is None else chunk, np.int32(piece)]
    sizes = list(_with(array.shape, dim, cut.outer, _count(cut, chunk) // cut.outer, 1, size))
    return view, starts, sizes


def _starts(array: Array, dim: int, cut: Chunking, chunk: Any, piece: int, size: int) -> list[Any]:
    """Return the start of a piece in each dim."""
    starts: list[Any] = [np.int32(0)] * array.ndim
    starts[dim] = np.int32(piece * size)
    if isinstance(chunk, Array):  # in lax: jnp's operators trace a jit each
        start = lax.mul(chunk, np.int32(cut.pieces * size))
        starts[dim] = lax.add(start, starts[dim]) if piece else start
    elif chunk is not None:
        starts[dim] = np.int32((chunk * cut.pieces + piece) * size)
    return starts


def _count(cut: Chunking, chunk: Any) -> int:
    """Count the runs of one piece's size that are taken: `outer`, times all chunks for None."""
    return cut.outer * (cut.chunks if chunk is None else 1)


def _with(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _sizes(size: int, view: tuple[int, ...] | None) -> tuple[int, ...]:
    """Fill in the -1 in a view's sizes; reshape allows only one in all."""
    if view is None:
        return (size,)
    known = 1
    for part in view[:-1]:
        known *= part
    return (*view[:-1], size // known)
