"""Keep the rings whose chunked matmuls cost less than the full matmul and exposed collective.

Split into chunks a matmul costs more: each chunk has a launch and tiles of its own, and has to be
sliced out of an operand, or joined to a result, which an undivided matmul does not need. A
ring can save at most the exposed time of the collective that is not decomposed. So where

    max(N t, (N - 1) tau) > e + w

with t for one chunk's matmuls and copies, tau for one hop, w for the full matmuls and e for what
is exposed, the ring loses even if all of it hides behind the rest, and is rejected: scores of a
long context, whose pieces are gigabytes to join, matmuls too small to split, collectives that
XLA's own schedule hides, and rings of NCCL's permutes, which get few of its channels. (What chunks
are copied is an estimate: XLA reads some of them in place.) The estimate of the partitioned
step (`estimate.py`) gives the exposed time; without one, the full collective counts as exposed.

A sum between hosts without a ring is sent in two slices where those take less than one. (7B
step on 512 H100s, where a ring between hosts has 64 chunks, simulated: 1006 ms in rings, 839 plain,
780 in slices.)

So do gathers and scatters that have little to hide behind. If all matmuls that could overlap
(`independent_matmuls.py`) take less than twice the collective, for others want to hide there too,
it goes in two slices, each under the matmul of the other; in four, where they take less than twice
a slice. (By simulation, plain and sliced: 70B step on 8 GB200s, whose hops are NCCL's, 1357 and
1309 ms, all in halves 1347; ViT on 64 A100s, where matmuls are too small for a ring, 830 and 780,
mostly as the weights of what has a ring, and of nothing else, are gathered a layer ahead.)

Other criteria were tried on simulated schedules of full steps, and did not hold there:
hop by hop (t + (N - 1) max(t, tau) in CommFuse, arXiv 2604.24013, against c + w): a hop longer than
the chunk over it may hide behind something else, and the undecomposed collective may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxoverlap.cost.groups import Group, pair
from jaxoverlap.cost.kernels import MatmulKernel
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.einsum import SIDES
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.planning import splits
from jaxoverlap.passes.planning.layout import traffic
from jaxoverlap.passes.planning.ring_plan import Member, Ring
from jaxoverlap.passes.planning.splits import Split
from jaxoverlap.plan.collectives import OPCODE_OF, PERMUTE
from jaxoverlap.plan.plan import Variant

SLICES = (2, 4)  # that a whole collective may go in
_SLICED = ("all_gather", "reduce_scatter")
_HLO_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


@dataclass(frozen=True)
class RingCosts:
    """The prices of rings on a cluster.

    Attributes:
        cost: the cluster's cost model.
        groups: the devices that take part in a collective along each mesh axis.
        exposed: returns the seconds that the kernels wait in one run for a ring's collective, not
            decomposed, in the scheduler pass's order; None where that is not known.
    """

    cost: CostModel
    groups: Mapping[str, Group]
    exposed: Callable[[Ring], float | None] = lambda ring: None

    def why_unprofitable(self, ring: Ring, variant: Variant) -> str:
        """Return why a ring is not worth it; empty if it may be.

        A ring that keeps what it gathers for others moves it anyway, and may be cut for that; one
        of matmuls whose dtype has no price stays.
        """
        if not self.knows(ring):
            return ""
        least = {"hops": self.hops_s(ring, variant)}
        if not ring.keep:
            least["chunks"] = self.cut_s(ring, variant)
        most = max(least, key=lambda what: least[what])
        taken_s, plain_s = least[most] + self._left_s(ring), self._matmuls_s(ring)
        waits_s = self._waits_s(ring)
        if taken_s <= plain_s + waits_s:
            return ""
        said = f"its {most} take {_us(taken_s)}, more than matmul and {ring.kind}"
        if waits_s < self.collective_s(ring):
            return f"{said}, of which {_us(waits_s)} is exposed: {_us(plain_s + waits_s)}"
        return f"{said}, {_us(plain_s + waits_s)}"

    def _waits_s(self, ring: Ring) -> float:
        """Return the most seconds that a ring can save: the exposed time of its full collective."""
        whole_s, exposed_s = self.collective_s(ring), self.exposed(ring)
        return whole_s if exposed_s is None else min(whole_s, exposed_s)

    def _left_s(self, ring: Ring) -> float:
        """Return a ring's remaining exposed seconds: the unhidden part of an all-reduce's gather.

        The gather hides for as many seconds as the full collective would.
        """
        if ring.kind != "all_reduce":
            return 0.0
        whole_s = self.collective_s(ring)
        return max(whole_s / 2 - (whole_s - self._waits_s(ring)), 0.0)

    def chosen(
        self, ring: Ring, usual: Variant, others: Callable[[], Iterable[float]]
    ) -> tuple[Variant, str]:
        """Choose how a ring's pieces travel, and say why if not as usual.

        A ring that is not worth it is rejected; but sums between hosts go in two slices of a
        reduce-scatter each. Those are the gradients of weights, which XLA may transpose, or
        all-reduce in one piece. Other gathers and scatters go in slices where that pays.

        Args:
            ring: the ring.
            usual: how its pieces travel if nothing else is known.
            others: gives the seconds of each matmul that the collective could hide behind.
        """
        why = self.why_unprofitable(ring, usual)
        if not why:
            return usual, ""
        if ring.kind == "reduce_scatter" and self.groups[ring.first.ring.axis].domains > 1:
            halves = ring.first.chunk() % 2 == 0 and self._slices_pay(ring)
            return Variant("sliced", 2) if halves else Variant("plain"), why
        slices = self._slices(ring, others()) if ring.kind in _SLICED else 1
        return Variant("sliced", slices) if slices > 1 else Variant("plain"), why

    def _slices(self, ring: Ring, others: Iterable[float]) -> int:
        """Choose a collective's number of slices: more while few matmuls can hide it."""
        concurrent_s, enough_s = 0.0, 2 * self.collective_s(ring)
        for seconds in others:
            concurrent_s += seconds
            if concurrent_s >= enough_s:
                return 1
        best, best_s = 1, self._matmuls_s(ring) + self._waits_s(ring)
        for slices in SLICES:
            hidden = concurrent_s >= 2 * self.collective_s(ring, best)
            seconds = self.sliced_s(ring, slices)
            if hidden or ring.first.chunk() % slices or seconds >= best_s:
                break
            best, best_s = slices, seconds
        return best

    def _slices_pay(self, ring: Ring) -> bool:
        """Return whether a collective in two slices takes less time than an undivided one."""
        whole_s = self._matmuls_s(ring) + self._waits_s(ring)
        return self.exposed(ring) is None or self.sliced_s(ring, 2) < whole_s

    def sliced_s(self, ring: Ring, slices: int) -> float:
        """Return the seconds of a ring's matmuls overlapped with its collective in slices.

        t + tau + (m - 1) max(t, tau), with t and tau for one of m slices: `orders.py`'s formula.
        """
        cut_s = self._cut_s(ring, slices, sums=False)
        chunk_s, slice_s = cut_s / slices, self.collective_s(ring, slices)
        return chunk_s + slice_s + (slices - 1) * max(chunk_s, slice_s)

    def cut_s(self, ring: Ring, variant: Variant) -> float:
        """Return the seconds of one run of a ring's chunked matmuls if all hops hide."""
        return self._cut_s(ring, ring.first.ring.axis_size * variant.slices)

    def hops_s(self, ring: Ring, variant: Variant) -> float:
        """Return the seconds of a ring's hops, one after the other on their link; of one run."""
        count, sent = hops(ring, variant)
        return count * self.hop_s(ring.first.ring.axis, sent)

    def hop_s(self, axis: str, sent: int) -> float:
        """Return the seconds of one hop along an axis, of so many bytes from each device."""
        return self.cost.collective_s(PERMUTE, sent, pair(self.groups[axis]))

    def gather_s(self, axis: str, sent: int) -> float:
        """Return the seconds of an undecomposed all-gather along an axis, of so many bytes sent."""
        return self.cost.collective_s(OPCODE_OF["all_gather"], sent, self.groups[axis])

    def collective_s(self, ring: Ring, slices: int = 1) -> float:
        """Return the seconds of one of so many slices of a ring's collective."""
        axis = ring.first.ring.axis
        sent, kind = traffic(ring.first)[axis], OPCODE_OF[ring.kind]
        return self.cost.collective_s(kind, sent // slices, self.groups[axis])

    def _matmuls_s(self, ring: Ring) -> float:
        """Return the seconds of a ring's matmuls, each in one piece."""
        return sum(self._matmul_s(full_kernel(member)) for member in ring.members)

    def _cut_s(self, ring: Ring, pieces: int, *, sums: bool = True) -> float:
        cut = (self._chunk_s(member, pieces, ring.arrives, sums) for member in ring.members)
        return pieces * sum(cut)

    def _chunk_s(self, member: Member, pieces: int, arrives: bool, sums: bool) -> float:
        """Return the seconds of one of a member's chunks, with the copies that cutting needs."""
        apart = self.cost.on_cpus
        matmul, copied_bytes = chunk(member, pieces, arrives, sums=sums, adds_apart=apart)
        return self._matmul_s(matmul) + self.cost.memory_s(copied_bytes)

    def local_s(self, dot: Dot, matmul: splits.ShardedMatmul) -> float:
        """Return the seconds of one device's part of a matmul, in one piece; 0 without a price."""
        if not self._prices(dot):
            return 0.0
        return self._matmul_s(_kernel(dot, matmul, local_sizes(matmul)))

    def _matmul_s(self, m: MatmulKernel) -> float:
        return self.cost.matmul_s(m.m, m.n, m.k, batch=m.batch, dtype=m.dtype)

    def knows(self, ring: Ring) -> bool:
        """Return whether the dtypes of a ring's matmuls have a price."""
        return all(self._prices(member.dot) for member in ring.members)

    def _prices(self, dot: Dot) -> bool:
        return _HLO_DTYPES.get(_dtype(dot)) in self.cost.dtypes


def hops(ring: Ring, variant: Variant) -> tuple[int, int]:
    """Count a device's hops in one run of a ring, and the bytes that it sends in each."""
    layout = ring.first
    count = (layout.ring.axis_size - 1) * variant.slices
    sent = traffic(layout)[layout.ring.axis] // (2 if ring.kind == "all_reduce" else 1)
    return count, sent // count


def chunk(
    member: Member, pieces: int, arrives: bool, *, sums: bool = True, adds_apart: bool = False
) -> tuple[MatmulKernel, int]:
    """Return one chunk of a member's matmul on one device, and the bytes copied for it.

    Args:
        pieces: the number of pieces that the matmul is split into.
        arrives: whether an operand moves, and not results.
        sums: whether results that move do so hop by hop, and are added up on the way.
        adds_apart: whether partial results, of a chunk of what is summed over, are added up in
            kernels of their own.
    """
    assert member.layout is not None
    matmul, letter = member.layout.matmul, member.layout.letter
    sizes = local_sizes(matmul)
    sizes[letter] = max(sizes[letter] // pieces, 1)
    bytes_of = {
        side: math.prod(sizes[c] for c in matmul.einsum.side(side)) * itemsize
        for side, itemsize in zip(SIDES, matmul.itemsize, strict=True)
    }
    held = [side for side in SIDES if letter in matmul.einsum.side(side)]
    if arrives:  # the result to its place; or the other operand's part that meets the chunk
        moving = member.layout.ring.collective.side if member.layout.ring.collective else None
        copied = [side for side in held if side != moving]
    else:  # the chunk's part of the operand, which is cut out
        copied = [side for side in held if side != "out"]
    moved = sum(2 * bytes_of[side] for side in copied)
    if arrives and adds_apart and letter not in matmul.einsum.side("out"):
        moved += 3 * bytes_of["out"]
    if sums and not arrives:  # a result is copied to where it is sent from, and added to another
        moved += (2 + 3) * bytes_of["out"]
    return _kernel(member.dot, matmul, sizes), moved


def full_kernel(member: Member) -> MatmulKernel:
    """Return a member's matmul as one device does it, all its chunks together."""
    return _kernel(member.dot, member.matmul, local_sizes(member.matmul))


def _kernel(dot: Dot, matmul: splits.ShardedMatmul, sizes: Mapping[str, int]) -> MatmulKernel:
    """Describe the work of a matmul with dims of these sizes on a device."""
    lhs, rhs, out = (set(matmul.einsum.side(side)) for side in SIDES)

    def product(letters: set[str]) -> int:
        return math.prod(sizes[c] for c in letters)

    return MatmulKernel(
        m=product(lhs & out - rhs),
        n=product(rhs & out - lhs),
        k=product(lhs & rhs - out),
        batch=product(lhs & rhs & out),
        dtype=_HLO_DTYPES[_dtype(dot)],
    )


def local_sizes(matmul: splits.ShardedMatmul) -> dict[str, int]:
    """Return the dims of the matmul that one device does, all its chunks together, by letter."""
    sizes = dict(matmul.einsum.sizes)
    for split in matmul.splits:
        if isinstance(split, Split) and (letter := _shares(split)):
            sizes[letter] = math.ceil(sizes[letter] / split.axis_size)
    return sizes


def _shares(split: Split) -> str | None:
    """Return the dim along which an axis shares the work: one on a side that does not move."""
    moving = split.collective.side if split.collective else None
    return next(filter(None, (split.letter_on(side) for side in SIDES if side != moving)), None)


def _dtype(dot: Dot) -> str:
    return np.dtype(dot.eqn.invars[0].aval.dtype).name


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
