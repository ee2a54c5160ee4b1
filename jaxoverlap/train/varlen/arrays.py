"""Turn a plan into arrays of static shape: which token is in which slot, and which tokens move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxoverlap.train.varlen.packing import levelled
from jaxoverlap.train.varlen.remap import Moves
from jaxoverlap.train.varlen.rings import Bounds, Nodes

NONE = np.iinfo(np.int32).max  # a slot that no array has: what is taken from there is zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlanArrays:
    """What a compiled step reads of a plan.

    Attributes:
        segment, position: i32[devices, slots] of attention, as `engine.attend` takes them.
        to_attention, to_linear: moves, with a first dim of devices.
    """

    segment: Any
    position: Any
    to_attention: Moves
    to_linear: Moves


class Pieces(NamedTuple):
    """Runs of consecutive tokens of a sequence on one device, as arrays i[pieces].

    Attributes:
        device, sequence: where, and of which sequence.
        start, length: tokens of the sequence.
        size: devices of the ring.
        late: whether it is a second half's; zero or one.
    """

    device: np.ndarray
    sequence: np.ndarray
    start: np.ndarray
    length: np.ndarray
    size: np.ndarray
    late: np.ndarray


def pieces_of(
    lengths: np.ndarray, size: np.ndarray, ring: np.ndarray, nodes: Nodes, bounds: Bounds
) -> Pieces:
    """Split sequences into the pieces that each device has.

    Those of a ring are split into two chunks a device. Those of a group that exchanges heads are
    joined one after the other and split so that its devices hold equally many tokens in all.

    Args:
        lengths, size, ring: by sequence: tokens, devices of its group, and which of these groups.
        nodes, bounds: the devices, and the program's static sizes.
    """
    held, parts = np.zeros(nodes.total, int), list[Pieces]()
    for g in sorted(np.unique(size).tolist(), key=lambda g: (g in bounds.exchanged, g)):
        which = np.flatnonzero(size == g)
        if g in bounds.exchanged:
            made = _levelled(lengths, which, ring[which], g, held, bounds.width(g))
        else:
            made = _chunks(lengths, which, ring[which], g)
        np.add.at(held, made.device, made.length)
        parts.append(made)
    return Pieces(*(np.concatenate(column).astype(int) for column in zip(*parts, strict=True)))


def _chunks(lengths: np.ndarray, which: np.ndarray, ring: np.ndarray, g: int) -> Pieces:
    """Return the pieces of sequences on single devices, or on rings of a size."""
    chunks = 1 if g == 1 else 2 * g
    edges = np.arange(chunks + 1) * lengths[which, None] // chunks
    chunk = np.tile(np.arange(chunks), which.size)
    rank = np.zeros_like(chunk) if g == 1 else np.minimum(chunk, 2 * g - 1 - chunk)
    start = edges[:, :-1].ravel()
    return Pieces(
        np.repeat(ring * g, chunks) + rank,
        np.repeat(which, chunks),
        start,
        edges[:, 1:].ravel() - start,
        np.full(chunk.size, g),
        (chunk >= g) & (g > 1),
    )


def _levelled(
    lengths: np.ndarray, which: np.ndarray, ring: np.ndarray, g: int, held: np.ndarray, most: int
) -> Pieces:
    """Return the pieces of sequences of groups that exchange heads.

    Args:
        lengths, which, ring, g: tokens of all sequences; those of these groups, and the group of
            each; devices of a group.
        held: i[devices], tokens that each device has already.
        most: tokens that a device can get.
    """
    totals = np.bincount(ring, lengths[which], minlength=len(held) // g)
    exact = levelled(held.reshape(-1, g).astype(float), totals, most)
    ends = np.cumsum(_whole(exact, totals), axis=1)  # by group, tokens up to each device
    ends[:, -1] = totals  # with what has no room, which the plan's widths then show
    rows: list[tuple[int, int, int, int]] = []
    for group in np.unique(ring):
        device, before = 0, 0
        for index in which[ring == group].tolist():
            start, length = 0, int(lengths[index])
            while start < length:
                room = int(ends[group, device]) - before
                if room <= 0 and device + 1 < g:
                    device += 1
                    continue
                taken = min(room, length - start)
                rows.append((int(group) * g + device, index, start, taken))
                start, before = start + taken, before + taken
    device, sequence, start, length = np.array(rows).T
    size, late = np.full(len(rows), g), np.zeros(len(rows), int)
    return Pieces(device, sequence, start, length, size, late)


def _whole(exact: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Round f[groups, devices] to integers with these sums by group, each by less than one."""
    floor = np.floor(exact + 1e-9).astype(int)
    rank = np.argsort(np.argsort(floor - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return floor + (rank < (totals - floor.sum(axis=1))[:, None])


def widths_of(pieces: Pieces, nodes: Nodes, bounds: Bounds) -> dict[int, int]:
    """Return the slots that groups of each size need on a device: of rings, two equal halves."""
    widths = {}
    for g in np.unique(pieces.size).tolist():
        on = pieces.size == g
        held = np.zeros((nodes.total, 2), int)
        np.add.at(held, (pieces.device[on], pieces.late[on]), pieces.length[on])
        halves = g > 1 and g not in bounds.exchanged
        widths[g] = int(held.max()) * (2 if halves else 1)
    return widths


def slots_of(pieces: Pieces, nodes: Nodes, bounds: Bounds) -> np.ndarray:
    """Return the token of each slot in attention: i[devices, slots, 2] of sequence and position.

    Slots without one have sequence -1, and their own number as position. The slots of a ring are in
    two halves, or, for the fused kernel, sequence by sequence.
    """
    first = np.zeros(len(pieces.size), int)
    half = pieces.late * (bounds.ringed == 0)
    for g, width in bounds.widths:
        on = pieces.size == g
        first[on] = bounds.first(g) + half[on] * (width // 2)
    order = np.lexsort((pieces.late, pieces.sequence, half, pieces.size, pieces.device))
    length = pieces.length[order]
    key = np.stack([pieces.device, pieces.size, half])[:, order]
    begins = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0)) if length.size else []
    before = np.cumsum(length) - length
    within = before - np.repeat(
        before[begins], np.diff(np.append(np.flatnonzero(begins), length.size))
    )
    slot = pieces.device[order] * bounds.slots + first[order] + within
    inside = np.arange(length.sum()) - np.repeat(before, length)
    found = np.empty((nodes.total * bounds.slots, 2), np.int32)
    found[:, 0] = -1
    found[:, 1] = np.tile(np.arange(bounds.slots), nodes.total)
    flat = np.repeat(slot, length) + inside
    found[flat, 0] = np.repeat(pieces.sequence[order], length)
    found[flat, 1] = np.repeat(pieces.start[order], length) + inside
    return found.reshape(nodes.total, bounds.slots, 2)


def layouts(held: np.ndarray, flow: np.ndarray, bounds: Bounds) -> tuple[np.ndarray, Moves, Moves]:
    """Lay tokens out for linear layers, and say how they get there and back.

    A device keeps its first tokens, and gives its last ones away, in the order of the receivers.

    Args:
        held: i[devices, slots], a number of each slot's token, -1 where there is none.
        flow: i[devices, devices], tokens that each sends to each.
        bounds: static sizes.

    Returns:
        i[devices, tokens], the token's number in each slot there, -1 where there is none; the
        moves to attention, and those to the linear layers.
    """
    devices, most = len(held), bounds.sent
    sent = np.full((2, devices, devices, most), NONE, np.int32)
    to_linear = np.full((devices, bounds.tokens), NONE, np.int32)
    to_attention = np.full(held.shape, NONE, np.int32)
    linear = np.full((devices, bounds.tokens), -1, held.dtype)
    slots = [np.flatnonzero(row >= 0) for row in held]
    fill = np.zeros(devices, int)
    for d, (own, gives) in enumerate(zip(slots, flow.sum(axis=1).tolist(), strict=True)):
        kept = fill[d] = own.size - gives
        to_linear[d, :kept] = own[:kept]
        to_attention[d, own[:kept]] = np.arange(kept)
        linear[d, :kept] = held[d, own[:kept]]
    given = fill.copy()
    for a, b in np.argwhere(flow):
        n = int(flow[a, b])
        leaving = slots[a][given[a] : given[a] + n]
        there = fill[b] + np.arange(n)
        sent[0, a, b, :n], sent[1, b, a, :n] = leaving, there
        to_linear[b, there] = held.shape[1] + a * most + np.arange(n)
        to_attention[a, leaving] = bounds.tokens + b * most + np.arange(n)
        linear[b, there] = held[a, leaving]
        given[a], fill[b] = given[a] + n, fill[b] + n
    return linear, Moves(sent[1], to_attention), Moves(sent[0], to_linear)
