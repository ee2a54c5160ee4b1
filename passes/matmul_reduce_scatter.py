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
t + (N - 1) max(t, tau) + t_add; the other orders, and when that does not apply, are in `ring.py`.
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
from typing import Any

from jax import Array, lax

from jaxoverlap.passes import chunks, ring
from jaxoverlap.passes.all_gather_matmul import LocalDot, wide
from jaxoverlap.passes.chunks import Cut
from jaxoverlap.passes.sites import Einsum
from jaxoverlap.plan import Variant


@dataclass(frozen=True, eq=False)
class Term:
    """A matmul whose products are added to those of other terms.

    Attributes:
        lhs, rhs: this device's operands, whole along the scattered dim.
        einsum: its letters (the sizes are not read).
        dot: multiplies one chunk.
        lhs_outer, rhs_outer: `Cut.outer` of the scattered dim in the operands.
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
    """Matmuls whose partial sums are added and scattered, ringed; call it where `axis` is manual.

    Args:
        terms: the matmuls, at least one, with results of one shape.
        dim: the dim of the result that is scattered; batch or free in each term.
        axis, axis_size: the mesh axis of the ring, and its devices.
        dtype: the dtype of the result, and of the sums that travel.
        variant: how the sums travel.
        outer: `Cut.outer` of the scattered dim in the result.

    Returns:
        This device's chunk of the result: 1/axis_size of dim `dim`.

    Raises:
        ValueError: if a chunk does not divide into the variant's slices.
    """
    products = Products(terms, dim, Cut(axis_size, variant.slices, outer))
    if variant.style == "sliced":
        return _slices(products, axis, dtype)
    steps = ring.scatter_steps(variant.style, axis_size)
    rank = lax.axis_index(axis)
    arriving: dict[tuple[int, int], Array] = {}  # by the step and the piece that was sent
    results: list[Array] = []
    leaving = None  # the sum that is sent under the next matmul, and what it is called
    kept: dict[int, Array] = {}
    for i, step in enumerate(steps):
        chunk = ring.chunk_at(rank, step.back, axis_size)
        for j in range(variant.slices):
            if leaving is not None:
                key, total = leaving
                total = products.tie(total)
                pairs = ring.permutation(axis_size, steps[key[0]].shift)
                arriving[key] = lax.ppermute(total, axis, pairs)
            here = wide(dtype) if step.keeps and not step.shift else dtype
            product = products.multiply(chunk, j, here)
            joined, taken, product = _await(arriving, step, j, product)
            if taken:
                own = [kept[j]] if j in kept else []
                kept[j] = _sum([*own, *(t.astype(wide(dtype)) for t in taken)])
            total = _sum([*joined, product])
            leaving = ((i, j), total) if step.shift else None
            if not step.shift:
                results.append(_sum([kept[j], total]) if j in kept else total)
    whole = chunks.join(results, dim, products.cut.shard())
    return whole.astype(dtype)


def _await(
    arriving: dict[tuple[int, int], Array], step: ring.ScatterStep, piece: int, product: Array
) -> tuple[list[Array], list[Array], Array]:
    """What has arrived for a step: to be sent on, and to be kept; tied to the step's product."""
    joined = [arriving.pop((s, piece)) for s in step.joins]
    taken = [arriving.pop((s, piece)) for s in step.keeps]
    if not joined and not taken:
        return [], [], product
    return lax.optimization_barrier((joined, taken, product))


def _slices(products: Products, axis: str, dtype: Any) -> Array:
    """Each slice of the whole scatter under the matmul of the next slice."""
    cut, dim = products.cut, products.dim
    results: list[Array] = []
    product = products.multiply(None, 0, dtype)
    for j in range(1, cut.pieces):
        product = products.tie(product)
        mine = chunks.scatter(product, dim, axis, cut)
        product = products.multiply(None, j, dtype)
        # The next slice waits for this one: XLA would combine the two.
        mine, product = lax.optimization_barrier((mine, product))
        results.append(mine)
    results.append(chunks.scatter(product, dim, axis, cut))
    return chunks.join(results, dim, cut.shard())


class Products:
    """The sum of all terms, a piece of a chunk at a time."""

    def __init__(self, terms: Sequence[Term], dim: int, cut: Cut):
        assert terms
        self.terms, self.dim, self.cut = list(terms), dim, cut

    def tie(self, leaving: Array) -> Array:
        """What is about to leave, so that neither it nor the next matmul starts before the other.

        The operand that is cut into chunks is tied, the lhs of a batch dim.
        """
        sides = ["lhs" if t.einsum.out[self.dim] in t.einsum.lhs else "rhs" for t in self.terms]
        operands = [getattr(t, side) for t, side in zip(self.terms, sides, strict=True)]
        operands, leaving = lax.optimization_barrier((operands, leaving))
        self.terms = [
            replace(t, **{side: operand})
            for t, side, operand in zip(self.terms, sides, operands, strict=True)
        ]
        return leaving

    def multiply(self, chunk: Any, piece: int, dtype: Any) -> Array:
        """One piece of one chunk of the sum; of every chunk, if None."""
        several = len(self.terms) > 1
        products = []
        for term in self.terms:
            letter = term.einsum.out[self.dim]
            lhs = self._take(term.lhs, term.einsum.lhs, letter, term.lhs_outer, chunk, piece)
            rhs = self._take(term.rhs, term.einsum.rhs, letter, term.rhs_outer, chunk, piece)
            products.append(term.dot(lhs, rhs, wide(dtype) if several else dtype))
        return _sum(products).astype(dtype)

    def _take(
        self, operand: Array, letters: str, letter: str, outer: int, chunk: Any, piece: int
    ) -> Array:
        if letter not in letters:
            return operand
        return chunks.take(
            operand, letters.index(letter), replace(self.cut, outer=outer), chunk, piece
        )


def _sum(parts: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, parts)
