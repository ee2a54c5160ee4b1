"""All-to-all with matmuls: each slice is sent directly to its device, under another's matmul.

An operand that is sharded along one dim and wanted sharded along another (Ulysses' heads for
sequence, experts for tokens). Before, on each device:

    x: f32[s/N, d]   w: f32[d/N, f]
    x: f32[s, d/N] = all_to_all[axis_name=model, split_axis=1, concat_axis=0] x
    p: f32[s, f] = dot_general x w

->  after, at step i of N, on rank r, with `own` = x:

    next = ppermute[shift=i + 1] own[:, (r + i + 1) % N]   # in flight ...
    p = dot_general here w                                 # ... under this matmul, of chunk r - i
    y = dynamic_update_slice y p ((r - i) % N * s/N, 0)
    own, next, y = optimization_barrier own next y

The own slice comes first and is not sent. Where the gathered dim is contracted or batch, the other
operand is sliced, as in `all_gather_matmul`; and several matmuls may read what arrives.

A result that is computed split along one dim and wanted along another goes the other way, before:

    x: f32[s/N, d]   w: f32[d, f]
    p: f32[s/N, f] = dot_general x w
    y: f32[s, f/N] = all_to_all[axis_name=model, split_axis=1, concat_axis=0] p

->  after: chunk r + 1 of f is multiplied first, and then, at step i of 1 .. N - 1, on rank r:

    w, p = optimization_barrier w p
    p = ppermute[shift=i] p                                # in flight ...
    q: f32[s/N, f/N] = dot_general x w[chunk]              # ... under this one, of r + i + 1
    p, q = optimization_barrier p q
    y = dynamic_update_slice y p ((r - i) % N * s/N, 0)

The own slice comes last and is written where it was made.

N - 1 sends of 1/N^2 of the global array; with t for one slice's matmul and tau for its send, both
take t + (N - 1) max(t, tau). "sliced" runs lax.all_to_all in m slices instead, each under another's
matmul: T_comm/m is exposed. `orders.py` says when the formula does not apply. The direct order is
CommFuse's (arXiv 2604.24013, Algorithm 5); there is no ring, as every slice has a device of its
own to go to. The pass does not apply when either dim does not divide by the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array, lax

from jaxoverlap.passes.rings import chunks, orders
from jaxoverlap.passes.rings.all_gather_matmul import Arrivals, Reader, read_slices
from jaxoverlap.passes.rings.chunks import Chunking
from jaxoverlap.passes.rings.matmul_reduce_scatter import Hops, Products, Term
from jaxoverlap.plan.plan import Variant

DIRECT = Variant("direct")


def all_to_all_matmul(
    shard: Array,
    readers: Sequence[Reader],
    *,
    dim: int,
    wanted: int,
    axis: str,
    axis_size: int,
    variant: Variant = DIRECT,
    outer: int = 1,
    wanted_outer: int = 1,
    keep: bool = False,
) -> tuple[list[Array], Array | None]:
    """Multiply an exchanged operand; call it where `axis` is manual.

    Args:
        shard: this device's part of the operand: 1/axis_size of dim `dim`, all of dim `wanted`.
        readers: the matmuls that read the exchanged operand, at least one; their other operands
            hold 1/axis_size of `wanted` where they have that dim.
        dim: the dim that is gathered; in each reader free, contracted or batch.
        wanted: the dim that is sharded instead.
        axis, axis_size: the mesh axis, and its devices.
        variant: "direct" or "sliced"; pieces are split along `dim`.
        outer, wanted_outer: `Chunking.outer` of the two dims.
        keep: whether to return the exchanged operand too.

    Returns:
        Each reader's result on this device, unsharded along `dim` unless it is contracted; and the
        exchanged operand, or None.

    Raises:
        ValueError: if a dim does not divide, or the variant is a ring.
    """
    assert dim != wanted
    _check(variant)
    arrivals = Arrivals(readers, dim, Chunking(axis_size, variant.slices, outer), keep)
    split = Chunking(axis_size, 1, wanted_outer)
    pieces = [chunks.take(shard, dim, arrivals.cut.shard(), piece=j) for j in range(variant.slices)]
    if variant.style == "sliced":
        read_slices(
            arrivals, pieces, lambda p: chunks.exchange(p, dim, arrivals.cut, wanted, split, axis)
        )
        return arrivals.finish()
    rank = lax.axis_index(axis)
    here = {j: chunks.take(own, wanted, split, rank) for j, own in enumerate(pieces)}
    for step in orders.gather_steps("direct", axis_size):
        chunk = orders.chunk_at(rank, step.back, axis_size)
        for j in range(variant.slices):
            # The last step sends nothing, and so does not read the shard.
            tied = arrivals.tie({"here": here[j]} | ({"own": pieces[j]} if step.sends else {}))
            for send in step.sends:
                pieces[j] = tied["own"]
                target = orders.chunk_at(rank, -send.shift, axis_size)
                leaving = chunks.take(pieces[j], wanted, split, target)
                pairs = orders.permutation(axis_size, send.shift)
                here[j] = lax.ppermute(leaving, axis, pairs)
            arrivals.read(tied["here"], chunk, j)
    return arrivals.finish()


def matmul_all_to_all(
    terms: Sequence[Term],
    *,
    dim: int,
    wanted: int,
    axis: str,
    axis_size: int,
    dtype: Any,
    variant: Variant = DIRECT,
    outer: int = 1,
    wanted_outer: int = 1,
) -> Array:
    """Exchange the summed result of matmuls; call it where `axis` is manual.

    Args:
        terms: the matmuls, at least one, with results of one shape; each computes 1/axis_size of
            result dim `dim` on this device, and all of dim `wanted`.
        dim: the dim that is gathered; batch or free.
        wanted: the dim that is sharded instead; batch or free.
        axis, axis_size: the mesh axis, and its devices.
        dtype: the dtype of the result.
        variant: "direct" or "sliced"; pieces are split along `wanted`.
        outer, wanted_outer: `Chunking.outer` of the two dims.

    Returns:
        This device's part of the result: all of dim `dim`, 1/axis_size of dim `wanted`.

    Raises:
        ValueError: if a dim does not divide, or the variant is a ring.
    """
    assert dim != wanted
    _check(variant)
    products = Products(terms, wanted, Chunking(axis_size, variant.slices, wanted_outer))
    cut, shard_cut = Chunking(axis_size, 1, outer), products.cut.shard()
    if variant.style == "sliced":
        return chunks.join(_slices(products, dim, cut, axis, dtype), wanted, shard_cut)
    steps = orders.scatter_steps("direct", axis_size)
    hops = Hops(products, steps, axis)
    rank = lax.axis_index(axis)
    results: dict[int, Array] = {}  # by piece, each whole along `dim`

    for i, step in enumerate(steps):
        chunk = orders.chunk_at(rank, step.back, axis_size)
        for j in range(variant.slices):
            results = hops.send(results)
            product = products.multiply(chunk, j, dtype)
            _, came, product = hops.receive(step, j, product)
            for sent, part in zip(step.keeps, came, strict=True):
                source = orders.chunk_at(rank, steps[sent].shift, axis_size)
                results[j] = _place(results.get(j), part, dim, cut, source)
            if step.shift:
                hops.leaving = (i, j), product
            else:
                results[j] = _place(results.get(j), product, dim, cut, rank)
    return chunks.join([results[j] for j in range(variant.slices)], wanted, shard_cut)


def _place(result: Array | None, part: Array, dim: int, cut: Chunking, chunk: Any) -> Array:
    """Write one chunk into the result."""
    if result is None:
        result = chunks.room(part, dim, cut, chunk)
    return chunks.put(result, part, dim, cut, chunk)


def _slices(products: Products, dim: int, cut: Chunking, axis: str, dtype: Any) -> list[Array]:
    """Exchange each slice by one all-to-all, under the matmul of the next slice."""
    split = Chunking(products.cut.chunks, 1, products.cut.outer)
    results: list[Array] = []
    product = products.multiply(None, 0, dtype)
    for j in range(1, products.cut.pieces):
        product = products.tie(product)
        mine = chunks.exchange(product, dim, cut, products.dim, split, axis)
        product = products.multiply(None, j, dtype)
        # The next slice waits for this one: XLA would combine the two.
        mine, product = chunks.tied((mine, product))
        results.append(mine)
    return [*results, chunks.exchange(product, dim, cut, products.dim, split, axis)]


def _check(variant: Variant) -> None:
    if variant.style not in ("direct", "sliced"):
        raise ValueError(
            f"variant {variant}: an exchange has no ring, as every slice has a device of its own "
            "to go to; expected direct or sliced"
        )
