"""Pack the sequences of a batch into one program, so that its slowest device is done early.

Groups that exchange heads compute evenly wherever their tokens are, so their tokens go to the
devices that have fewest: they level what single devices hold, and linear layers get equal tokens
without a move of their own. So whole sequences are packed by seconds of attention alone, longest
first, on the group that is done first and has room (LPT; Graham 1969), and what has no room goes to
a larger group.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from jaxoverlap.train.varlen.costs import BACKWARD_COMPUTE, AttentionCosts, Floats
from jaxoverlap.train.varlen.improve import improve
from jaxoverlap.train.varlen.partition import bound_s, wanted_sizes
from jaxoverlap.train.varlen.rings import Bounds, Nodes, beside_s, static_s
from jaxoverlap.train.varlen.sharing import Prices, SequenceSharing, prices_of

_SHARES = (8.0, 1.0, 0.6, 0.35, 0.2, 0.05)
_WEIGHTS = (0.0, 1.0)  # of a token's linear layers, while groups are filled
_PENALTY = 4.0  # times a token's linear layers, for a token that has no room
_IMPROVED = 2  # packings that are improved, the best at first sight
_MOVES, _LONGEST = 12, 6  # moves of one of the longest of the slowest device


def levelled(held: Floats, more: Floats, most: int) -> Floats:
    """Return what each device gets so that all of a group hold equally much in the end.

    Args:
        held: f[groups, devices], tokens that devices hold.
        more: f[groups], tokens to be shared out in each group.
        most: tokens that a device can get.

    Returns:
        f[groups, devices]; fewer in all than `more` where there is no room.
    """
    edges = np.sort(np.concatenate([held, held + most], axis=1), axis=1)
    filled = np.clip(edges[:, :, None] - held[:, None, :], 0, most).sum(axis=2)
    last = edges.shape[1] - 1
    above = np.clip((filled < more[:, None]).sum(axis=1), 1, last)
    rows = np.arange(len(held))
    low, high = edges[rows, above - 1], edges[rows, above]
    before, after = filled[rows, above - 1], filled[rows, above]
    part = np.clip((more - before) / np.maximum(after - before, 1e-12), 0.0, 1.0)
    level = low + part * (high - low)
    return np.clip(level[:, None] - held, 0, most)


@dataclass
class Packing(SequenceSharing):
    """Sequences on the groups of one program.

    Tokens of groups that exchange heads are counted as their mean on a device.

    Attributes:
        bounds: the static sizes of the program.
    """

    bounds: Bounds = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.nodes.ring_sizes
        self._levels: list[np.ndarray] = [at for at, g in enumerate(sizes) if self.bounds.width(g)]  # type: ignore[assignment]
        self._shares: dict[int, Floats] | None = None

    def changed(self, at: int) -> None:
        """Forget what followed from the sequences on groups of a size."""
        super().changed(at)
        self._shares = None

    @property
    def exchanged(self) -> list[int]:
        """Return the indices of the sizes whose groups exchange heads, the smallest first."""
        sizes = self.nodes.ring_sizes
        return [at for at, size in enumerate(sizes) if size in self.bounds.exchanged]

    def fixed_tokens(self) -> Floats:
        """Return each device's tokens of sequences alone or on rings, which have no choice."""
        levels = self.exchanged
        return self._of_devices([t * (at not in levels) for at, t in enumerate(self.tokens)])

    def shares(self) -> dict[int, Floats]:
        """Return by size of group that exchanges heads each device's tokens of these groups."""
        if self._shares is None:
            held, self._shares = self.fixed_tokens(), {}
            for at in self.exchanged:
                size = self.nodes.ring_sizes[at]
                each = levelled(
                    held.reshape(-1, size), self.tokens[at] * size, self.bounds.width(size)
                ).ravel()
                self._shares[at] = each
                held = held + each
        return self._shares

    def attention_seconds(self, at: int) -> Floats:
        """Return the seconds of attention of each group of a size, by the program's slots."""
        size = self.nodes.ring_sizes[at]
        tokens = self.shares()[at] if size in self.bounds.exchanged else self.tokens[at]
        return static_s(self.compute_s[at], tokens, size, self.bounds, self.nodes, self.costs)

    def ring_seconds(self, at: int) -> Floats:
        """Return the same: all devices take equally long for linear layers."""
        return self.attention_seconds(at)

    def device_tokens(self) -> Floats:
        """Return each device's tokens, those of exchanging groups levelled."""
        return self.fixed_tokens() + sum(self.shares().values(), np.zeros(self.nodes.total))

    def device_seconds(self) -> Floats:
        """Return each device's seconds of attention, and a penalty for tokens without room."""
        return super().device_seconds() + _PENALTY * self.costs.linear_s * self.over()

    def over(self) -> Floats:
        """Return the tokens of each device that have no room there."""
        over = np.maximum(self.device_tokens() - self.bounds.held, 0.0)
        for at, size in enumerate(self.nodes.ring_sizes):
            if size in self.bounds.exchanged:
                placed = self.shares()[at].reshape(-1, size).sum(axis=1) / size
                over += np.repeat(self.tokens[at] - placed, size)
            else:
                over += np.repeat(np.maximum(self.tokens[at] - self.bounds.width(size), 0.0), size)
        return over

    def has_room(self) -> bool:
        """Return whether sequences may stand so; the price has what is against it."""
        return True

    def fits(self) -> bool:
        """Return whether every token has a slot, and no device more tokens than it may."""
        return float(self.over().max()) < 1e-3

    def layer_s(self) -> float:
        """Return the seconds of a layer, forward and backward."""
        return self.makespan_s() + beside_s(self.bounds, self.nodes, self.costs)


def packing_prices(lengths: np.ndarray, nodes: Nodes, costs: AttentionCosts) -> Prices:
    """Price sequences on groups of each size; exchanged ones have their mean tokens on a device."""
    price = prices_of(lengths, nodes, costs)
    tokens = [
        lengths / g if g in costs.exchanged else t
        for g, t in zip(nodes.ring_sizes, price.tokens, strict=True)
    ]
    return replace(price, tokens=tokens)


def packed(
    lengths: np.ndarray,
    nodes: Nodes,
    costs: AttentionCosts,
    bounds: Bounds,
    *,
    thorough: bool = True,
) -> Packing | None:
    """Pack sequences into one program as well as is found, which may not fit; None if none is.

    Args:
        lengths: i[sequences], tokens of each.
        nodes, costs: the devices, and the prices of one layer.
        bounds: the static sizes of the program.
        thorough: whether single sequences are then moved while that helps.
    """
    if lengths.sum() > bounds.tokens * nodes.total:
        return None
    costs = replace(costs, exchanged=bounds.exchanged)
    price = packing_prices(lengths, nodes, costs)
    limits = np.array([bounds.width(size) for size in nodes.ring_sizes])
    least_s = bound_s(price, nodes)
    wanted = [wanted_sizes(price, limits, share * least_s) for share in _SHARES]
    distinct = {sizes.tobytes(): sizes for sizes in wanted}.values()
    found = []
    for sizes, weight in itertools.product(distinct, _WEIGHTS):
        token_s = weight * costs.linear_s
        packing = Packing(lengths, nodes, costs, bounds.slots, token_s, bounds=bounds)
        if _filled(packing, price, sizes):
            found.append(packing)
    found.sort(key=Packing.makespan_s)
    if thorough:
        for packing in found[:_IMPROVED]:
            improve(packing, price, moves=_MOVES, longest=_LONGEST)
    return min(found, key=Packing.makespan_s, default=None)


def _filled(packing: Packing, price: Prices, wanted: np.ndarray) -> bool:
    """Put every sequence on a group of the size wanted or a larger one; False if one has none."""
    order, last = np.lexsort((-packing.lengths, -wanted)), len(packing.tokens) - 1
    for at in range(last, -1, -1):
        left, size = order[wanted[order] == at], at
        while left.size and size <= last:
            left = _filled_size(packing, price, size, left)
            size += 1
        if left.size:
            return False
    return True


def _filled_size(packing: Packing, price: Prices, at: int, indices: np.ndarray) -> np.ndarray:
    """Put sequences on groups of one size, the group first that is done first; return the rest."""
    room = _Room(packing, at)
    if not room.width:
        return indices
    size = packing.nodes.ring_sizes[at]
    weighed = packing.device_seconds() + packing.token_s * packing.device_tokens()
    seconds = weighed.reshape(-1, size).max(axis=1)
    heap = [(s, r) for r, s in enumerate(seconds.tolist())]
    heapq.heapify(heap)
    alone = (1 + BACKWARD_COMPUTE) * price.compute_s[at][indices]
    alone = (alone + packing.token_s * price.tokens[at][indices]).tolist()
    tokens, chosen = price.tokens[at][indices].tolist(), []
    for need, extra_s in zip(tokens, alone, strict=True):
        full = []
        while heap and not room.has(heap[0][1], need):
            full.append(heapq.heappop(heap))
        group = heap[0][1] if heap else -1
        chosen.append(group)
        if heap:
            heapq.heapreplace(heap, (heap[0][0] + extra_s, group))
            room.take(group, need)
        for item in full:
            heapq.heappush(heap, item)
    groups = np.array(chosen)
    packing.put(indices[groups >= 0], at, groups[groups >= 0], price)
    return indices[groups < 0]


class _Room:
    """Slots that are left to groups of one size: of each, and of the groups that they are in."""

    def __init__(self, packing: Packing, at: int):
        sizes, bounds = packing.nodes.ring_sizes, packing.bounds
        self.size, self.width = sizes[at], bounds.width(sizes[at])
        own = self.width - packing.tokens[at]
        if at not in packing.exchanged:
            fixed = packing.fixed_tokens().reshape(-1, self.size).max(axis=1)
            own = np.minimum(own, bounds.held - fixed)
        self.own: list[float] = own.tolist()
        held = packing.device_tokens()
        around = [sizes[i] for i in packing.exchanged if i >= at]
        self.around = [
            (size // self.size, (size * bounds.held - held.reshape(-1, size).sum(axis=1)).tolist())
            for size in around
        ]

    def has(self, group: int, tokens: float) -> bool:
        total = tokens * self.size
        return self.own[group] >= tokens and all(
            left[group // groups] >= total for groups, left in self.around[-1:]
        )

    def take(self, group: int, tokens: float) -> None:
        self.own[group] -= tokens
        for groups, left in self.around:
            left[group // groups] -= tokens * self.size
