"""Keep account of which sequences are on which group, and of what each device then has to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxoverlap.train.varlen.costs import AttentionCosts, Floats
from jaxoverlap.train.varlen.rings import Nodes, chunk_slots, ring_s


class Infeasible(ValueError):
    """A batch does not fit the devices; the message has the numbers."""


@dataclass
class SequenceSharing:
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

    def emptied(self) -> SequenceSharing:
        """Return the same without any sequence on a ring."""
        return SequenceSharing(self.lengths, self.nodes, self.costs, self.capacity, self.token_s)

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

    def has_room(self) -> bool:
        """Return whether no device has more than it may."""
        return bool(self.device_tokens().max() <= self.capacity)

    def changed(self, at: int) -> None:
        """Forget what followed from the sequences on rings of a size."""
        self._seconds.pop(at, None)

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
        self.changed(at)

    def take(self, index: int, price: Prices) -> tuple[int, int]:
        """Take a sequence off its ring, and return where it was."""
        at, ring = int(self.size[index]), int(self.ring[index])
        self.compute_s[at][ring] -= price.compute_s[at][index]
        self.tokens[at][ring] -= price.tokens[at][index]
        self.size[index] = -1
        self.changed(at)
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
