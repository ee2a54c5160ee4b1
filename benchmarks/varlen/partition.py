"""Share sequences out over rings: Zeppelin's two-level partitioner (arXiv 2509.21841).

The paper fills node buckets, then device buckets, by quadratic cost under token capacity; its
algorithms' text was not at hand, so this is a reconstruction. Rings nest, so a device's time is the
sum over the ring sizes of its ring's time, and the batch's is the greatest of these sums:

1. Long sequences are split: a sequence gets the smallest ring that it fits in and on which it takes
   no longer than a share of the balanced time. Several shares are tried, and one size for all.
2. From the largest rings down, the longest sequence first, each goes to the ring that is done
   first and has room (LPT; Graham 1969).
3. Where few sequences leave devices uneven, single ones move, or two are swapped, while that helps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxoverlap.train.varlen import AttentionCosts, Nodes
from jaxoverlap.train.varlen.costs import Floats
from jaxoverlap.train.varlen.rings import ring_s
from jaxoverlap.train.varlen.sharing import (
    Infeasible,
    Prices,
    Room,
    SequenceSharing,
    bound_s,
    prices_of,
    wanted_sizes,
)

_SHARES = (1.0, 0.5, 0.25)
_MORE_SHARES = tuple(np.geomspace(0.05, 3.0, 60).tolist())
_FEW, _IMPROVED = 96, 320  # sequences for which all shares are tried, and improved together
GOOD = 1.02  # of the lower bound: nothing more is tried
_FEWEST, _RESIZED = 16, 6  # sequences for which all sizes are tried, and the longest of these


@dataclass
class RaggedSharing(SequenceSharing):
    """Sequences on rings without a program: tokens stay for the linear layers where they are.

    Attributes:
        capacity: slots of a device.
    """

    capacity: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds: dict[int, Floats] = {}

    def ring_seconds(self, at: int) -> Floats:
        """Return the seconds of each ring of a size, with those of its tokens' linear layers."""
        if at not in self._seconds:
            size, compute, tokens = self.nodes.ring_sizes[at], self.compute_s[at], self.tokens[at]
            attention_s = ring_s(compute, tokens, size, self.nodes, self.costs)
            self._seconds[at] = attention_s + self.token_s * tokens
        return self._seconds[at]

    def changed(self, at: int) -> None:
        self._seconds.pop(at, None)

    def device_tokens(self) -> Floats:
        """Return the slots that each device needs."""
        return self._of_devices(self.tokens)

    def room(self, at: int) -> Room:
        size = self.nodes.ring_sizes[at]
        left = self.capacity - self.device_tokens().reshape(-1, size).max(axis=1)
        return Room(size, left.tolist())

    def load_s(self) -> Floats:
        return self.device_seconds()

    def added_s(self, at: int, indices: np.ndarray) -> Floats:
        return self.price.alone_s[at][indices]

    def _helped(self, before: tuple[float, float]) -> bool:
        return super()._helped(before) and bool(self.device_tokens().max() <= self.capacity)


def partition(
    lengths: np.ndarray,
    nodes: Nodes,
    costs: AttentionCosts,
    *,
    capacity: int,
    token_s: float = 0.0,
) -> RaggedSharing:
    """Share sequences out so that the slowest device is done early.

    Args:
        lengths: i[sequences], tokens of each.
        nodes, costs, capacity, token_s: as `RaggedSharing` has them.

    Raises:
        Infeasible: if they do not fit.
    """
    price = prices_of(lengths, nodes, costs, token_s=token_s)
    fresh = functools.partial(
        RaggedSharing, lengths, nodes, costs, price, token_s, capacity=capacity
    )
    least_s = bound_s(price, nodes)
    few = len(lengths) <= _FEW
    shares = _MORE_SHARES if few else _SHARES
    wanted = [wanted_sizes(price, capacity, share * least_s) for share in shares]
    if few:
        wanted += _alike(price, capacity)
    distinct = {sizes.tobytes(): sizes for sizes in wanted}.values()
    tried = ((fresh(), sizes) for sizes in distinct)
    found = [sharing for sharing, sizes in tried if sharing.fill(sizes)]
    if not found:
        return _split_all(fresh())
    found.sort(key=RaggedSharing.makespan_s)
    if not few:
        found[0].improve(moves=8, longest=6)
        return found[0]
    best = found[0]
    for sharing in found[: _IMPROVED // len(lengths)]:
        if best.makespan_s() > GOOD * least_s:
            sharing.improve()
            best = min(best, sharing, key=RaggedSharing.makespan_s)
    return _resized(best, fresh) if len(lengths) <= _FEWEST else best


def _resized(best: RaggedSharing, fresh: Callable[[], RaggedSharing]) -> RaggedSharing:
    """Try rings of other sizes for each of the longest sequences, one after the other."""
    for index in np.argsort(-best.lengths, kind="stable")[:_RESIZED]:
        for at in range(len(best.nodes.ring_sizes)):
            wanted = best.size.copy()
            if wanted[index] == at or best.price.tokens[at][index] > best.capacity:
                continue
            wanted[index] = at
            other = fresh()
            if other.fill(wanted):
                other.improve()
                best = min(best, other, key=RaggedSharing.makespan_s)
    return best


def _alike(price: Prices, capacity: int) -> list[np.ndarray]:
    """Return one size of ring for all sequences, for each size; larger where there is no room."""
    room = np.stack(price.tokens) <= capacity
    least = np.where(room.any(axis=0), room.argmax(axis=0), len(room) - 1)
    return [np.maximum(least, at) for at in range(len(room))]


def _split_all(sharing: RaggedSharing) -> RaggedSharing:
    """Put all sequences on the largest ring: what always fits if anything does, less rounding."""
    at = len(sharing.nodes.ring_sizes) - 1
    needed = int(sharing.price.tokens[at].sum())
    if needed > sharing.capacity:
        raise Infeasible.split(sharing.lengths, sharing.nodes, sharing.capacity, needed)
    everything = np.arange(len(sharing.lengths))
    sharing.put(everything, at, np.zeros_like(everything))
    return sharing


def ragged_seconds(
    lengths: np.ndarray, nodes: Nodes, costs: AttentionCosts, *, capacity: int
) -> float:
    """Return the seconds of a layer that no program is compiled for: sizes as the batch is.

    A measure of what static sizes cost. Tokens stay for the linear layers where attention has
    them, and the groups that exchange heads are the best choice for this batch alone.
    """
    able = [g for g in nodes.ring_sizes[1:] if costs.kv_heads % g == 0]
    inside = [g for g in able if not nodes.crosses(g)]
    choices = [replace(costs, exchanged=tuple(sizes)) for sizes in (able, inside, [])]
    shared = (
        partition(lengths, nodes, priced, capacity=capacity, token_s=priced.linear_s)
        for priced in choices
    )
    return min(map(RaggedSharing.makespan_s, shared))
