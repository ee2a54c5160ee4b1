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

import numpy as np
from numpy.typing import ArrayLike

from jaxoverlap.train.varlen.costs import AttentionCosts
from jaxoverlap.train.varlen.improve import improve
from jaxoverlap.train.varlen.rings import Nodes
from jaxoverlap.train.varlen.sharing import Infeasible, Prices, SequenceSharing, prices_of

_SHARES = (1.0, 0.5, 0.25)
_MORE_SHARES = tuple(np.geomspace(0.05, 3.0, 60).tolist())
_FEW, _IMPROVED = 96, 320  # sequences for which all shares are tried, and improved together
GOOD = 1.02  # of the lower bound: nothing more is tried
_FEWEST, _RESIZED = 16, 6  # sequences for which all sizes are tried, and the longest of these


def partition(
    lengths: np.ndarray,
    nodes: Nodes,
    costs: AttentionCosts,
    *,
    capacity: int,
    token_s: float = 0.0,
) -> SequenceSharing:
    """Share sequences out so that the slowest device is done early.

    Args:
        lengths: i[sequences], tokens of each.
        nodes, costs, capacity, token_s: as `SequenceSharing` has them.

    Raises:
        Infeasible: if they do not fit.
    """
    price = prices_of(lengths, nodes, costs, token_s=token_s)
    fresh = functools.partial(SequenceSharing, lengths, nodes, costs, capacity, token_s)
    least_s = bound_s(price, nodes)
    few = len(lengths) <= _FEW
    shares = _MORE_SHARES if few else _SHARES
    wanted = [wanted_sizes(price, capacity, share * least_s) for share in shares]
    if few:
        wanted += _alike(price, capacity)
    distinct = {sizes.tobytes(): sizes for sizes in wanted}.values()
    found = [filled for sizes in distinct if (filled := _filled(fresh(), price, sizes))]
    if not found:
        return _split_all(fresh(), price)
    found.sort(key=SequenceSharing.makespan_s)
    if not few:
        improve(found[0], price, moves=8, longest=6)
        return found[0]
    best = found[0]
    for sharing in found[: _IMPROVED // len(lengths)]:
        if best.makespan_s() > GOOD * least_s:
            improve(sharing, price)
            best = min(best, sharing, key=SequenceSharing.makespan_s)
    return _resized(best, price) if len(lengths) <= _FEWEST else best


def _better(one: SequenceSharing | None, other: SequenceSharing | None) -> SequenceSharing | None:
    """Return which of two is done first; None is no sharing."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=SequenceSharing.makespan_s)


def _tried(
    sharing: SequenceSharing, price: Prices, wanted: np.ndarray, few: bool
) -> SequenceSharing | None:
    """Put every sequence on a ring of the size wanted, and move some if there are few."""
    found = _filled(sharing, price, wanted)
    if found and few:
        improve(found, price)
    return found


def _resized(best: SequenceSharing, price: Prices) -> SequenceSharing:
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


def _alike(price: Prices, capacity: int) -> list[np.ndarray]:
    """Return one size of ring for all sequences, for each size; larger where there is no room."""
    room = np.stack(price.tokens) <= capacity
    least = np.where(room.any(axis=0), room.argmax(axis=0), len(room) - 1)
    return [np.maximum(least, at) for at in range(len(room))]


def _filled(sharing: SequenceSharing, price: Prices, wanted: np.ndarray) -> SequenceSharing | None:
    """Put every sequence on a ring, or return None where that does not work out."""
    sizes = sharing.nodes.ring_sizes
    order = np.lexsort((-sharing.lengths, -wanted))
    for at in range(len(sizes) - 1, -1, -1):
        if _fill(sharing, price, at, order[wanted[order] == at]).size:
            return None
    return sharing


def _fill(sharing: SequenceSharing, price: Prices, at: int, indices: np.ndarray) -> np.ndarray:
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


def _split_all(sharing: SequenceSharing, price: Prices) -> SequenceSharing:
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
