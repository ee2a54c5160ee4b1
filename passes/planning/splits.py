"""Find, for each mesh axis, which collective a sharded matmul needs: the sharding algebra.

A matmul is an einsum, and each of its letters is batch, contracted, or free of one operand. A mesh
axis may shard one letter of each operand and of the result. The devices of that axis can split the
work along any one letter `c`: then each operand that has `c` must be sharded on it, each that has
not must be replicated, and the result comes out sharded on `c`, or as partial sums if `c` is
contracted. What the given shardings lack of that is the communication:

    operand sharded elsewhere, wanted full    all-gather of the operand
    operand replicated, wanted sharded        nothing: a device takes its own slice
    operand sharded elsewhere, wanted on `c`  all-to-all of the operand
    partial sums, wanted sharded              reduce-scatter
    partial sums, wanted replicated           all-reduce
    result on `c`, wanted elsewhere           all-to-all of the result
    result on `c`, wanted replicated          gather of the result (XLA's)

`split` tries every `c` and keeps the cheapest. One collective can become a ring. Where the cheapest
needs two, those of operands can be done before (`Refusal.first`), and the matmul looked at again.
It is plain set algebra: no JAX, no devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxoverlap.passes.analysis.einsum import Einsum, Side, Spec
from jaxoverlap.plan.collectives import Kind

_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class ImpliedCollective:
    """The collective that one mesh axis makes a matmul wait for.

    Attributes:
        kind: all_gather or all_to_all of an operand, or reduce_scatter, all_reduce or all_to_all of
            the result.
        side: what moves: "lhs", "rhs" or "out".
        letter: the dim that is gathered, or that partial sums are scattered over; for all_reduce
            the contracted dim that makes the sums partial.
        bytes_moved: bytes that each device sends when the matmul runs once, by a ring.
        to: for all_to_all, the dim that becomes sharded while `letter` is gathered.
    """

    kind: Kind
    side: Side
    letter: str
    bytes_moved: int
    to: str | None = None


@dataclass(frozen=True)
class Split:
    """A way in which the devices of one mesh axis share a matmul's work.

    Attributes:
        axis: the mesh axis.
        axis_size: the devices along it.
        lhs, rhs, out: the dim that holds the axis in each side, in operands before the collective
            and in the result after it (None: replicated). Of a replicated operand that the split
            shares out, a device takes its own slice.
        collective: the collective it needs, or None.
    """

    axis: str
    axis_size: int
    lhs: str | None
    rhs: str | None
    out: str | None
    collective: ImpliedCollective | None

    def letter_on(self, side: Side) -> str | None:
        """Return the dim that holds the axis in one side."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[side]


@dataclass(frozen=True)
class Refusal:
    """The reason why one mesh axis of a matmul needs more than one collective, or an unknown one.

    Attributes:
        axis: the mesh axis.
        reason: the collectives that it wants, in words.
        first: collectives of operands that could be hoisted, to leave a split with only one.
    """

    axis: str
    reason: str
    first: tuple[ImpliedCollective, ...] = ()


@dataclass(frozen=True)
class _Move:
    """One collective that one split would need; "gather" is one of the result: XLA's, no ring."""

    verb: Kind | Literal["gather"]
    side: Side
    letter: str
    bytes_moved: int
    to: str | None = None

    def collective(self) -> ImpliedCollective:
        assert self.verb != "gather"
        return ImpliedCollective(self.verb, self.side, self.letter, self.bytes_moved, self.to)


@dataclass(frozen=True)
class ShardedMatmul:
    """A matmul as the algebra reads it: its einsum and its shardings.

    Attributes:
        einsum: its letters and global sizes.
        lhs, rhs, out: shardings, as the step around it gives and wants them.
        itemsize: bytes of an element of the lhs, the rhs and the result.
        axis_sizes: devices along each mesh axis.
    """

    einsum: Einsum
    lhs: Spec
    rhs: Spec
    out: Spec
    itemsize: tuple[int, int, int]
    axis_sizes: Mapping[str, int] = field(hash=False)

    def spec(self, side: Side) -> Spec:
        """Return the sharding of one operand or of the result."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[side]

    def axes_of(self, side: Side, letter: str) -> tuple[str, ...]:
        """Return the mesh axes on one dim, major to minor; none if the side has no such dim."""
        letters = self.einsum.side(side)
        return self.spec(side)[letters.index(letter)] if letter in letters else ()

    def letter_of(self, side: Side, axis: str) -> str | None:
        """Return the dim that a mesh axis shards, or None."""
        pairs = zip(self.einsum.side(side), self.spec(side), strict=True)
        return next((letter for letter, axes in pairs if axis in axes), None)

    def local_bytes(self, side: Side, *, without: str) -> int:
        """Return the bytes of one side on one device, were it not sharded by the axis `without`."""
        elements = math.prod(self.einsum.sizes[c] for c in self.einsum.side(side))
        shards = math.prod(
            self.axis_sizes[a] for axes in self.spec(side) for a in axes if a != without
        )
        return elements * self.itemsize[("lhs", "rhs", "out").index(side)] // shards

    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes of more than one device that shard any side, in the mesh's order."""
        used = {a for spec in (self.lhs, self.rhs, self.out) for dim in spec for a in dim}
        return tuple(a for a, size in self.axis_sizes.items() if a in used and size > 1)

    @functools.cached_property
    def splits(self) -> tuple[Split | Refusal, ...]:
        """The split or the refusal of each mesh axis that shards the matmul."""
        return _splits(self, self.axes())


@functools.lru_cache(maxsize=1024)  # layers are alike; meshes may differ in their axes' order
def _splits(matmul: ShardedMatmul, axes: tuple[str, ...]) -> tuple[Split | Refusal, ...]:
    return tuple(split(matmul, axis) for axis in axes)


def split(matmul: ShardedMatmul, axis: str) -> Split | Refusal:
    """Find how one mesh axis shares the work best, of all dims to split along.

    A split that moves nothing beats one with a single move that a ring can do, and that beats the
    rest; among equals the fewest bytes win. All devices doing the same work (no dim) is taken only
    where it moves nothing and the split along every dim moves something.
    """
    letter, moves = _cheapest(matmul, axis)
    if _ring_suffices(moves):
        return _split(matmul, axis, letter, moves)
    wanted = " and ".join(map(_in_words, moves))
    operands = sorted((m for m in moves if m.side != "out"), key=lambda m: m.bytes_moved)
    first = tuple(m.collective() for m in operands[: len(moves) - 1])
    return Refusal(axis, f"{axis} wants {wanted}: no ring for that", first)


def shared_letter(matmul: ShardedMatmul, axis: str) -> str | None:
    """Return the letter along which an axis shares the work best; None where all do the same."""
    return _cheapest(matmul, axis)[0]


def _cheapest(matmul: ShardedMatmul, axis: str) -> tuple[str | None, list[_Move]]:
    """Return the letter that an axis splits along best, and the moves that this needs."""
    moves_along = {c: _moves(matmul, axis, c) for c in (*sorted(matmul.einsum.sizes), None)}

    def rank(c: str | None) -> tuple[bool, bool, bool, int]:
        moves = moves_along[c]
        total = sum(m.bytes_moved for m in moves)
        return bool(moves), c is None, not _ring_suffices(moves), total

    best = min(moves_along, key=rank)
    return best, moves_along[best]


def _in_words(move: _Move) -> str:
    to = f" to {move.to}" if move.to else ""
    return f"{move.verb} of {move.side} dim {move.letter}{to}"


def _ring_suffices(moves: Sequence[_Move]) -> bool:
    """Return whether a split needs no collective, or a single one that can become a ring."""
    return len(moves) <= 1 and all(m.verb in _KINDS for m in moves)


def _moves(matmul: ShardedMatmul, axis: str, letter: str | None) -> list[_Move]:
    """List the moves by which `axis` splits the work along `letter` (None: not at all)."""
    moves = (
        _operand_move(matmul, axis, "lhs", letter),
        _operand_move(matmul, axis, "rhs", letter),
        _result_move(matmul, axis, letter),
    )
    return [m for m in moves if m is not None]


def _operand_move(
    matmul: ShardedMatmul, axis: str, side: Literal["lhs", "rhs"], c: str | None
) -> _Move | None:
    have = matmul.letter_of(side, axis)
    want = c if c is not None and c in matmul.einsum.side(side) else None
    n = matmul.axis_sizes[axis]
    full_bytes = matmul.local_bytes(side, without=axis)
    if have is None or have == want:
        return None
    if want is None:
        return _Move("all_gather", side, have, full_bytes * (n - 1) // n)
    return _Move("all_to_all", side, have, full_bytes * (n - 1) // n**2, c)


def _result_move(matmul: ShardedMatmul, axis: str, c: str | None) -> _Move | None:
    want = matmul.letter_of("out", axis)
    n = matmul.axis_sizes[axis]
    full_bytes = matmul.local_bytes("out", without=axis)
    if c is not None and c not in matmul.einsum.out:
        if want is None:
            return _Move("all_reduce", "out", c, 2 * full_bytes * (n - 1) // n)
        return _Move("reduce_scatter", "out", want, full_bytes * (n - 1) // n)
    if c is None or c == want:
        return None
    if want is None:
        return _Move("gather", "out", c, full_bytes * (n - 1) // n)
    return _Move("all_to_all", "out", c, full_bytes * (n - 1) // n**2, want)


def _split(matmul: ShardedMatmul, axis: str, c: str | None, moves: Sequence[_Move]) -> Split:
    """Make the split along `c`: operands as before their collective, the result as after its."""
    letters: dict[str, str | None] = {
        side: c if c is not None and c in matmul.einsum.side(side) else None
        for side in ("lhs", "rhs", "out")
    }
    collective = None
    for move in moves:
        collective = move.collective()
        if collective.kind == "all_to_all" and collective.side == "out":
            letters["out"] = collective.to
        elif collective.kind != "all_reduce":
            letters[collective.side] = collective.letter
    return Split(axis, matmul.axis_sizes[axis], **letters, collective=collective)
