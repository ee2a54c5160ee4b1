"""All-gather, then matmuls: a ring in which each hop runs under the chunk that has arrived.

Before, on each device, for a gather along a free dim (sequence parallel -> column parallel):

    x: f32[s/N, d]   w: f32[d, f/N]
    x = all_gather[axis_name=model, axis=0] x          # nothing else to do meanwhile
    y: f32[s, f/N] = dot_general x w

->  after, at hop i of N, on rank r:

    next = ppermute x                                  # in flight ...
    p: f32[s/N, f/N] = dot_general x w                 # ... under this matmul
    y = dynamic_update_slice y p ((r - i) % N * s/N, 0)
    x, y = optimization_barrier next y                 # hop i + 1 waits for matmul i

Along a contracted dim (FSDP's weights, sequence-sharded weight gradients) the other operand is
sliced to the chunk that has arrived, and the products are added up. Along a batch dim it is sliced,
and the products are written. One ring serves every matmul that reads the operand (q, k and v; the
two gradients that read dy): each shard travels once, and all their chunks run over each hop.

Why the barrier: without it XLA's dot merger glues the chunks back into one matmul, and its
scheduler issues the hops back to back. Both the hop and the matmul must read the barriered value;
so must the slices of the other operand, which XLA would otherwise all make before the first matmul.

With t for all readers' matmuls of one chunk and tau for its hop, the ring takes t + (N - 1) max(t,
tau); the other orders, and when that does not apply, are in `orders.py`. "sliced" runs
lax.all_gather of 1/m of the shard under the matmul of the slice before: T_comm/m is exposed, in
front. The order of chunks is CommFuse's (arXiv 2604.24013, Figure 6). The pass does not apply when
the gathered dim does not divide by the axis, or when another mesh axis shards that dim more finely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax.numpy as jnp
from jax import Array, lax

from jaxoverlap.passes.analysis.einsum import Einsum
from jaxoverlap.passes.rings import chunks, orders
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.plan.plan import Variant

LocalDot = Callable[..., Array]
"""`dot(lhs, rhs, dtype)`: one chunk's product, accumulated and returned in `dtype`."""


@dataclass(frozen=True, eq=False)
class Reader:
    """A matmul that reads what arrives.

    Attributes:
        other: its other operand, unsharded along the travelling dim where it has that dim.
        einsum: its letters (the sizes are not read).
        side: which of its operands travels.
        dot: multiplies one chunk.
        dtype: the dtype of its result.
        other_outer, out_outer: `Chunking.outer` of the travelling dim in the other operand and the
            result.
    """

    other: Array
    einsum: Einsum
    side: Literal["lhs", "rhs"]
    dot: LocalDot
    dtype: Any
    other_outer: int = 1
    out_outer: int = 1


def all_gather_matmul(
    shard: Array,
    readers: Sequence[Reader],
    *,
    dim: int,
    axis: str,
    axis_size: int,
    variant: Variant = Variant(),  # noqa: B008, it is frozen
    outer: int = 1,
    keep: bool = False,
) -> tuple[list[Array], Array | None]:
    """Multiply a gathered operand in a ring; call it where `axis` is manual.

    Args:
        shard: this device's chunk of the operand, 1/axis_size of its dim number `dim`.
        readers: the matmuls that read the operand, at least one.
        dim: the dim it is gathered along; in each reader free, contracted or batch.
        axis, axis_size: the mesh axis of the ring, and its devices.
        variant: how the chunks travel.
        outer: `Chunking.outer` of the gathered dim.
        keep: whether to return the gathered operand too.

    Returns:
        Each reader's result on this device, unsharded along a dim not contracted; and the
        gathered operand, or None.

    Raises:
        ValueError: if a chunk does not divide into the variant's slices.
    """
    arrivals = Arrivals(readers, dim, Chunking(axis_size, variant.slices, outer), keep)
    gather_under(arrivals, shard, axis, variant)
    return arrivals.finish()


class Reads(Protocol):
    """The readers of an operand while it is gathered, with their results: `Arrivals` is one."""

    dim: int
    cut: Chunking

    def tie(self, held: dict[Any, Array], /) -> dict[Any, Array]:
        """Tie what is read next: neither it nor a hop of it may start before the last read."""
        ...

    def read(self, part: Array, chunk: Any, piece: int, /) -> None:
        """Read one piece of one chunk; of all chunks, if None."""
        ...


def gather_under(arrivals: Reads, shard: Array, axis: str, variant: Variant) -> None:
    """Gather an operand of which this device has `shard`, each hop under a read of a chunk."""
    dim, cut = arrivals.dim, arrivals.cut
    if variant.style == "sliced":
        parts = [chunks.take(shard, dim, cut.shard(), piece=j) for j in range(cut.pieces)]
        read_slices(arrivals, parts, lambda part: chunks.gather(part, dim, axis, cut))
        return
    rank = lax.axis_index(axis)
    pieces = range(cut.pieces)
    held = {(0, j): chunks.take(shard, dim, cut.shard(), piece=j) for j in pieces}
    for step in orders.gather_steps(variant.style, cut.chunks):
        chunk = orders.chunk_at(rank, step.back, cut.chunks)
        for j in pieces:
            used = {(step.back, j), *((send.back, j) for send in step.sends)}
            held |= arrivals.tie({key: held[key] for key in sorted(used)})
            for send in step.sends:
                pairs = orders.permutation(cut.chunks, send.shift)
                held[send.arrives_as, j] = lax.ppermute(held[send.back, j], axis, pairs)
            arrivals.read(held[step.back, j], chunk, j)


def read_slices(arrivals: Reads, parts: list[Array], send: Callable[[Array], Array]) -> None:
    """Read slices of all chunks, each gathered by one collective under the read before it."""
    coming = send(parts[0])
    for j in range(len(parts)):
        used = {"here": coming} | ({"next": parts[j + 1]} if j + 1 < len(parts) else {})
        used = arrivals.tie(used)
        if j == 0:  # nothing to tie to yet; but the next slice waits for this one
            used = chunks.tied(used, lax.optimization_barrier)
        if "next" in used:
            coming = send(used["next"])
        arrivals.read(used["here"], None, j)


class Arrivals:
    """The results of all readers while pieces of their operand arrive."""

    def __init__(self, readers: Sequence[Reader], dim: int, cut: Chunking, keep: bool):
        assert readers
        self.readers, self.dim, self.cut, self.keep = list(readers), dim, cut, keep
        self.results: list[Array] = []  # a reader's each, once the first piece is read
        self.whole: list[Array] = []  # the operand itself, if it is kept

    def tie(self, held: dict[Any, Array]) -> dict[Any, Array]:
        """Tie what is read next: neither it nor a hop of it may start before the last matmul.

        Other operands that are sliced are tied too: XLA would make all their slices at the start.
        """
        if not self.results:
            return held
        cut = {i: r.other for i, r in enumerate(self.readers) if _is_cut(r, self.dim)}
        held, cut, self.results, self.whole = chunks.tied(
            (held, cut, self.results, self.whole), lax.optimization_barrier
        )
        for i, other in cut.items():
            self.readers[i] = replace(self.readers[i], other=other)
        return held

    def read(self, part: Array, chunk: Any, piece: int) -> None:
        """Multiply one piece of one chunk (of all chunks, if None) and put the products by."""
        first = not self.results
        self.results = [
            _add(reader, None if first else self.results[i], self, part, chunk, piece)
            for i, reader in enumerate(self.readers)
        ]
        if self.keep and first:
            # A weight's own chunk is there before the step begins: its room waits for the matmul.
            part, self.results = chunks.tied((part, self.results), lax.optimization_barrier)
            self.whole = [chunks.room(part, self.dim, self.cut, chunk)]
        if self.keep:
            self.whole = [chunks.put(self.whole[0], part, self.dim, self.cut, chunk, piece)]

    def finish(self) -> tuple[list[Array], Array | None]:
        """Return the results in their dtypes, and the gathered operand if `keep` is set."""
        results = [r.astype(m.dtype) for r, m in zip(self.results, self.readers, strict=True)]
        return results, self.whole[0] if self.keep else None


def _add(
    reader: Reader, result: Array | None, arrivals: Arrivals, part: Array, chunk: Any, piece: int
) -> Array:
    """Write one piece's product into one reader's result, or add it."""
    einsum, cut, other = reader.einsum, arrivals.cut, reader.other
    letter = einsum.side(reader.side)[arrivals.dim]
    if _is_cut(reader, arrivals.dim):
        assert cut.pieces == 1 or reader.other_outer == cut.outer, "pieces would not match"
        at = replace(cut, outer=reader.other_outer)
        letters = einsum.rhs if reader.side == "lhs" else einsum.lhs
        other = chunks.take(other, letters.index(letter), at, chunk, piece)
    contracted = letter not in einsum.out
    # Products of a contracted dim's chunks are added up here, where the plain matmul adds them
    # inside one kernel: in float32 at least, so that no more is rounded than there.
    dtype = wide(reader.dtype) if contracted else reader.dtype
    product = reader.dot(*((part, other) if reader.side == "lhs" else (other, part)), dtype)
    if contracted:
        return product if result is None else result + product
    assert cut.pieces == 1 or reader.out_outer == cut.outer, "pieces would not match"
    dim, at = einsum.out.index(letter), replace(cut, outer=reader.out_outer)
    if result is None:
        result = chunks.room(product, dim, at, chunk)
    return chunks.put(result, product, dim, at, chunk, piece)


def _is_cut(reader: Reader, dim: int) -> bool:
    """Return whether the other operand has the travelling dim too, and is sliced like a chunk."""
    einsum = reader.einsum
    other = einsum.rhs if reader.side == "lhs" else einsum.lhs
    return einsum.side(reader.side)[dim] in other


def wide(dtype: Any) -> Any:
    """Return the dtype for sums over chunks, which does not depend on JAX's promotion setting."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype  # whole numbers wrap around alike in any order
