"""Keep account of which sequences are on which group, and of what each device then has to do.

Sequences are put on groups one after the other (`SequenceSharing.fill`); then single ones move, or
two are swapped, while that helps (`SequenceSharing.improve`).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxoverlap.train.varlen.costs import AttentionCosts, Floats
from jaxoverlap.train.varlen.rings import Nodes, chunk_slots, ring_s

_MOVES = 60


class Infeasible(ValueError):
    """A batch does not fit the devices; the message has the numbers."""

    @classmethod
    def split(cls, lengths: np.ndarray, nodes: Nodes, capacity: int, need: int) -> Infeasible:
        """Return the error for sequences that need too many slots, split over all devices."""
        return cls(
            f"{len(lengths)} sequences of {lengths.sum()} tokens, the longest of "
            f"{lengths.max(initial=0)}, on {nodes.total} devices of {capacity} slots, "
            f"{nodes.total * capacity} in all: split evenly they need {need} slots a device. Give "
            "fewer sequences, or a greater capacity"
        )


@dataclass
class SequenceSharing(ABC):
    """Sequences on rings, and what that makes of each device.

    Attributes:
        lengths: tokens of each sequence.
        nodes, costs: the devices, and the prices of one layer.
        price: of the sequences.
        token_s: seconds of each of a device's tokens outside attention, by which rings are compared
            while they are filled.
        size: index into `nodes.ring_sizes` of each sequence's ring; -1 if it has none yet.
        ring: which ring of that size.
        compute_s: by size, the forward seconds of each ring on each of its devices.
        tokens: by size, the tokens of each ring on each of its devices.
    """

    lengths: np.ndarray
    nodes: Nodes
    costs: AttentionCosts
    price: Prices
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

    @abstractmethod
    def ring_seconds(self, at: int) -> Floats:
        """Return the seconds of each ring of a size."""

    @abstractmethod
    def changed(self, at: int) -> None:
        """Forget what followed from the sequences on rings of a size."""

    @abstractmethod
    def room(self, at: int) -> Room:
        """Return the slots that rings of a size have left."""

    @abstractmethod
    def load_s(self) -> Floats:
        """Return each device's seconds by which rings are compared while they are filled."""

    @abstractmethod
    def added_s(self, at: int, indices: np.ndarray) -> Floats:
        """Return by how many of these seconds sequences load a ring of a size."""

    def device_seconds(self) -> Floats:
        """Return each device's seconds of attention, forward and backward."""
        return self._of_devices([self.ring_seconds(i) for i in range(len(self.tokens))])

    def _of_devices(self, of_rings: list[Floats]) -> Floats:
        """Return each device's sum of what its rings have."""
        total = of_rings[0].copy()
        for size, values in zip(self.nodes.ring_sizes[1:], of_rings[1:], strict=True):
            total.reshape(-1, size)[:] += values[:, None]
        return total

    def makespan_s(self) -> float:
        """Return the seconds of the slowest device."""
        return float(self.device_seconds().max())

    def fill(self, wanted: np.ndarray) -> bool:
        """Put every sequence on a ring of the size wanted, or a larger one; False if one has none.

        From the largest rings down, the longest sequence first.
        """
        order, last = np.lexsort((-self.lengths, -wanted)), len(self.tokens) - 1
        for at in range(last, -1, -1):
            left, size = order[wanted[order] == at], at
            while left.size and size <= last:
                left = self._fill_size(size, left)
                size += 1
            if left.size:
                return False
        return True

    def _fill_size(self, at: int, indices: np.ndarray) -> np.ndarray:
        """Put each sequence on the ring of a size that is done first and has room (LPT).

        Returns:
            The sequences that found no room.
        """
        room, size = self.room(at), self.nodes.ring_sizes[at]
        tokens = self.price.tokens[at][indices].tolist()
        if max(room.own) < min(tokens):
            return indices
        heap = [(s, r) for r, s in enumerate(self.load_s().reshape(-1, size).max(axis=1).tolist())]
        heapq.heapify(heap)
        added, chosen = self.added_s(at, indices).tolist(), list[int]()
        for need, extra_s in zip(tokens, added, strict=True):
            full = []
            while heap and not room.has(heap[0][1], need):
                full.append(heapq.heappop(heap))
            ring = heap[0][1] if heap else -1
            chosen.append(ring)
            if heap:
                heapq.heapreplace(heap, (heap[0][0] + extra_s, ring))
                room.take(ring, need)
            for item in full:
                heapq.heappush(heap, item)
        rings = np.array(chosen)
        self.put(indices[rings >= 0], at, rings[rings >= 0])
        return indices[rings < 0]

    def put(self, index: Any, at: int, ring: Any) -> None:
        """Put a sequence, or several, on rings of one size."""
        self.size[index], self.ring[index] = at, ring
        if isinstance(index, int):
            self.compute_s[at][ring] += self.price.compute_s[at][index]
            self.tokens[at][ring] += self.price.tokens[at][index]
        else:
            np.add.at(self.compute_s[at], ring, self.price.compute_s[at][index])
            np.add.at(self.tokens[at], ring, self.price.tokens[at][index])
        self.changed(at)

    def take(self, index: int) -> tuple[int, int]:
        """Take a sequence off its ring, and return where it was."""
        at, ring = int(self.size[index]), int(self.ring[index])
        self.compute_s[at][ring] -= self.price.compute_s[at][index]
        self.tokens[at][ring] -= self.price.tokens[at][index]
        self.size[index] = -1
        self.changed(at)
        return at, ring

    # -- improving ------------------------------------------------------------------------------

    def improve(self, *, moves: int = _MOVES, longest: int = 12) -> None:
        """Move single sequences off the slowest device, or swap two, as long as that helps."""
        for _ in range(moves):
            before = self._score()
            slowest = int(self.device_seconds().argmax())
            sizes = np.array(self.nodes.ring_sizes)
            on = np.flatnonzero(self.ring == slowest // sizes[self.size])
            on = on[np.argsort(-self.lengths[on], kind="stable")][:longest]
            if not any(self._moved(int(index), before) for index in on):
                return

    def _score(self) -> tuple[float, float]:
        """Return the seconds of the slowest device, and then how uneven all are."""
        seconds = self.device_seconds()
        return float(seconds.max()), float((seconds**2).sum())

    def _helped(self, before: tuple[float, float]) -> bool:
        """Return whether a change since a score was one for the better."""
        return self._score() < (before[0] * (1 - 1e-9), before[1])

    def _moved(self, index: int, before: tuple[float, float]) -> bool:
        """Move a sequence to its best ring, or swap it with one there; return whether it helped."""
        at, ring = self.take(index)
        for new_at, new_ring in self._least_loaded(index):
            if (new_at, new_ring) == (at, ring):
                continue
            self.put(index, new_at, new_ring)
            if self._helped(before):
                return True
            if new_at == at and self._swapped(index, (at, ring), before):
                return True
            self.take(index)
        self.put(index, at, ring)
        return False

    def _least_loaded(self, index: int) -> list[tuple[int, int]]:
        """Return the three rings of each size on which a sequence would be done first."""
        seconds, found = self.device_seconds(), []
        for at, size in enumerate(self.nodes.ring_sizes):
            done = seconds.reshape(-1, size).max(axis=1) + self.price.alone_s[at][index]
            found += [(float(done[r]), at, int(r)) for r in np.argsort(done, kind="stable")[:3]]
        return [(at, ring) for _, at, ring in sorted(found)]

    def _swapped(self, index: int, home: tuple[int, int], before: tuple[float, float]) -> bool:
        """Send another sequence of the ring where one has come back to where that was."""
        at, ring = int(self.size[index]), int(self.ring[index])
        others = np.flatnonzero((self.size == at) & (self.ring == ring))
        for other in others[:16].tolist():
            if other == index or self.lengths[other] >= self.lengths[index]:
                continue
            self.take(other)
            self.put(other, *home)
            if self._helped(before):
                return True
            self.take(other)
            self.put(other, at, ring)
        return False


@dataclass
class Room:
    """Slots that rings of one size have left: each, and the larger groups that they are part of.

    Attributes:
        size: devices of a ring.
        own: slots left on each device of a ring.
        around: for larger groups how many rings each has, and the slots that it has left in all.
    """

    size: int
    own: list[float]
    around: Sequence[tuple[int, list[float]]] = ()

    def has(self, ring: int, tokens: float) -> bool:
        """Return whether a ring has room for so many tokens of each device."""
        total = tokens * self.size
        return self.own[ring] >= tokens and all(
            left[ring // rings] >= total for rings, left in self.around[-1:]
        )

    def take(self, ring: int, tokens: float) -> None:
        """Take so many slots of each device of a ring."""
        self.own[ring] -= tokens
        for rings, left in self.around:
            left[ring // rings] -= tokens * self.size


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


def bound_s(price: Prices, nodes: Nodes) -> float:
    """Return what no sharing is faster than, but for what sequences of one ring save together.

    The longest of single sequences at their best, and all of them spread evenly at their least.
    """
    alone = np.stack(price.alone_s)
    shared = (alone * np.array(nodes.ring_sizes)[:, None]).min(axis=0).sum() / nodes.total
    return float(max(shared, alone.min(axis=0).max(initial=0.0)))


def wanted_sizes(price: Prices, limits: ArrayLike, longest_s: float) -> np.ndarray:
    """Return the smallest ring of each sequence that has room and is fast enough.

    Where none is fast enough, it is the fastest that has room.

    Args:
        price: of the sequences.
        limits: slots of a device for each size, or for all.
        longest_s: seconds of a sequence alone that are fast enough.
    """
    room = np.broadcast_to(limits, len(price.tokens))[:, None]
    alone = np.where(np.stack(price.tokens) <= room, np.stack(price.alone_s), np.inf)
    short = alone <= longest_s
    return np.where(short.any(axis=0), short.argmax(axis=0), alone.argmin(axis=0))
