"""Share sequences out over rings: Zeppelin's two-level partitioner (arXiv 2509.21841).

The paper fills node buckets, then device buckets, by quadratic cost under token capacity; its
algorithms' text was not at hand, so this is a reconstruction. Rings nest, so a device's time is the
sum over the ring sizes of its ring's time, and the batch's is the greatest of these sums:

1. Long sequences are split: a sequence gets the smallest ring that it fits in and on which it takes
   no longer than a share of the balanced time. Several shares are tried, and one size for all.
2. From the largest rings down, the longest sequence first, each goes to the ring that is done
   first and has room (LPT; Graham 1969).
3. Where few sequences leave devices uneven, single ones move, or change places, while that helps.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxoverlap.train.varlen.costs import AttentionCosts, Floats
from jaxoverlap.train.varlen.rings import Nodes, chunk_slots, ring_s

_SHARES = (1.0, 0.5, 0.25)
_MORE_SHARES = tuple(np.geomspace(0.05, 3.0, 60).tolist())
_FEW, _IMPROVED = 96, 320  # sequences for which all shares are tried, and improved together
GOOD = 1.02  # of the lower bound: nothing more is tried
_MOVES = 60
_FEWEST, _RESIZED = 16, 6  # sequences for which all sizes are tried, and the longest of these


class Infeasible(ValueError):
    """A batch does not fit the devices; the message has the numbers."""


@dataclass
class Sharing:
    """Sequences on rings, and what that makes of each device.

    Attributes:
        lengths: tokens of each sequence.
        nodes, costs, capacity: where, at which prices, and the slots of a device.
        token_s: seconds that a device takes for each of its tokens beside attention: those of the
            linear layers, where tokens stay where attention has them.
        size: index into `nodes.ring_sizes` of each sequence's ring; -1 if it has none yet.
        ring: which ring of that size.
        compute_s: by size, the forward seconds of each ring on each of its devices.
        tokens: by size, the tokens of each ring on each of its devices.
    """

    lengths: np.ndarray
    nodes: Nodes
    costs: AttentionCosts
    capacity: int
    token_s: float = 0.0
    size: np.ndarray = field(init=False)
    ring: np.ndarray = field(init=False)
    compute_s: list[Floats] = field(init=False)
    tokens: list[Floats] = field(init=False)

    def __post_init__(self) -> None:
        n, total = len(self.lengths), self.nodes.total
        self.size, self.ring = np.full(n, -1), np.zeros(n, int)
        self.compute_s = [np.zeros(total // g) for g in self.nodes.ring_sizes]
        self.tokens = [np.zeros(total // g) for g in self.nodes.ring_sizes]
        self._seconds: dict[int, Floats] = {}

    def emptied(self) -> Sharing:
        """Return the same without any sequence on a ring."""
        return Sharing(self.lengths, self.nodes, self.costs, self.capacity, self.token_s)

    def ring_seconds(self, at: int) -> Floats:
        """Return the seconds of each ring of a size."""
        if at not in self._seconds:
            self._seconds[at] = self.attention_seconds(at) + self.token_s * self.tokens[at]
        return self._seconds[at]

    def attention_seconds(self, at: int) -> Floats:
        """Return the seconds of attention of each ring of a size."""
        size, compute, tokens = self.nodes.ring_sizes[at], self.compute_s[at], self.tokens[at]
        return ring_s(compute, tokens, size, self.nodes, self.costs)

    def device_seconds(self) -> Floats:
        """Return each device's seconds of attention, forward and backward."""
        return self._of_devices([self.ring_seconds(i) for i in range(len(self.tokens))])

    def device_tokens(self) -> Floats:
        """Return the slots that each device needs."""
        return self._of_devices(self.tokens)

    def _of_devices(self, of_rings: list[Floats]) -> Floats:
        """Return each device's sum of what its rings have."""
        total = of_rings[0].copy()
        for size, values in zip(self.nodes.ring_sizes[1:], of_rings[1:], strict=True):
            total.reshape(-1, size)[:] += values[:, None]
        return total

    def makespan_s(self) -> float:
        """Return the seconds of the slowest device."""
        return float(self.device_seconds().max())

    def put(self, index: Any, at: int, ring: Any, price: Prices) -> None:
        """Put a sequence, or several, on rings of one size."""
        self.size[index], self.ring[index] = at, ring
        if isinstance(index, int):
            self.compute_s[at][ring] += price.compute_s[at][index]
            self.tokens[at][ring] += price.tokens[at][index]
        else:
            np.add.at(self.compute_s[at], ring, price.compute_s[at][index])
            np.add.at(self.tokens[at], ring, price.tokens[at][index])
        self._seconds.pop(at, None)

    def take(self, index: int, price: Prices) -> tuple[int, int]:
        """Take a sequence off its ring, and return where it was."""
        at, ring = int(self.size[index]), int(self.ring[index])
        self.compute_s[at][ring] -= price.compute_s[at][index]
        self.tokens[at][ring] -= price.tokens[at][index]
        self.size[index] = -1
        self._seconds.pop(at, None)
        return at, ring


@dataclass(frozen=True)
class Prices:
    """What each sequence costs on rings of each size.

    Attributes:
        compute_s: by size, forward seconds on a device.
        tokens: by size, slots on a device.
        alone_s: by size, forward and backward seconds of a ring that has this sequence alone.
    """

    compute_s: list[Floats]
    tokens: list[np.ndarray]
    alone_s: list[Floats]


def prices_of(
    lengths: np.ndarray, nodes: Nodes, costs: AttentionCosts, *, token_s: float = 0.0
) -> Prices:
    """Price sequences on rings of each size."""
    compute = [costs.causal_s(lengths, g) for g in nodes.ring_sizes]
    tokens = [chunk_slots(lengths, g) for g in nodes.ring_sizes]
    alone = [
        ring_s(c, t, g, nodes, costs) + token_s * t
        for c, t, g in zip(compute, tokens, nodes.ring_sizes, strict=True)
    ]
    return Prices(compute, tokens, alone)


def partition(
    lengths: np.ndarray,
    nodes: Nodes,
    costs: AttentionCosts,
    *,
    capacity: int,
    token_s: float = 0.0,
) -> Sharing:
    """Share sequences out so that the slowest device is done early.

    Args:
        lengths: i[sequences], tokens of each.
        nodes, costs, capacity, token_s: as `Sharing` has them.

    Raises:
        Infeasible: if they do not fit.
    """
    price = prices_of(lengths, nodes, costs, token_s=token_s)
    fresh = functools.partial(Sharing, lengths, nodes, costs, capacity, token_s)
    least_s = bound_s(price, nodes)
    few = len(lengths) <= _FEW
    wanted = [
        _wanted(price, capacity, share * least_s) for share in (_MORE_SHARES if few else _SHARES)
    ]
    if few:
        wanted += _alike(price, capacity)
    distinct = {sizes.tobytes(): sizes for sizes in wanted}.values()
    found = [filled for sizes in distinct if (filled := _filled(fresh(), price, sizes))]
    if not found:
        return _split_all(fresh(), price)
    found.sort(key=Sharing.makespan_s)
    if not few:
        _improve(found[0], price, moves=8, longest=6)
        return found[0]
    best = found[0]
    for sharing in found[: _IMPROVED // len(lengths)]:
        if best.makespan_s() > GOOD * least_s:
            _improve(sharing, price)
            best = min(best, sharing, key=Sharing.makespan_s)
    return _resized(best, price) if len(lengths) <= _FEWEST else best


def _better(one: Sharing | None, other: Sharing | None) -> Sharing | None:
    """Return which of two is done first; None is no sharing."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=Sharing.makespan_s)


def _tried(sharing: Sharing, price: Prices, wanted: np.ndarray, few: bool) -> Sharing | None:
    """Put every sequence on a ring of the size wanted, and move some if there are few."""
    found = _filled(sharing, price, wanted)
    if found and few:
        _improve(found, price)
    return found


def _resized(best: Sharing, price: Prices) -> Sharing:
    """Try rings of other sizes for each of the longest sequences, one after the other."""
    for index in np.argsort(-best.lengths, kind="stable")[:_RESIZED]:
        for at in range(len(best.nodes.ring_sizes)):
            wanted = best.size.copy()
            if wanted[index] == at or price.tokens[at][index] > best.capacity:
                continue
            wanted[index] = at
            best = _better(best, _tried(best.emptied(), price, wanted, True)) or best
    return best


def bound_s(price: Prices, nodes: Nodes) -> float:
    """Return what no sharing is faster than, but for what sequences of one ring save together.

    The longest of single sequences at their best, and all of them spread evenly at their least.
    """
    alone = np.min(price.alone_s, axis=0).max(initial=0.0)
    return max(_shared_s(price, nodes), float(alone))


def _shared_s(price: Prices, nodes: Nodes) -> float:
    """Return the seconds of the batch if every sequence were shared evenly at its least price."""
    per_size = np.stack(
        [a * g for a, g in zip(price.alone_s, nodes.ring_sizes, strict=True)], axis=0
    )
    return float(per_size.min(axis=0).sum()) / nodes.total if per_size.size else 0.0


def _wanted(price: Prices, capacity: int, longest_s: float) -> np.ndarray:
    """Return the smallest ring of each sequence that has room and is fast enough.

    Where none is fast enough, it is the fastest that has room.
    """
    alone = np.where(np.stack(price.tokens) <= capacity, np.stack(price.alone_s), np.inf)
    short = alone <= longest_s
    return np.where(short.any(axis=0), short.argmax(axis=0), alone.argmin(axis=0))


def _alike(price: Prices, capacity: int) -> list[np.ndarray]:
    """Return one size of ring for all sequences, for each size; larger where there is no room."""
    room = np.stack(price.tokens) <= capacity
    least = np.where(room.any(axis=0), room.argmax(axis=0), len(room) - 1)
    return [np.maximum(least, at) for at in range(len(room))]


def _filled(sharing: Sharing, price: Prices, wanted: np.ndarray) -> Sharing | None:
    """Put every sequence on a ring, or return None where that does not work out."""
    sizes = sharing.nodes.ring_sizes
    order = np.lexsort((-sharing.lengths, -wanted))
    for at in range(len(sizes) - 1, -1, -1):
        if _fill(sharing, price, at, order[wanted[order] == at]).size:
            return None
    return sharing


def _fill(sharing: Sharing, price: Prices, at: int, indices: np.ndarray) -> np.ndarray:
    """Put sequences on rings of one size, the ring first that is done first; return what is left.

    What has no room on any of them goes to the larger rings that have.
    """
    if not indices.size:
        return indices
    size, last = sharing.nodes.ring_sizes[at], len(sharing.nodes.ring_sizes) - 1
    seconds = sharing.device_seconds().reshape(-1, size).max(axis=1)
    room = sharing.capacity - sharing.device_tokens().reshape(-1, size).max(axis=1)
    heap = [(s, r) for r, s in enumerate(seconds.tolist())]
    heapq.heapify(heap)
    alone, tokens = price.alone_s[at][indices].tolist(), price.tokens[at][indices].tolist()
    free, chosen = room.tolist(), []
    for need, extra_s in zip(tokens, alone, strict=True):
        full = []
        while heap and free[heap[0][1]] < need:
            full.append(heapq.heappop(heap))
        ring = heap[0][1] if heap else -1
        chosen.append(ring)
        if heap:
            heapq.heapreplace(heap, (heap[0][0] + extra_s, ring))
            free[ring] -= need
        for item in full:
            heapq.heappush(heap, item)
    rings = np.array(chosen)
    sharing.put(indices[rings >= 0], at, rings[rings >= 0], price)
    left = indices[rings < 0]
    return _fill(sharing, price, at + 1, left) if left.size and at < last else left


def _split_all(sharing: Sharing, price: Prices) -> Sharing:
    """Put all sequences on the largest ring: what always fits if anything does, less rounding."""
    at = len(sharing.nodes.ring_sizes) - 1
    needed = int(price.tokens[at].sum())
    if needed > sharing.capacity:
        longest = int(sharing.lengths.max(initial=0))
        raise Infeasible(
            f"{len(sharing.lengths)} sequences of {int(sharing.lengths.sum())} tokens, the longest "
            f"of {longest}, on {sharing.nodes.total} devices of {sharing.capacity} slots, "
            f"{sharing.nodes.total * sharing.capacity} in all: split evenly they need {needed} "
            "slots a device. Give fewer sequences, or a greater capacity"
        )
    everything = np.arange(len(sharing.lengths))
    sharing.put(everything, at, np.zeros_like(everything), price)
    return sharing


# -- moves ----------------------------------------------------------------------------------------


def _improve(sharing: Sharing, price: Prices, *, moves: int = _MOVES, longest: int = 12) -> None:
    """Move single sequences off the slowest device, or swap two, as long as that helps."""
    for _ in range(moves):
        before = _score(sharing)
        slowest = int(sharing.device_seconds().argmax())
        sizes = np.array(sharing.nodes.ring_sizes)
        on = np.flatnonzero(sharing.ring == slowest // sizes[sharing.size])
        on = on[np.argsort(-sharing.lengths[on], kind="stable")][:longest]
        if not any(_moved(sharing, price, int(index), before) for index in on):
            return


def _score(sharing: Sharing) -> tuple[float, float]:
    """Return the seconds of the slowest device, and then how uneven all are."""
    seconds = sharing.device_seconds()
    return float(seconds.max()), float((seconds**2).sum())


def _moved(sharing: Sharing, price: Prices, index: int, before: tuple[float, float]) -> bool:
    """Move a sequence to its best place, or swap it with one there; return whether it helped."""
    at, ring = sharing.take(index, price)
    for new_at, new_ring in _places(sharing, price, index):
        if (new_at, new_ring) == (at, ring):
            continue
        sharing.put(index, new_at, new_ring, price)
        if _score(sharing) < (before[0] * (1 - 1e-9), before[1]) and _has_room(sharing):
            return True
        if new_at == at and _swapped(sharing, price, index, (at, ring), before):
            return True
        sharing.take(index, price)
    sharing.put(index, at, ring, price)
    return False


def _places(sharing: Sharing, price: Prices, index: int) -> list[tuple[int, int]]:
    """Return the three least loaded rings of each size that have room for a sequence."""
    seconds, found = sharing.device_seconds(), []
    for at, size in enumerate(sharing.nodes.ring_sizes):
        done = seconds.reshape(-1, size).max(axis=1) + price.alone_s[at][index]
        found += [(float(done[r]), at, int(r)) for r in np.argsort(done, kind="stable")[:3]]
    return [(at, ring) for _, at, ring in sorted(found)]


def _has_room(sharing: Sharing) -> bool:
    return bool(sharing.device_tokens().max() <= sharing.capacity)


def _swapped(
    sharing: Sharing,
    price: Prices,
    index: int,
    home: tuple[int, int],
    before: tuple[float, float],
) -> bool:
    """Send another sequence of the ring where one has come back to where that was."""
    at, ring = int(sharing.size[index]), int(sharing.ring[index])
    others = np.flatnonzero((sharing.size == at) & (sharing.ring == ring))
    for other in others[:16]:
        if other == index or sharing.lengths[other] >= sharing.lengths[index]:
            continue
        sharing.take(int(other), price)
        sharing.put(int(other), *home, price)
        if _score(sharing) < (before[0] * (1 - 1e-9), before[1]) and _has_room(sharing):
            return True
        sharing.take(int(other), price)
        sharing.put(int(other), at, ring, price)
    return False
