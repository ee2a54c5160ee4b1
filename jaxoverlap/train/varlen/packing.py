"""Pack the sequences of a batch into one program, so that its slowest device is done early.

Groups that exchange heads compute evenly wherever their tokens are, so their tokens go to the
devices that have fewest: they level what single devices hold, and linear layers get equal tokens
without a move of their own. So sequences are packed by seconds of attention alone, longest first,
on the group that is done first and has room (LPT; Graham 1969), and what has no room goes to a
larger group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from jaxoverlap.train.varlen.costs import BACKWARD_COMPUTE, AttentionCosts, Floats
from jaxoverlap.train.varlen.rings import Bounds, Nodes, beside_s, costs_in, hidden_s, static_s
from jaxoverlap.train.varlen.sharing import (
    Prices,
    Room,
    SequenceSharing,
    bound_s,
    prices_of,
    wanted_sizes,
)

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
    _shares: dict[int, Floats] | None = field(init=False, default=None)

    def changed(self, at: int) -> None:
        """Forget what followed from the sequences on groups of a size."""
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

    def ring_seconds(self, at: int) -> Floats:
        """Return the seconds of attention of each group of a size, by the program's slots."""
        size = self.nodes.ring_sizes[at]
        tokens = self.shares()[at] if size in self.bounds.exchanged else self.tokens[at]
        return static_s(self.compute_s[at], tokens, size, self.bounds, self.nodes, self.costs)

    def device_tokens(self) -> Floats:
        """Return each device's tokens, those of exchanging groups levelled."""
        return self.fixed_tokens() + sum(self.shares().values(), np.zeros(self.nodes.total))

    def device_seconds(self) -> Floats:
        """Return each device's seconds of attention, and a penalty for tokens without room.

        Any assignment is allowed. Linear layers do not count, as all devices have equal ones.
        """
        hidden = hidden_s(self.ring_seconds(0), self.bounds, self.nodes, self.costs)
        return super().device_seconds() - hidden + _PENALTY * self.costs.linear_s * self.over()

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

    def room(self, at: int) -> Room:
        """Return the slots that groups of a size have left, and those that they are part of."""
        sizes, bounds = self.nodes.ring_sizes, self.bounds
        size, own = sizes[at], bounds.width(sizes[at]) - self.tokens[at]
        if at not in self.exchanged:
            fixed = self.fixed_tokens().reshape(-1, size).max(axis=1)
            own = np.minimum(own, bounds.held - fixed)
        held = self.device_tokens()
        larger = [sizes[i] for i in self.exchanged if i >= at]
        return Room(
            size,
            own.tolist(),
            [
                (g // size, (g * bounds.held - held.reshape(-1, g).sum(axis=1)).tolist())
                for g in larger
            ],
        )

    def load_s(self) -> Floats:
        """Return each device's seconds of attention, and those of its tokens' linear layers."""
        return self.device_seconds() + self.token_s * self.device_tokens()

    def added_s(self, at: int, indices: np.ndarray) -> Floats:
        """Return the same of sequences on groups of a size: attention without its hops."""
        alone = (1 + BACKWARD_COMPUTE) * self.price.compute_s[at][indices]
        return alone + self.token_s * self.price.tokens[at][indices]

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
    costs = costs_in(bounds, costs)
    price = packing_prices(lengths, nodes, costs)
    limits = np.array([bounds.width(size) for size in nodes.ring_sizes])
    least_s = bound_s(price, nodes)
    wanted = [wanted_sizes(price, limits, share * least_s) for share in _SHARES]
    distinct = {sizes.tobytes(): sizes for sizes in wanted}.values()
    found = []
    for sizes, weight in itertools.product(distinct, _WEIGHTS):
        token_s = weight * costs.linear_s
        packing = Packing(lengths, nodes, costs, price, token_s, bounds=bounds)
        if packing.fill(sizes):
            found.append(packing)
    found.sort(key=Packing.makespan_s)
    if thorough:
        for packing in found[:_IMPROVED]:
            packing.improve(moves=_MOVES, longest=_LONGEST)
    return min(found, key=Packing.makespan_s, default=None)
