"""Improve a sharing of few sequences: single ones move, or change places, while that helps."""

from __future__ import annotations

import numpy as np

from jaxoverlap.train.varlen.sharing import Prices, SequenceSharing

_MOVES = 60


def improve(
    sharing: SequenceSharing, price: Prices, *, moves: int = _MOVES, longest: int = 12
) -> None:
    """Move single sequences off the slowest device, or swap two, as long as that helps."""
    for _ in range(moves):
        before = _score(sharing)
        slowest = int(sharing.device_seconds().argmax())
        sizes = np.array(sharing.nodes.ring_sizes)
        on = np.flatnonzero(sharing.ring == slowest // sizes[sharing.size])
        on = on[np.argsort(-sharing.lengths[on], kind="stable")][:longest]
        if not any(_moved(sharing, price, int(index), before) for index in on):
            return


def _score(sharing: SequenceSharing) -> tuple[float, float]:
    """Return the seconds of the slowest device, and then how uneven all are."""
    seconds = sharing.device_seconds()
    return float(seconds.max()), float((seconds**2).sum())


def _moved(
    sharing: SequenceSharing, price: Prices, index: int, before: tuple[float, float]
) -> bool:
    """Move a sequence to its best place, or swap it with one there; return whether it helped."""
    at, ring = sharing.take(index, price)
    for new_at, new_ring in _places(sharing, price, index):
        if (new_at, new_ring) == (at, ring):
            continue
        sharing.put(index, new_at, new_ring, price)
        if _score(sharing) < (before[0] * (1 - 1e-9), before[1]) and sharing.has_room():
            return True
        if new_at == at and _swapped(sharing, price, index, (at, ring), before):
            return True
        sharing.take(index, price)
    sharing.put(index, at, ring, price)
    return False


def _places(sharing: SequenceSharing, price: Prices, index: int) -> list[tuple[int, int]]:
    """Return the three least loaded rings of each size that have room for a sequence."""
    seconds, found = sharing.device_seconds(), []
    for at, size in enumerate(sharing.nodes.ring_sizes):
        done = seconds.reshape(-1, size).max(axis=1) + price.alone_s[at][index]
        found += [(float(done[r]), at, int(r)) for r in np.argsort(done, kind="stable")[:3]]
    return [(at, ring) for _, at, ring in sorted(found)]


def _swapped(
    sharing: SequenceSharing,
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
        if _score(sharing) < (before[0] * (1 - 1e-9), before[1]) and sharing.has_room():
            return True
        sharing.take(int(other), price)
        sharing.put(int(other), at, ring, price)
    return False
