"""Choose the specs of a decomposed matmul's operands and result, and its chunked dim.

Every axis of the mesh turns manual, so that a ring's body says all that happens: an axis whose own
collective belongs to the same matmul has it once, before the ring or after it, where XLA would
repeat it once a chunk, and nothing is left in the body for a partitioner to decide. (With some axes
left automatic, XLA:CPU aborts on a sum in bfloat16 in the body.)

A mesh axis on a dim is one digit of that dim's index: with ("data", "model") on a dim of size C,
`data` counts blocks of C / data rows, its stride, and `model` blocks of C / (data * model) inside
these. So an axis that moves need not be the minor one: along a dim that is replicated over it,
chunk k is `reshape(dim, (outer, axis_size, inner))[:, k, :]`, and `outer` follows from the strides.
An axis must have the same stride on every side, else the devices' blocks do not meet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxoverlap.passes.analysis.einsum import SIDES, Side, Spec
from jaxoverlap.passes.planning.splits import ImpliedCollective, ShardedMatmul, Split


@dataclass(frozen=True)
class Layout:
    """The shardings with which a matmul runs as a ring.

    Attributes:
        matmul: the matmul and its shardings.
        ring: the split that becomes the ring; its collective (`collective`) is not None.
        letter: the dim that is split into chunks.
        others: the splits on other axes that need a collective of their own, as they come: gathers
            before the ring, after it the scattered sums, then the all-reduced ones.
        lhs, rhs, out: the shard_map's specs.
    """

    matmul: ShardedMatmul
    ring: Split
    letter: str
    others: tuple[Split, ...]
    lhs: Spec
    rhs: Spec
    out: Spec

    @property
    def collective(self) -> ImpliedCollective:
        """The collective that the ring carries out."""
        assert self.ring.collective is not None
        return self.ring.collective

    @property
    def other(self) -> Side:
        """The operand that does not move, where the other one does."""
        return "rhs" if self.collective.side == "lhs" else "lhs"

    def spec(self, side: Side) -> Spec:
        """Return the shard_map's spec of one side."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[side]

    def outer(self, side: Side, letter: str, axis: str) -> int:
        """Count the blocks that each chunk of `axis` falls into along a local dim, when it moves.

        On an operand, what `others` gather has been gathered; on the result, what they scatter has
        not been scattered yet, except for those that come before `axis`.
        """
        stride = self.stride(letter, axis)
        if stride is None:
            return 1  # an all-reduce: its chunks are cut from the local dim, as they come
        held = self.held(side, letter, axis)
        above = math.prod(
            self.matmul.axis_sizes[a] for a in held if (self.stride(letter, a) or 0) > stride
        )
        size = self.matmul.einsum.sizes[letter]
        return size // (stride * self.matmul.axis_sizes[axis]) // above

    def chunk(self) -> int:
        """Return the number of adjacent elements of the moving dim in one chunk on one device."""
        side, axis, letter = self.collective.side, self.ring.axis, self.letter
        held = math.prod(self.matmul.axis_sizes[a] for a in self.held(side, letter, axis))
        local = self.matmul.einsum.sizes[letter] // held
        return local // self.ring.axis_size // self.outer(side, letter, axis)

    def held(self, side: Side, letter: str, axis: str) -> list[str]:
        """Return the axes that shard a dim of one side at the time when `axis` moves."""
        axes = _on(self.matmul, side, letter, self.spec(side))
        order = [s for s in self.others if _kind(s) == "all_gather"]
        order += [self.ring, *(s for s in self.others if _kind(s) != "all_gather")]
        position = [s.axis for s in order].index(axis)
        gathered = {s.axis for s in order[: position + 1] if side != "out" and _moves(s, side)}
        waiting = {s.axis for s in order[position:] if side == "out" and _moves(s, side)}
        # An axis that is still to exchange the result holds the dim that it has been split along.
        split = [s.axis for s in order[position + 1 :] if side == "out" and _exchanges(s, letter)]
        return [*(a for a in axes if a not in gathered | waiting), *split]

    def stride(self, letter: str, axis: str) -> int | None:
        """Count elements in an axis's blocks along a dim; None if it never shards that."""
        specs: dict[Side, Spec] = {side: self.spec(side) for side in SIDES}
        return next(iter(_strides(self.matmul, specs, letter).get(axis, {}).values()), None)


def _kind(split: Split) -> str:
    return split.collective.kind if split.collective else ""


def _moves(split: Split, side: Side) -> bool:
    return split.collective is not None and split.collective.side == side


def _exchanges(split: Split, letter: str) -> bool:
    """Return whether the result is split along a dim until this axis exchanges it."""
    collective = split.collective
    if collective is None or collective.kind != "all_to_all":
        return False
    return collective.side == "out" and collective.letter == letter


def lay_out(matmul: ShardedMatmul, shared: Sequence[Split], ring: Split) -> Layout | str:
    """Lay a matmul out for a ring, or say why its dims do not allow it.

    Args:
        matmul: the matmul.
        shared: how each mesh axis shares its work.
        ring: the one of these that becomes the ring.
    """
    return _lay_out(matmul, tuple(shared), ring)


@functools.lru_cache(maxsize=1024)  # layers are alike
def _lay_out(matmul: ShardedMatmul, shared: tuple[Split, ...], ring: Split) -> Layout | str:
    assert ring.collective is not None
    order = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    others_needed = [s for s in shared if s.collective is not None and s is not ring]
    if any(_kind(s) == "all_to_all" and not _moves(s, "out") for s in others_needed):
        return f"{ring.axis} and another axis both move it, and that one exchanges an operand"
    others = tuple(sorted(others_needed, key=lambda s: order.index(_kind(s))))
    letter = _chunked_letter(matmul, shared, ring)
    if letter is None:
        sizes = ", ".join(f"{c} {matmul.einsum.sizes[c]}" for c in matmul.einsum.out)
        return f"no dim of the result ({sizes}) divides into {ring.axis_size} chunks"
    specs: dict[Side, Spec] = {side: _spec(matmul, side, shared) for side in SIDES}
    problem = _uneven(matmul, specs) or _disorder(matmul, specs)
    layout = Layout(matmul, ring, letter, others, specs["lhs"], specs["rhs"], specs["out"])
    return problem or _unsplit(layout) or _crossed(layout) or layout


def traffic(layout: Layout) -> dict[str, int]:
    """Return the bytes that each device sends in one run of a decomposed matmul, by mesh axis.

    Counted as the rewrite runs it: gathers before the ring make its shards larger, and the ring's
    sums are scattered over other axes only after it.
    """
    sizes: dict[Side, int] = {side: _local_bytes(layout, side) for side in SIDES}
    for split in (*layout.others, layout.ring):  # before the ring nothing is scattered yet
        if _kind(split) == "reduce_scatter":
            sizes["out"] *= split.axis_size
    gathers = [s for s in layout.others if _kind(s) == "all_gather"]
    sums = [s for s in layout.others if s not in gathers]
    return {s.axis: _send(s, sizes) for s in (*gathers, layout.ring, *sums)}


def _send(split: Split, sizes: dict[Side, int]) -> int:
    """Return the bytes sent in one collective, and update the size of its side in `sizes`."""
    collective, n = split.collective, split.axis_size
    assert collective is not None
    if collective.kind == "all_gather":
        sent = sizes[collective.side] * (n - 1)
        sizes[collective.side] *= n
        return sent
    if collective.kind == "reduce_scatter":
        sizes["out"] //= n
        return sizes["out"] * (n - 1)
    if collective.kind == "all_to_all":
        return sizes[collective.side] * (n - 1) // n
    return 2 * sizes["out"] * (n - 1) // n


def _local_bytes(layout: Layout, side: Side) -> int:
    """Return the bytes of one side on one device, as the shard_map takes or gives it."""
    matmul = layout.matmul
    axes = [a for dim in layout.spec(side) for a in dim]
    elements = math.prod(matmul.einsum.sizes[c] for c in matmul.einsum.side(side))
    itemsize = matmul.itemsize[SIDES.index(side)]
    return elements * itemsize // math.prod(matmul.axis_sizes[a] for a in axes)


def _chunked_letter(matmul: ShardedMatmul, shared: Sequence[Split], ring: Split) -> str | None:
    """Return the dim to split into chunks: the moving one, or an all-reduce's largest divisible.

    Dims that no axis shards come first: their chunks are the largest.
    """
    collective = ring.collective
    assert collective is not None
    if collective.kind == "all_to_all" and collective.side == "out":
        return collective.to
    if collective.kind != "all_reduce":
        return collective.letter

    def shards(letter: str) -> int:
        return math.prod(s.axis_size for s in shared if s.out == letter or _exchanges(s, letter))

    sizes = matmul.einsum.sizes
    fits = [c for c in matmul.einsum.out if sizes[c] % (shards(c) * ring.axis_size) == 0]
    return max(fits, key=lambda c: (shards(c) == 1, sizes[c]), default=None)


def _spec(matmul: ShardedMatmul, side: Side, shared: Sequence[Split]) -> Spec:
    """List the axes on each dim: those that are there, then those a device slices by.

    The latter in the order that another side has them in.
    """
    dims = []
    for letter in matmul.einsum.side(side):
        here = [s.axis for s in shared if s.letter_on(side) == letter]
        first = [a for a in matmul.axes_of(side, letter) if a in here]
        elsewhere = [a for other in SIDES for a in matmul.axes_of(other, letter) if a in here]
        dims.append(tuple(dict.fromkeys((*first, *elsewhere, *here))))
    return tuple(dims)


def _on(matmul: ShardedMatmul, side: Side, letter: str, spec: Spec) -> tuple[str, ...]:
    letters = matmul.einsum.side(side)
    return spec[letters.index(letter)] if letter in letters else ()


def _uneven(matmul: ShardedMatmul, specs: dict[Side, Spec]) -> str | None:
    """Name the first dim that its axes do not divide, with the numbers."""
    for side in SIDES:
        for c, axes in zip(matmul.einsum.side(side), specs[side], strict=True):
            size, parts = matmul.einsum.sizes[c], math.prod(matmul.axis_sizes[a] for a in axes)
            if size % parts:
                return f"dim {c} of {side} has size {size}: not divisible by {parts} devices"
    return None


def _unsplit(layout: Layout) -> str | None:
    """Name the first dim that does not divide when it is split, if there is one.

    The specs tell how a dim lies in the end; at the time of the collective axes may hold it that an
    exchange takes away only later.
    """
    for split in (layout.ring, *layout.others):
        side, letter = _splits_up(layout, split)
        if letter is None:
            continue
        held = layout.held(side, letter, split.axis)
        size = layout.matmul.einsum.sizes[letter]
        parts = math.prod(layout.matmul.axis_sizes[a] for a in held) * split.axis_size
        if size % parts:
            return f"dim {letter} of {side} has size {size}: not divisible by {parts} devices"
    return None


def _crossed(layout: Layout) -> str | None:
    """Name the first dim on which an axis moves under one that counts other blocks, if any.

    With b = 8 over an axis of 2 on one side and over another of 2 on another side, both count
    blocks of 4: while one holds the dim, the other's blocks are split in halves.
    """
    matmul = layout.matmul
    for split in (layout.ring, *layout.others):
        collective = split.collective
        assert collective is not None
        for letter in filter(None, (collective.letter, collective.to)):
            stride = layout.stride(letter, split.axis)
            for axis in layout.held(collective.side, letter, split.axis):
                other = layout.stride(letter, axis)
                if stride is None or other is None or axis == split.axis:
                    continue
                low, high = sorted([(stride, split.axis_size), (other, matmul.axis_sizes[axis])])
                if high[0] % (low[0] * low[1]):
                    return f"{axis} and {split.axis} shard dim {letter} in blocks that cross"
    return None


def _splits_up(layout: Layout, split: Split) -> tuple[Side, str | None]:
    """Return the dim that a collective shards, if any: a scatter's, or an all-to-all's new one."""
    collective = split.collective
    assert collective is not None
    if split is layout.ring and collective.kind == "all_reduce":
        return "out", layout.letter
    if collective.kind == "all_to_all":
        return collective.side, collective.to
    return collective.side, collective.letter if collective.kind == "reduce_scatter" else None


def _disorder(matmul: ShardedMatmul, specs: dict[Side, Spec]) -> str | None:
    """Name the first dim on which the blocks of an axis do not meet, if there is one."""
    for letter in matmul.einsum.sizes:
        for strides in _strides(matmul, specs, letter).values():
            if len(set(strides.values())) > 1:
                orders = [_on(matmul, side, letter, specs[side]) for side in strides]
                shown = " and ".join(map(str, dict.fromkeys(orders)))
                return f"dim {letter} is sharded in different orders: {shown}"
    return None


def _strides(
    matmul: ShardedMatmul, specs: dict[Side, Spec], letter: str
) -> dict[str, dict[Side, int]]:
    """Return the stride of every axis on one dim, in elements, by the side that has it."""
    strides: dict[str, dict[Side, int]] = {}
    for side in SIDES:
        stride = matmul.einsum.sizes[letter]
        for axis in _on(matmul, side, letter, specs[side]):
            stride //= matmul.axis_sizes[axis]
            strides.setdefault(axis, {})[side] = stride
    return strides


def hoistable(matmul: ShardedMatmul, axis: str, collective: ImpliedCollective) -> bool:
    """Return whether an operand's collective may run once, before all matmuls that read its value.

    The axis has to be the minor one of its dim, so that the gathered blocks are contiguous.
    """
    moves_operand = collective.side != "out" and collective.kind in ("all_gather", "all_to_all")
    return moves_operand and matmul.axes_of(collective.side, collective.letter)[-1] == axis
