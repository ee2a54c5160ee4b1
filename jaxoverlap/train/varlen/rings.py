"""Say which rings a batch may use: aligned groups of devices, each size a multiple of the last.

A ring of g devices is a run of g neighbours, and begins at a multiple of g: on two nodes of four
devices there are rings of 1, 2 and 4 devices inside a node, and one of 8 that joins the nodes. So
permutes are known when a step is compiled, and rings of one size never share a device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from jaxoverlap.train.varlen.costs import (
    BACKWARD_COMPUTE,
    AttentionCosts,
    Floats,
)

PARTS = 4  # of an exchange of heads, at most: each has a latency


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of devices, counted node by node.

    Attributes:
        count: nodes.
        devices: devices of each.
    """

    count: int
    devices: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.devices < 1:
            raise ValueError(f"{self.count} nodes of {self.devices} devices: give at least one")

    @property
    def total(self) -> int:
        """Return how many devices there are in all."""
        return self.count * self.devices

    @functools.cached_property
    def ring_sizes(self) -> tuple[int, ...]:
        """Return the sizes of rings, from 1 to all devices; each divides the next."""
        inside = _doubled(self.devices)
        return (*inside, *(n * self.devices for n in _doubled(self.count)[1:]))

    def crosses(self, size: int) -> bool:
        """Return whether rings of this size join nodes."""
        return size > self.devices

    def zone(self, size: int) -> str:
        """Return the name of the zone that rings of this size are in."""
        return "local" if size == 1 else "inter-node" if self.crosses(size) else "intra-node"


def _doubled(count: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... as long as they divide `count`, and `count`."""
    sizes = [1]
    while count % (sizes[-1] * 2) == 0:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == count else (*sizes, count)


def chunk_slots(lengths: ArrayLike, size: int) -> np.ndarray:
    """Return the most tokens that a device of a ring has of sequences: two chunks of 2 size."""
    s = np.asarray(lengths, int)
    return s if size == 1 else 2 * -(-s // (2 * size))


def ring_s(
    compute_s: ArrayLike,
    tokens: ArrayLike,
    size: int,
    nodes: Nodes,
    costs: AttentionCosts,
) -> Floats:
    """Return the seconds, forward and backward, of one layer's rings of one size.

    The own block is first; then a round takes as long as its blocks or its hop, whichever is
    longer. Backward, blocks take 2.5 times as long and hops move `costs.backward_bytes` as much.
    The fused kernel's blocks are merged, and as it has all gradients at its end, the last sums of
    keys' and values' gradients go home under nothing.

    Groups that exchange heads have two all-to-alls forward, of queries, keys and values, and of
    results, and two of their gradients backward; nothing hides them.

    Args:
        compute_s: forward seconds of each ring's blocks on a device, all rounds together.
        tokens: tokens of each ring on a device.
        size: devices of a ring.
        nodes, costs: where, and at which prices.
    """
    compute, held = np.asarray(compute_s, float), np.asarray(tokens, float)
    if size in costs.exchanged:
        inside = min(size, nodes.devices)
        both = np.append(held * costs.remap_bytes, 0.0)  # the second half pays a latency of its own
        moved_s = costs.exchange_s(both, size // inside, inside)
        exposed_s = 2 * (moved_s[:-1].reshape(held.shape) + moved_s[-1] + costs.launch_s)
        return (1 + BACKWARD_COMPUTE) * compute + exposed_s * (held > 0)
    rounds = np.where(held > 0, size * costs.launch_s, 0.0)
    if size == 1:
        return (1 + BACKWARD_COMPUTE) * compute + 2 * rounds
    total = 2 * rounds
    for work, moved in ((1.0, 1.0), (BACKWARD_COMPUTE, costs.backward_bytes)):
        hop_s = _hop_s(held * costs.token_bytes * moved, size, nodes, costs)
        block_s = work * (compute / size + held * costs.merge_s * costs.fused_rings)
        total = total + block_s + (size - 1) * np.maximum(block_s, hop_s)
    if costs.fused_rings:
        sums = held * costs.token_bytes * (costs.backward_bytes - 1)
        total = total + _hop_s(sums, size, nodes, costs)
    return total


def _hop_s(num_bytes: Floats, size: int, nodes: Nodes, costs: AttentionCosts) -> Floats:
    """Return the seconds of the slowest of a ring's hops of so many bytes."""
    inside_s = costs.intra.seconds(num_bytes)
    if not nodes.crosses(size):
        return inside_s
    return np.maximum(inside_s, costs.crossing_s(num_bytes))


def static_s(
    compute_s: ArrayLike,
    tokens: ArrayLike,
    size: int,
    bounds: Bounds,
    nodes: Nodes,
    costs: AttentionCosts,
) -> Floats:
    """Return the seconds, forward and backward, of one layer's groups of one size in a program.

    Attention of unsharded sequences skips empty slots, so its time is the batch's. An exchange of
    heads moves as many parts of the static slots as the fullest group needs. Rings that no sequence
    is on are skipped; else hops carry all static slots, and matmuls compute all blocks of them.

    Args:
        compute_s: forward seconds of each group's sequences on a device.
        tokens: tokens of each group on a device.
        size: devices of a group.
        bounds: the static sizes of the program.
        nodes, costs: where, and at which prices.
    """
    compute, most = np.asarray(compute_s, float), float(np.asarray(tokens, float).max())
    if not bounds.width(size) or (size > 1 and not most and not _always(size, bounds)):
        return np.zeros_like(compute)
    if size == 1:
        return ring_s(compute, np.ones_like(compute), size, nodes, costs)
    if size not in bounds.exchanged:
        priced, width = replace(costs, exchanged=()), bounds.width(size)
        if not costs.fused_rings:
            compute = np.full_like(compute, costs.dense_ring_s(width, size))
        return 2 * costs.trip_s + ring_s(compute, np.full_like(compute, width), size, nodes, priced)
    if _always(size, bounds):
        moved_s = sum(exchanged_s(size, bounds, nodes, costs))
        return (1 + BACKWARD_COMPUTE) * compute + 2 * (moved_s + costs.launch_s)
    part = bounds.part(size)
    moved = np.array([part * costs.remap_bytes, 0.0])  # two exchanges, each with a latency
    inside = min(size, nodes.devices)
    part_s = costs.exchange_s(moved, size // inside, inside).sum() + 2 * costs.trip_s
    return (1 + BACKWARD_COMPUTE) * compute + 2 * (-(-most // part) * part_s + costs.launch_s)


def _always(size: int, bounds: Bounds) -> bool:
    """Return whether groups of a size exchange all their slots at once, whoever has tokens."""
    return size in bounds.exchanged and bounds.part(size) == bounds.width(size)


def exchanged_s(
    size: int, bounds: Bounds, nodes: Nodes, costs: AttentionCosts
) -> tuple[float, float]:
    """Return the seconds of an exchange in one part: of queries, keys and values; of results."""
    inside, width = min(size, nodes.devices), bounds.width(size)
    both = np.array([costs.remap_bytes + costs.token_bytes, costs.remap_bytes - costs.token_bytes])
    moved_s = costs.exchange_s(width * both / 2, size // inside, inside)
    return float(moved_s[0]), float(moved_s[1])


def hidden_s(local_s: Floats, bounds: Bounds, nodes: Nodes, costs: AttentionCosts) -> Floats:
    """Return the seconds of exchanges that hide under each device's attention to local sequences.

    Forward those of queries, keys and values; backward those of their gradients.

    Args:
        local_s: by device, the seconds of that attention, forward and backward.
        bounds, nodes, costs: of the program.
    """
    sizes = [size for size in bounds.exchanged if _always(size, bounds)]
    moved_s = sum(exchanged_s(size, bounds, nodes, costs)[0] for size in sizes)
    forward_s = np.asarray(local_s, float) / (1 + BACKWARD_COMPUTE)
    return np.minimum(forward_s, moved_s) + np.minimum(BACKWARD_COMPUTE * forward_s, moved_s)


def beside_s(bounds: Bounds, nodes: Nodes, costs: AttentionCosts) -> float:
    """Return the seconds of one layer's work other than attention, the same on every device.

    The linear layers of its static tokens, and its two all-to-alls of static parts, forward and
    backward.
    """
    linear_s = bounds.tokens * costs.linear_s
    if not bounds.sent:
        return linear_s
    num_bytes = bounds.sent * nodes.total * costs.remap_bytes
    return linear_s + 2 * float(costs.exchange_s(num_bytes, nodes.count, nodes.devices))


def exchanges(size: int, width: int, nodes: Nodes, costs: AttentionCosts) -> bool:
    """Return whether a group exchanges heads faster than it passes keys round a ring.

    Judged by one sequence that fills the group, which hides most of a ring's hops, and by all
    static slots where a ring's blocks are matmuls.

    Args:
        size: devices of the group.
        width: slots of each device.
        nodes, costs: where, and at which prices.
    """
    if costs.kv_heads % size:
        return False

    def seconds(exchanged: tuple[int, ...]) -> float:
        priced = replace(costs, exchanged=exchanged)
        compute = priced.causal_s(size * width, size)
        if not (exchanged or costs.fused_rings):
            compute = costs.dense_ring_s(width, size)
        return float(ring_s(compute, width, size, nodes, priced))

    return seconds((size,)) < seconds(())


@dataclass(frozen=True)
class Bounds:
    """The static sizes of a compiled step: it runs every plan that fits them.

    Attributes:
        widths: slots of each device for rings of each size, by size; a size that is not in it, or
            has none, costs nothing. Those of rings of two and more are even.
        tokens: tokens of each device between attentions (the linear layers').
        sent: tokens that a device sends to each other one in a remap, at most.
        exchanged: those of the sizes whose groups exchange heads; others pass keys round a ring.
        sequences: unsharded sequences that a device has of one size, alone or with a group that
            exchanges heads, at most: a fused kernel is compiled for so many.
        ringed: sequences of one ring, at most, for which a ring's kernel is compiled; 0: its blocks
            are matmuls, of any number.
        parts: in how many parts an exchange of heads goes, at most; in 1 it is without a loop, and
            hides under the attention of local sequences.
    """

    widths: tuple[tuple[int, int], ...]
    tokens: int
    sent: int
    exchanged: tuple[int, ...] = ()
    sequences: int = 0
    ringed: int = 0
    parts: int = PARTS

    def __post_init__(self) -> None:
        odd = any(size > 1 and width % 2 for size, width in self.widths)
        if list(self.widths) != sorted(self.widths, reverse=True) or odd:
            raise ValueError(
                f"widths={self.widths}: expected (ring size, slots), the largest rings first, with "
                "two equal halves of slots for rings of two and more"
            )

    @property
    def slots(self) -> int:
        """Return the slots of a device in attention."""
        return sum(width for _, width in self.widths)

    @property
    def held(self) -> int:
        """Return the tokens that a device can have in attention: those that stay fit the others."""
        return self.slots if self.sent else min(self.slots, self.tokens)

    def part(self, size: int) -> int:
        """Return the slots of each part in which groups of a size exchange heads: an even number.

        All groups skip the parts that are empty on every device.
        """
        width = self.width(size)
        return width // next(n for n in range(self.parts, 0, -1) if n == 1 or width % (2 * n) == 0)

    def width(self, size: int) -> int:
        """Return the slots of a device for rings of a size."""
        return dict(self.widths).get(size, 0)

    def first(self, size: int) -> int:
        """Return the first slot for rings of a size; those of the largest rings come first."""
        return sum(width for at, width in self.widths if at > size)


def costs_in(bounds: Bounds, costs: AttentionCosts) -> AttentionCosts:
    """Return the prices in a program: which groups exchange heads, and whether rings are fused."""
    fused = costs.fused_rings and bounds.ringed > 0
    return replace(costs, exchanged=bounds.exchanged, fused_rings=fused)


def bounds_of(
    widths: Mapping[int, int],
    tokens: int,
    sent: int,
    *,
    exchanged: Iterable[int] = (),
    sequences: int = 0,
    ringed: int = 0,
    parts: int = PARTS,
) -> Bounds:
    """Return bounds, the largest rings first, without sizes that have no slots."""
    kept = tuple(sorted(((s, w) for s, w in widths.items() if w), reverse=True))
    exchange = tuple(size for size, _ in kept if size in set(exchanged))
    return Bounds(kept, tokens, sent, exchange, sequences, ringed, parts)
