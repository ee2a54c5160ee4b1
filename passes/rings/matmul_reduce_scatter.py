"""Matmuls, then reduce-scatter: a ring in which each hop runs under the next chunk's matmul.

Before, on each device (row parallel -> sequence parallel; FSDP's weight gradients):

    x: f32[s, f/N]   w: f32[f/N, d]
    p: f32[s, d] = dot_general x w                     # this device's partial sums
    y: f32[s/N, d] = reduce_scatter[axis_name=model, scatter_dimension=0] p

->  after: chunk (r - 1) % N is multiplied first, and then, at hop i of 1 .. N - 1, on rank r:

    x, sum = optimization_barrier x sum
    sum = ppermute sum                                 # in flight ...
    p: f32[s/N, d] = dot_general x[chunk] w            # ... under this one, (r - 1 - i) % N
    sum, p = optimization_barrier sum p
    sum = add sum p

The device's own chunk comes last, so only an add trails. Several matmuls whose results are added
(the two sides of a gated MLP's input gradient) share one ring: their products are added first.

Why the barriers: without the second, XLA folds the add into the matmul (beta = 1 in cuBLAS), which
then waits for the hop; without the first, its dot merger and scheduler undo the ring.

With t for all terms' matmuls of one chunk and tau for its hop, the ring takes
t + (N - 1) max(t, tau) + t_add; the other orders, and when that does not apply, are in `orders.py`.
"sliced" runs lax.psum_scatter of 1/m of each chunk under the next slice's matmul: T_comm/m stays
bare, at the end. The order of chunks is CommFuse's (arXiv 2604.24013, Figures 7 and 8). The sums
travel in the result's dtype, as XLA's reduce-scatter does; sums that do not travel ("direct") are
kept in float32 at least. The pass does not apply when the scattered dim does not divide by the
axis, or when another mesh axis shards that dim more finely.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jax import Array, lax

from jaxoverlap.passes.analysis.einsum import Einsum
from jaxoverlap.passes.rings import chunks, orders
from jaxoverlap.passes.rings.all_gather_matmul import LocalDot, wide
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.plan.plan import Variant

Kept = dict[int, Array]


@dataclass(frozen=True, eq=False)
class Term:
    """A matmul whose products are added to those of other terms.

    Attributes:
        lhs, rhs: this device's operands, unsharded along the scattered dim.
        einsum: its letters (the sizes are not read).
        dot: multiplies one chunk.
        lhs_outer, rhs_outer: `Chunking.outer` of the scattered dim in the operands.
    """

    lhs: Array
    rhs: Array
    einsum: Einsum
    dot: LocalDot
    lhs_outer: int = 1
    rhs_outer: int = 1


def matmul_reduce_scatter(
    terms: Sequence[Term],
    *,
    dim: int,
    axis: str,
    axis_size: int,
    dtype: Any,
    variant: Variant = Variant(),  # noqa: B008, it is frozen
    outer: int = 1,
) -> Array:
    """Add and scatter partial sums of matmuls in a ring; call it where `axis` is manual.

    Args:
        terms: the matmuls, at least one, with results of one shape.
        dim: the dim of the result that is scattered; batch or free in each term.
        axis, axis_size: the mesh axis of the ring, and its devices.
        dtype: the dtype of the result, and of the sums that travel.
        variant: how the sums travel.
        outer: `Chunking.outer` of the scattered dim in the result.

    Returns:
        This device's chunk of the result: 1/axis_size of dim `dim`.

    Raises:
        ValueError: if a chunk does not divide into the variant's slices.
    """
    products = Products(terms, dim, Chunking(axis_size, variant.slices, outer))
    return scatter_under(products, axis, dtype, variant)


class Computes(Protocol):
    """The source of a result's partial sums, a piece of a chunk at a time: `Products` is one."""

    dim: int
    cut: Chunking

    def tie[Tree](self, leaving: Tree, /) -> Tree:
        """Tie what is about to leave to the next piece: neither may start before the other."""
        ...

    def multiply(self, chunk: Any, piece: int, dtype: Any, /) -> Array:
        """Compute one piece of one chunk; of every chunk, if None."""
        ...


def scatter_under(products: Computes, axis: str, dtype: Any, variant: Variant) -> Array:
    """Return this device's chunk of all devices' summed products; hops run under its pieces."""
    axis_size = products.cut.chunks
    if variant.style == "sliced":
        return _slices(products, axis, dtype)
    steps = orders.scatter_steps(variant.style, axis_size)
    hops = Hops(products, steps, axis)
    rank = lax.axis_index(axis)
    kept: Kept = {}  # by piece: what came for this device's own chunk
    results: list[Array] = []
    for i, step in enumerate(steps):
        chunk = orders.chunk_at(rank, step.back, axis_size)
        for j in range(variant.slices):
            kept = hops.send(kept)
            own = step.keeps and not step.shift  # added to what is kept, and never sent
            product = products.multiply(chunk, j, wide(dtype) if own else dtype)
            joined, came, product = hops.receive(step, j, product)
            if came:
                before = [kept[j]] if j in kept else []
                kept[j] = _sum([*before, *(c.astype(wide(dtype)) for c in came)])
            total = _sum([p.astype(wide(dtype)) for p in (*joined, product)]) if joined else product
            if step.shift:
                hops.leaving = (i, j), total.astype(dtype)
            else:
                results.append(_sum([kept[j], total]) if j in kept else total)
    return chunks.join(results, products.dim, products.cut.shard()).astype(dtype)


def _slices(products: Computes, axis: str, dtype: Any) -> Array:
    """Scatter each slice by one reduce-scatter, under the matmul of the next slice."""
    cut, dim = products.cut, products.dim
    results: list[Array] = []
    product = products.multiply(None, 0, dtype)
    for j in range(1, cut.pieces):
        product = products.tie(product)
        mine = chunks.scatter(product, dim, axis, cut)
        product = products.multiply(None, j, dtype)
        # The next slice waits for this one: XLA would combine the two.
        mine, product = chunks.tied((mine, product))
        results.append(mine)
    results.append(chunks.scatter(product, dim, axis, cut))
    return chunks.join(results, dim, cut.shard())


class Hops:
    """The sums that travel between a scatter's matmuls, by the step and piece that they left."""

    def __init__(self, products: Computes, steps: Sequence[orders.ScatterStep], axis: str):
        self.products, self.steps, self.axis = products, steps, axis
        self.leaving: tuple[tuple[int, int], Array] | None = None  # under the next matmul
        self.arriving: dict[tuple[int, int], Array] = {}

    def send(self, kept: Kept) -> Kept:
        """Send the leaving sum, tied to the next matmul and to the values that stay on the device.

        If nothing waited for these, XLA would compute them late, and hold all that has arrived.
        """
        if self.leaving is None:
            return kept
        key, value = self.leaving
        value, kept = self.products.tie((value, kept))
        pairs = orders.permutation(self.products.cut.chunks, self.steps[key[0]].shift)
        self.arriving[key] = lax.ppermute(value, self.axis, pairs)
        self.leaving = None
        return kept

    def receive(
        self, step: orders.ScatterStep, piece: int, product: Array
    ) -> tuple[list[Array], list[Array], Array]:
        """Return the sums that have come for a step to join and to keep, tied to its product."""
        joined = [self.arriving.pop((s, piece)) for s in step.joins]
        kept = [self.arriving.pop((s, piece)) for s in step.keeps]
        if not joined and not kept:
            return [], [], product
        return chunks.tied((joined, kept, product))


class Products:
    """The sum of all terms, a piece of a chunk at a time."""

    def __init__(self, terms: Sequence[Term], dim: int, cut: Chunking):
        assert terms
        self.terms, self.dim, self.cut = list(terms), dim, cut

    def tie[Tree](self, leaving: Tree) -> Tree:
        """Tie what is about to leave to the next matmul: neither may start before the other.

        Of the next matmul, the operands that are split into chunks are tied.
        """
        cut = [
            {
                side: getattr(t, side)
                for side in ("lhs", "rhs")
                if self._letter(t) in t.einsum.side(side)
            }
            for t in self.terms
        ]
        cut, leaving = chunks.tied((cut, leaving))
        self.terms = [replace(t, **operands) for t, operands in zip(self.terms, cut, strict=True)]
        return leaving

    def _letter(self, term: Term) -> str:
        return term.einsum.out[self.dim]

    def multiply(self, chunk: Any, piece: int, dtype: Any) -> Array:
        """Compute one piece of one chunk of the sum; of every chunk, if None."""
        several = len(self.terms) > 1
        products = []
        for term in self.terms:
            letter = self._letter(term)
            lhs = self._take(term.lhs, term.einsum.lhs, letter, term.lhs_outer, chunk, piece)
            rhs = self._take(term.rhs, term.einsum.rhs, letter, term.rhs_outer, chunk, piece)
            products.append(term.dot(lhs, rhs, wide(dtype) if several else dtype))
        return _sum(products).astype(dtype)

    def _take(
        self, operand: Array, letters: str, letter: str, outer: int, chunk: Any, piece: int
    ) -> Array:
        if letter not in letters:
            return operand
        assert self.cut.pieces == 1 or outer == self.cut.outer, "pieces would not match"
        return chunks.take(
            operand, letters.index(letter), replace(self.cut, outer=outer), chunk, piece
        )


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, parts)
