"""Choose the few programs that a run compiles, over a sample of its batches.

A program computes and sends its static sizes, whatever a batch needs. Candidates have slots for one
size of group inside a node, for one that joins nodes, and for single devices, in several shares of
a device's tokens. Each batch of the sample is packed into each candidate and estimated at the
candidate's static sizes; the programs that together make the sample cheapest are chosen one after
the other (greedy facility location; Cornuejols, Fisher and Nemhauser 1977). The last program
splits every sequence over all devices, so it runs whatever fits the devices at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxoverlap.train.varlen.costs import BACKWARD_COMPUTE, AttentionCosts, Floats
from jaxoverlap.train.varlen.packing import Packing, packed
from jaxoverlap.train.varlen.rings import PARTS, Bounds, Nodes, beside_s, bounds_of, exchanges

_MIDDLE = (0.0, 0.25, 0.5, 1.0)  # of a device's tokens: slots of groups inside a node
_TOP = (0.0, 0.0625, 0.25, 0.5, 1.0)  # of groups that join nodes
_SLACKS = (1.003, 1.05)  # linear layers' rows over an even share of the tokens
_FINE = 384  # steps of the capacity to which slots are rounded up
_WORTH = 1.35  # a candidate whose least price is so many times the best is not packed
# Long sequences are rare, so a sample has few. These shares of a batch as one sequence are added.
_LONG, _LONG_WEIGHT = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 7 / 8), 0.05
_BATCHES, _SEQUENCES = 16, 2000  # of a sample that are packed, at most
# Sequences of one group that a fused kernel is compiled for: at least, and over the sample's. Those
# of batches of shorter documents; with half of either, such batches fell to the last program.
_FEWEST, _ROOM = 64, 4
# The same of a ring. Its kernels' log of sums has a row for each, of all of a device's slots.
_FEWEST_RINGED, _MOST_RINGED = 8, 128


def fitted(
    batches: Sequence[np.ndarray], nodes: Nodes, costs: AttentionCosts, *, capacity: int, most: int
) -> tuple[Bounds, ...]:
    """Return the programs for batches like these, at most so many, the one for all batches last.

    Args:
        batches: i[sequences] each, tokens of every sequence.
        nodes, costs: the devices, and the prices of one layer.
        capacity: slots of a device in attention, which every program keeps within.
        most: programs.
    """
    sample = _thinned(batches)
    hard = _with_long(sample, nodes.total * capacity)
    weights = np.append(np.ones(len(sample)), np.full(len(hard), _LONG_WEIGHT * len(sample)))
    share = max(-(-int(lengths.sum()) // nodes.total) for lengths in sample)
    last = split_all(nodes, costs, capacity=capacity)
    found = [b for b in _candidates(share, nodes, costs, capacity) if b != last]
    prices = _prices([*sample, *hard], found, nodes, costs)
    fallback = np.array([_price(x, last, nodes, costs) for x in (*sample, *hard)])
    chosen = [found[i] for i in _greedy(prices, fallback, weights, most - 1)]
    return tuple(_counted(b, sample, nodes, costs) for b in (*chosen, last))


def split_all(nodes: Nodes, costs: AttentionCosts, *, capacity: int) -> Bounds:
    """Return the program that splits every sequence over all devices."""
    size = nodes.ring_sizes[-1]
    able = size > 1 and costs.kv_heads % size == 0
    even = (size,) if able else ()
    return bounds_of({size: capacity}, capacity, 0, exchanged=even, ringed=_ringed(costs))


def _ringed(costs: AttentionCosts) -> int:
    """Return the sequences of a ring for which kernels are compiled, until they are counted."""
    return _MOST_RINGED if costs.fused_rings else 0


def _thinned(batches: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return some of the batches, evenly spread."""
    mean = max(1, sum(map(len, batches)) // len(batches))
    count = min(len(batches), _BATCHES, max(4, _SEQUENCES // mean))
    return [batches[i] for i in np.unique(np.linspace(0, len(batches) - 1, count).astype(int))]


def _with_long(sample: list[np.ndarray], room: int) -> list[np.ndarray]:
    """Return batches of the sample with some sequences replaced by one long sequence."""
    made = []
    for index, share in enumerate(_LONG):
        lengths = sample[index % len(sample)]
        total = min(int(lengths.sum()), room)
        long = int(share * total)
        kept = lengths[np.cumsum(lengths) <= total - long]
        if long > int(lengths.max()):
            made.append(np.append(kept, long))
    return made


def _candidates(share: int, nodes: Nodes, costs: AttentionCosts, capacity: int) -> Iterator[Bounds]:
    """Yield programs for batches of so many tokens a device."""
    step = max(2, 2 * -(-capacity // (2 * _FINE)))
    inside = [g for g in nodes.ring_sizes[1:] if not nodes.crosses(g)]
    able = [g for g in inside if costs.kv_heads % g == 0]
    middles = (able[-1:] or []) + [g for g in inside if g not in able]
    across = [g for g in nodes.ring_sizes if nodes.crosses(g)]
    seen = set()
    for slack, (g, x), (top, z), part, parts in itertools.product(
        _SLACKS,
        _shares(middles, _MIDDLE),
        _shares(across, _TOP),
        ((0,) if able else (0, 4)),
        (1, PARTS) if able else (PARTS,),
    ):
        tokens = min(_up(share * (slack if not part else 1.0), step), capacity)
        sent = 1 << (max(1, share // (nodes.total * part)) - 1).bit_length() if part else 0
        widths = {size: _up(w * share, step) for size, w in ((top, z), (g, x)) if w}
        alone = min(capacity - sum(widths.values()), _up(slack * share, step))
        if alone > 0:
            widths[1] = alone
        if not tokens <= sum(widths.values()) <= capacity:
            continue
        even = [size for size, w in widths.items() if size > 1 and exchanges(size, w, nodes, costs)]
        ringed = _ringed(costs) if {1, *even} < set(widths) else 0
        made = bounds_of(widths, tokens, sent, exchanged=even, ringed=ringed, parts=parts)
        if made not in seen:
            seen.add(made)
            yield made


def _shares(sizes: list[int], shares: tuple[float, ...]) -> list[tuple[int, float]]:
    return [(0, 0.0), *itertools.product(sizes, shares[1:])]


def _up(tokens: float, step: int) -> int:
    return -(-round(tokens) // step) * step


def _prices(
    batches: list[np.ndarray], found: list[Bounds], nodes: Nodes, costs: AttentionCosts
) -> Floats:
    """Return the static price of each batch in each program; inf where it is not worth a try."""
    made = np.full((len(batches), len(found)), np.inf)
    fixed = np.array([beside_s(b, nodes, costs) for b in found])
    for row, lengths in zip(made, batches, strict=True):
        alone = [costs.causal_s(lengths, g) * g for g in nodes.ring_sizes]
        even_s = (1 + BACKWARD_COMPUTE) * float(np.min(alone, axis=0).sum()) / nodes.total
        for at in np.argsort(fixed, kind="stable"):
            if fixed[at] + even_s < _WORTH * row.min():
                row[at] = _price(lengths, found[at], nodes, costs)
    return made


def _price(lengths: np.ndarray, bounds: Bounds, nodes: Nodes, costs: AttentionCosts) -> float:
    """Return the static seconds of a layer in a program; inf if the batch does not fit."""
    packing = packed(lengths, nodes, costs, bounds, thorough=False)
    return packing.layer_s() if packing and packing.fits() else np.inf


def _greedy(prices: Floats, fallback: Floats, weights: Floats, most: int) -> list[int]:
    """Choose greedily at most `most` columns so that the cheapest of each batch cost least."""
    chosen: list[int] = []
    best = fallback
    for _ in range(most):
        finite = np.where(np.isfinite(prices), prices, 1e9)
        sums = np.minimum(np.minimum(best, 1e9)[:, None], finite).T @ weights
        index = int(sums.argmin())
        if sums[index] >= np.minimum(best, 1e9) @ weights * (1 - 1e-4):
            break
        chosen.append(index)
        best = np.minimum(best, prices[:, index])
    return chosen


def _counted(
    bounds: Bounds, sample: list[np.ndarray], nodes: Nodes, costs: AttentionCosts
) -> Bounds:
    """Return a program with room for several times the sequences of a group in the sample."""
    most = ringed = 1
    for lengths in sample:
        packing = packed(lengths, nodes, costs, bounds, thorough=False)
        if packing and packing.fits():
            found = _most_sequences(packing)
            most, ringed = max(most, found[0]), max(ringed, found[1])
    of_ring = max(_FEWEST_RINGED, _ROOM << (ringed - 1).bit_length())
    return replace(
        bounds,
        sequences=max(_FEWEST, _ROOM << (most - 1).bit_length()),
        ringed=of_ring if bounds.ringed and of_ring <= _MOST_RINGED else 0,
    )


def _most_sequences(packing: Packing) -> tuple[int, int]:
    """Return the most sequences of one device or exchanging group, and of one ring."""
    sizes = np.array(packing.nodes.ring_sizes)[packing.size]
    found = [0, 0]
    for size in packing.nodes.ring_sizes:
        ring = packing.ring[sizes == size]
        if ring.size:
            is_ring = size > 1 and size not in packing.bounds.exchanged
            found[is_ring] = max(found[is_ring], int(np.bincount(ring).max()))
    return found[0], found[1]


def has_kernels(packing: Packing) -> bool:
    """Return whether no group has more sequences than its kernel is compiled for, if it has one."""
    limits = packing.bounds.sequences, packing.bounds.ringed
    pairs = zip(_most_sequences(packing), limits, strict=True)
    return all(not limit or most <= limit for most, limit in pairs)
