"""How the pieces of each ring travel: the cheapest variant by the cost model.

With t for the matmuls of one chunk, tau for one chunk's hop and N devices, a ring takes

    t + (N - 1) max(t, tau)

(CommFuse, arXiv 2604.24013; the sum that each step of a scatter adds is part of its t), a
collective in m slices c / m + (m - 1) max(c, w) / m + w / m, with c for the collective and w for
the whole matmul, each slice at its own rate; and left alone it takes c + w. On NVLink a hop can
cost more than the chunk over it, and N - 1 hops more than NCCL's one collective.

What the formulas do not know: what else of the step could hide a collective that is left alone, how
rings queue for one link, and how kernels slow each other down. So a ring stays unless something
else is clearly cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxoverlap.cost import CostModel, Group
from jaxoverlap.passes.layout import traffic
from jaxoverlap.passes.rings import Member, Ring
from jaxoverlap.passes.sites import SIDES, Split
from jaxoverlap.plan import Variant

_CLEARLY = 0.9  # of the usual variant's seconds
_SLICES = (2, 4)
_HLO_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


@dataclass(frozen=True)
class Prices:
    """What rings cost on a cluster.

    Attributes:
        cost: its cost model.
        groups: who takes part in a collective along each mesh axis.
    """

    cost: CostModel
    groups: Mapping[str, Group]

    def cheapest(self, ring: Ring, usual: Variant) -> tuple[Variant, str]:
        """The variant of a ring, and why it is another than the usual one.

        A ring of matmuls whose dtype the cost model does not know stays as usual.
        """
        if not self._knows(ring):
            return usual, ""
        seconds = {v: self.seconds(ring, v) for v in (usual, *_others(ring))}
        best = min(seconds, key=lambda v: seconds[v])
        if seconds[best] > _CLEARLY * seconds[usual]:
            return usual, ""
        return best, f"{_us(seconds[best])} by the cost model, {usual} {_us(seconds[usual])}"

    def seconds(self, ring: Ring, variant: Variant) -> float:
        """What a ring and its matmuls take in one run, in a variant, with nothing beside them."""
        layout = ring.first
        group, n = self.groups[layout.ring.axis], layout.ring.axis_size
        sent = traffic(layout)[layout.ring.axis]
        whole_s = sum(self._matmul_s(m, 1) for m in ring.members)
        if variant.style == "plain":
            return self._collective_s(ring, sent) + whole_s
        if variant.style == "sliced":
            m = variant.slices
            slice_s = sum(self._matmul_s(member, m) for member in ring.members)
            part_s = self._collective_s(ring, sent // m)
            return part_s + (m - 1) * max(part_s, slice_s) + slice_s
        after_s = 0.0
        if ring.kind == "all_reduce":  # half of what is sent is the scatter's; a gather follows it
            sent //= 2
            after_s = self.cost.collective_s("all-gather", sent, group)
        pieces = n * variant.slices
        hop = sent // ((n - 1) * variant.slices)
        pair = Group(2, min(group.domains, 2), group.by_copy)
        hop_s = self.cost.collective_s("collective-permute", hop, pair)
        chunk_s = sum(self._matmul_s(member, pieces) for member in ring.members)
        if not ring.arrives and ring.kind != "all_to_all":  # reads two sums, and writes one
            chunk_s += self.cost.memory_s(3 * hop)
        return chunk_s + (pieces - 1) * max(chunk_s, hop_s) + after_s

    def _collective_s(self, ring: Ring, sent: int) -> float:
        """Seconds of the whole collective, or of a slice of it."""
        group = self.groups[ring.first.ring.axis]
        return self.cost.collective_s(ring.kind.replace("_", "-"), sent, group)

    def _matmul_s(self, member: Member, pieces: int) -> float:
        """Seconds of a member's matmul on one device, or of one of its pieces."""
        assert member.layout is not None
        einsum, sizes = member.layout.matmul.einsum, local_sizes(member)
        letter = member.layout.letter
        sizes[letter] = max(sizes[letter] // pieces, 1)
        lhs, rhs, out = (set(einsum.side(side)) for side in SIDES)

        def product(letters: set[str]) -> int:
            return math.prod(sizes[c] for c in letters)

        return self.cost.matmul_s(
            product(lhs & out - rhs),
            product(rhs & out - lhs),
            product(lhs & rhs - out),
            batch=product(lhs & rhs & out),
            dtype=_HLO_DTYPES[_dtype(member)],
        )

    def _knows(self, ring: Ring) -> bool:
        known = self.cost.dtypes
        return all(_HLO_DTYPES.get(_dtype(member)) in known for member in ring.members)


def local_sizes(member: Member) -> dict[str, int]:
    """The dims of the matmul that one device does, all its chunks together, by letter."""
    assert member.layout is not None
    matmul = member.layout.matmul
    sizes = dict(matmul.einsum.sizes)
    for split in matmul.splits:
        if isinstance(split, Split) and (letter := _shares(split)):
            sizes[letter] //= split.axis_size
    return sizes


def _shares(split: Split) -> str | None:
    """The dim along which an axis shares the work: where it lies on a side that does not move."""
    moving = split.motion.side if split.motion else None
    return next(filter(None, (split.at(side) for side in SIDES if side != moving)), None)


def _others(ring: Ring) -> Iterator[Variant]:
    """What a ring could be instead."""
    yield Variant("plain")
    for slices in _SLICES:
        if ring.first.chunk() % slices == 0:
            yield Variant("sliced", slices)


def _dtype(member: Member) -> str:
    return np.dtype(member.dot.eqn.invars[0].aval.dtype).name


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
