"""List the chunks that a device multiplies, in order, and what it sends: integers only.

A device counts chunks back from its own: chunk `back` of rank `r` of `n` is `(r - back) % n`. What
it sends travels `shift` ranks on, to rank `r + shift`. Ranks may be traced; the rest is Python.

`gather_steps` and `scatter_steps` list what is multiplied, in order, and what is sent under each
matmul, for each style of `Variant`:

    gather    one_way   0  1  2  3 ...     each sent on by one when it has come
              two_way   0  1 -1  2 -2 ...  sent on by 1 and by -1; the own one both ways
              direct    0  1  2  3 ...     the own one, sent by 1, 2, 3 ... ranks
    scatter   one_way   1  2  3 ... 0      a sum travels by 1, each rank adds to it
              two_way   sums for half the ranks' products travel by 1, for the others by -1
              direct   -1 -2 -3 ... 0      a product, sent by 1, 2, 3 ... ranks to its owner

The own chunk comes first in a gather and last in a scatter, so that no matmul waits for the first
hop and none is in flight after the last matmul: the orders of CommFuse (arXiv 2604.24013, Figures
6 to 8) and, in both directions, of Wang et al. (ASPLOS '23).

With t for one chunk's matmul, tau for one chunk's hop and N devices, all take

    t + (N - 1) max(t, tau) + t_add

with t_add for the last sum (scatters only); two_way has tau / 2 where a link carries both ways at
once. The formula does not apply when communication slows the matmul under it (NCCL's kernels take
SMs), when a chunk's matmul is too small to run at the full one's rate, or, for direct, on a wire
that is itself a ring: there `shift` ranks are `shift` hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array, lax

from jaxoverlap.plan.collectives import Kind
from jaxoverlap.plan.plan import Style, Variant


@dataclass(frozen=True)
class Send:
    """One permute: this device's chunk `back` goes to the device `shift` ranks on."""

    back: int
    shift: int

    @property
    def arrives_as(self) -> int:
        """The number `back` of the chunk on the receiver."""
        return self.back + self.shift


@dataclass(frozen=True)
class GatherStep:
    """One matmul of a gather: of chunk `back`, with what is sent under it."""

    back: int
    sends: tuple[Send, ...]


@dataclass(frozen=True)
class ScatterStep:
    """One matmul of a scatter.

    Attributes:
        back: the chunk of the result that is multiplied.
        joins: earlier steps whose sends have arrived here, to be added to this product.
        keeps: earlier steps whose sends have arrived at their owner, to be added to its result.
        shift: how far the sum is sent, under the next step's matmul; 0: it stays, as the result.
    """

    back: int
    joins: tuple[int, ...]
    keeps: tuple[int, ...]
    shift: int


def permutation(axis_size: int, shift: int) -> list[tuple[int, int]]:
    """Return the (source, target) pairs of one permute, as `lax.ppermute` takes them."""
    return [(rank, (rank + shift) % axis_size) for rank in range(axis_size)]


def chunk_at(rank: Any, back: int, axis_size: int) -> Any:
    """Return the chunk that `rank` calls `back`.

    In `lax` where it is traced: jnp's operators trace a jit each, and there are many hops.
    """
    if not isinstance(rank, Array):
        return (rank - back) % axis_size
    forth = np.int32(-back % axis_size)  # no operand of the remainder is negative
    return lax.rem(lax.add(rank, forth), np.int32(axis_size))


def gather_steps(style: Style, axis_size: int) -> list[GatherStep]:
    """List a gather's matmuls in order; what one sends has arrived before its own turn."""
    n = axis_size
    if style == "one_way":
        return [GatherStep(i, (Send(i, 1),) if i < n - 1 else ()) for i in range(n)]
    if style == "direct":
        return [GatherStep(i, (Send(0, i + 1),) if i < n - 1 else ()) for i in range(n)]
    assert style == "two_way"
    right, left = n // 2, (n - 1) // 2
    order = sorted(range(-left, right + 1), key=lambda back: (abs(back), -back))
    steps = []
    for back in order:
        on = (Send(back, 1),) if 0 <= back < right else ()
        off = (Send(back, -1),) if -left < back <= 0 else ()
        steps.append(GatherStep(back, on + off))
    return steps


def scatter_steps(style: Style, axis_size: int) -> list[ScatterStep]:
    """List a scatter's matmuls in order; the own chunk is last."""
    n = axis_size
    if n == 1:
        return [ScatterStep(0, (), (), 0)]
    if style == "one_way":
        return [
            ScatterStep(1 + i, (i - 1,) if i else (), (), 1 if i < n - 1 else 0) for i in range(n)
        ]
    if style == "direct":
        kept = [(i - 1,) if i else () for i in range(n)]
        sent = [ScatterStep(-1 - i, (), kept[i], 1 + i) for i in range(n - 1)]
        return [*sent, ScatterStep(0, (), kept[n - 1], 0)]
    assert style == "two_way"
    right, left = n // 2, (n - 1) // 2
    # Step 2i goes right and step 2i + 1 left; the own chunk adds the last of both.
    order = [lane for i in range(right) for lane in ((1, i), (-1, i)) if lane[0] > 0 or i < left]
    steps = []
    for lane, i in order:
        back = i - right if lane > 0 else left - i
        joins = (order.index((lane, i - 1)),) if i else ()
        steps.append(ScatterStep(back, joins, (), lane))
    ends = [order.index((1, right - 1))] + ([order.index((-1, left - 1))] if left else [])
    return [*steps, ScatterStep(0, tuple(ends), (), 0)]


# -- closed forms ---------------------------------------------------------------------------------


def num_hops(variant: Variant, axis_size: int) -> int:
    """Count a ring's permutes, or a "sliced" one's collectives; an all-reduce adds a gather."""
    return variant.slices * (1 if variant.style == "sliced" else axis_size - 1)


def bytes_sent(collective: Kind, axis_size: int, chunk_bytes: int) -> int:
    """Return the bytes that each device sends; every variant sends the same.

    Args:
        chunk_bytes: bytes that one hop of one device carries if not split into pieces: a shard of
            the gathered operand or of the scattered result, or 1/axis_size of an exchanged shard.
    """
    return (2 if collective == "all_reduce" else 1) * (axis_size - 1) * chunk_bytes


def peak_bytes(collective: Kind, variant: Variant, axis_size: int, chunk_bytes: int) -> int:
    """Return the most bytes alive at once in the ring, beyond operands and results.

    Counted are buffers that a hop writes, from its start until the matmul that reads them is done;
    buffers that a hop reads, unless they are an operand or a buffer already counted; and, for sums,
    the product at hand unless it becomes the result. Not counted: slices cut for a matmul, the sum
    that becomes the result (in float32 on the way: twice a bfloat16 result), and the gather that
    ends an all-reduce.
    """
    if axis_size == 1:
        return 0
    n, m = axis_size, variant.slices
    if variant.style == "sliced":
        pieces = _SLICED[collective] * n + (m - 1 if collective == "all_reduce" else 0)
    elif variant.style == "two_way":
        pieces = _two_way_pieces(collective, n, m)
    elif collective == "all_gather":
        pieces = m if n == 2 else m + 1
    else:
        pieces = 2 * m if n == 2 and collective != "all_reduce" else 2 * m + 1
    return pieces * chunk_bytes // m


# Buffers of one slice of all chunks: the slice at hand, the one in flight, an exchange's own copy.
_SLICED = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2, "all_to_all": 3}


def _two_way_pieces(collective: Kind, n: int, m: int) -> int:
    """Count the pieces alive at once with two in flight; the fewer devices, the sooner it ends."""
    if collective == "all_gather":
        return {2: m, 3: 2 * m}.get(n, 2 * m + 1)
    assert collective != "all_to_all", "an exchange has no ring"
    if collective == "all_reduce":
        return 2 * m + 1 if n == 2 else 4 * m + 1
    return {2: 2 * m, 3: 4 * m}.get(n, 4 * m + 1)
