"""Layouts are played in numpy: what the rewrite would do with one must compute the matmul."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from jaxoverlap.passes.analysis.einsum import SIDES, Einsum, Side, Spec
from jaxoverlap.passes.planning.layout import Layout, lay_out, traffic
from jaxoverlap.passes.planning.splits import (
    ImpliedCollective,
    Refusal,
    ShardedMatmul,
    Split,
    split,
)
from jaxoverlap.passes.rings import orders
from tests.support.splits import along, block, devices, einsums, key, one_axis, operands

ITEMSIZE = (2, 2, 2)


def matmul(
    einsum: str,
    sizes: Mapping[str, int],
    lhs: Spec,
    rhs: Spec,
    out: Spec,
    axis_sizes: Mapping[str, int],
) -> ShardedMatmul:
    operand_letters, result = einsum.split("->")
    left, right = operand_letters.split(",")
    return ShardedMatmul(Einsum(left, right, result, sizes), lhs, rhs, out, ITEMSIZE, axis_sizes)


def lay(given: ShardedMatmul, axis: str | None = None) -> Layout | str:
    """Lay out for the ring of an axis, or for the one that moves most, as `decide` does."""
    shared = understood(given)
    assert shared is not None, given.splits
    moving = [s for s in shared if s.collective is not None]
    if axis is not None:
        return lay_out(given, shared, next(s for s in moving if s.axis == axis))
    return lay_out(given, shared, biggest(moving))


def understood(given: ShardedMatmul) -> list[Split] | None:
    """Return the splits of all axes, or None if one is a refusal."""
    splits = given.splits
    return None if any(isinstance(s, Refusal) for s in splits) else list(splits)  # type: ignore[arg-type]


def biggest(moving: Sequence[Split]) -> Split:
    return max(moving, key=lambda s: s.collective.bytes_moved)  # type: ignore[union-attr]


# -- the specs, in which every axis of the matmul has its place -------------------------------------

SIZES = {"s": 32, "d": 16, "f": 64}


def test_an_axis_that_moves_nothing_keeps_its_dims():
    # sequence parallel -> column parallel, the batch over another axis.
    got = lay(
        matmul(
            "bsd,df->bsf",
            {"b": 8, **SIZES},
            lhs=(("data",), ("model",), ()),
            rhs=((), ("model",)),
            out=(("data",), (), ("model",)),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert isinstance(got, Layout)
    assert got.letter == "s"
    assert got.others == ()
    assert got.lhs == (("data",), ("model",), ())
    assert got.rhs == ((), ("model",))
    assert got.out == (("data",), (), ("model",))


def fsdp_and_tensor_parallel() -> ShardedMatmul:
    """Describe x: [s/model, d] @ w: [d/data, f/model], the batch over data: two gathers."""
    return matmul(
        "bsd,df->bsf",
        {"b": 8, **SIZES},
        lhs=(("data",), ("model",), ()),
        rhs=(("data",), ("model",)),
        out=(("data",), (), ("model",)),
        axis_sizes={"data": 2, "model": 4},
    )


@pytest.mark.parametrize(
    ("axis", "letter", "other"), [("model", "s", "data"), ("data", "d", "model")]
)
def test_the_collective_of_another_axis_is_among_the_others(axis: str, letter: str, other: str):
    got = lay(fsdp_and_tensor_parallel(), axis)
    assert isinstance(got, Layout)
    assert (got.ring.axis, got.letter) == (axis, letter)
    assert [s.axis for s in got.others] == [other]
    assert got.lhs == (("data",), ("model",), ())
    assert got.rhs == (("data",), ("model",))
    assert got.out == (("data",), (), ("model",))


def test_an_axis_that_shares_a_dim_with_the_ring_stays_on_it():
    # The sequence over both; only model gathers it, so its devices of one data rank have one block.
    got = lay(
        matmul(
            "sd,df->sf",
            SIZES,
            lhs=(("data", "model"), ()),
            rhs=((), ("model",)),
            out=(("data",), ("model",)),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert isinstance(got, Layout)
    assert got.lhs == (("data", "model"), ())
    assert got.rhs == ((), ("model",))
    assert got.out == (("data",), ("model",))
    assert got.outer("lhs", "s", "model") == got.outer("out", "s", "model") == 1
    assert got.chunk() == 32 // 2 // 4


def test_a_whole_operand_is_sliced_after_the_axes_that_it_has():
    # b: [f/model], contracted with a's [f/(model, data)]: data is whole there and sliced by. The
    # result is small, so that its sums are less to send than a's exchange.
    got = lay(
        matmul(
            "sf,fd->sd",
            {**SIZES, "d": 4},
            lhs=((), ("model", "data")),
            rhs=(("model",), ()),
            out=(("data",), ()),
            axis_sizes={"data": 2, "model": 4},
        ),
        "data",
    )
    assert isinstance(got, Layout)
    assert got.lhs == ((), ("model", "data"))
    assert got.rhs == (("model", "data"), ())
    assert got.out == (("data",), ())


# -- the dim that an all-reduce is cut along --------------------------------------------------------


def all_reduce(sizes: Mapping[str, int], out: Spec, axis_sizes: Mapping[str, int]) -> ShardedMatmul:
    """Describe bsk,kd->bsd, summed over x on k; `out` holds the other axes as the operands do."""
    batch, rows, columns = out
    return matmul(
        "bsk,kd->bsd",
        sizes,
        lhs=(batch, rows, ("x",)),
        rhs=(("x",), columns),
        out=out,
        axis_sizes=axis_sizes,
    )


@pytest.mark.parametrize(
    ("sizes", "letter"),
    [
        ({"b": 4, "s": 32, "d": 16}, "s"),
        ({"b": 4, "s": 16, "d": 32}, "d"),
        ({"b": 64, "s": 32, "d": 16}, "b"),
        ({"b": 4, "s": 33, "d": 16}, "d"),  # the largest that divides
        ({"b": 4, "s": 33, "d": 17}, "b"),
    ],
)
def test_an_all_reduce_is_cut_along_the_largest_dim_that_divides(sizes, letter: str):
    got = lay(all_reduce({**sizes, "k": 8}, ((), (), ()), {"x": 4}))
    assert isinstance(got, Layout)
    assert got.ring.collective is not None and got.ring.collective.kind == "all_reduce"
    assert got.letter == letter
    assert got.out == ((), (), ())


def test_an_all_reduce_is_rather_cut_along_a_dim_that_no_axis_shards():
    sizes = {"b": 4, "s": 64, "d": 16, "k": 8}
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert isinstance(got, Layout)
    assert got.letter == "d"


def test_an_all_reduce_is_cut_along_a_sharded_dim_if_need_be():
    sizes = {"b": 3, "s": 64, "d": 17, "k": 8}
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert isinstance(got, Layout)
    assert got.letter == "s"
    assert got.lhs == ((), ("y",), ("x",))
    assert got.out == ((), ("y",), ())


def test_a_sharded_dim_must_divide_by_its_axes_and_the_ring():
    sizes = {"b": 3, "s": 12, "d": 17, "k": 8}  # 12 divides by 4, but not by 2 x 4
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert got == "no dim of the result (b 3, s 12, d 17) divides into 4 chunks"


# -- several axes on one dim ------------------------------------------------------------------------

BOTH = ("data", "model")


def gathers_one_dim(order: tuple[str, ...]) -> ShardedMatmul:
    """Describe rows over two axes that the matmul has whole: two gathers of one dim."""
    return matmul(
        "sd,df->sf",
        SIZES,
        lhs=(order, ()),
        rhs=((), BOTH),
        out=((), BOTH),
        axis_sizes={"data": 2, "model": 4},
    )


def scatters_one_dim(order: tuple[str, ...]) -> ShardedMatmul:
    """Describe partial sums over two axes, scattered over the rows along both."""
    return matmul(
        "sd,df->sf",
        SIZES,
        lhs=((), BOTH),
        rhs=(BOTH, ()),
        out=(order, ()),
        axis_sizes={"data": 2, "model": 4},
    )


@pytest.mark.parametrize("axis", BOTH)
@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_one_dim_gathered_along_two_axes(order: tuple[str, ...], axis: str):
    got = lay(gathers_one_dim(order), axis)
    assert isinstance(got, Layout)
    (other,) = got.others
    assert {got.ring.axis, other.axis} == {"data", "model"}
    # The other gather comes first: of one block a device. A chunk of the ring's axis has its
    # blocks apart where that axis is the minor one; as many as the other axis has devices.
    assert got.outer("lhs", "s", other.axis) == 1
    assert got.outer("lhs", "s", axis) == (other.axis_size if order[-1] == axis else 1)
    assert got.outer("out", "s", axis) == got.outer("lhs", "s", axis)
    assert got.outer("lhs", "s", axis) * got.chunk() == 32 // got.ring.axis_size
    Mesh(got).check()


@pytest.mark.parametrize("axis", BOTH)
@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_one_dim_scattered_along_two_axes(order: tuple[str, ...], axis: str):
    got = lay(scatters_one_dim(order), axis)
    assert isinstance(got, Layout)
    (other,) = got.others
    # The ring comes first, while the result is whole over both; what is left lies side by side.
    assert got.outer("out", "s", axis) == (other.axis_size if order[-1] == axis else 1)
    assert got.outer("lhs", "s", axis) == got.outer("out", "s", axis)
    assert got.outer("out", "s", axis) * got.chunk() == 32 // got.ring.axis_size
    assert got.outer("out", "s", other.axis) == 1
    Mesh(got).check()


# -- exchanges --------------------------------------------------------------------------------------


def test_an_operand_that_is_exchanged_is_whole_where_it_arrives_and_split_where_it_leaves():
    # Heads over model are exchanged for the sequence, as Ulysses does before its last projection.
    got = lay(
        matmul(
            "bsn,nd->bsd",
            {"b": 8, "s": 32, "n": 16, "d": 64},
            lhs=(("data",), (), ("model",)),
            rhs=((), ()),
            out=(("data",), ("model",), ()),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert isinstance(got, Layout)
    assert got.ring.collective is not None
    assert (got.ring.collective.kind, got.letter, got.ring.collective.to) == (
        "all_to_all",
        "n",
        "s",
    )
    assert got.lhs == (("data",), (), ("model",))
    assert got.rhs == ((), ())
    assert got.out == (("data",), ("model",), ())
    assert got.chunk() == 16 // 4
    Mesh(got).check()


def test_a_result_that_is_exchanged_is_cut_along_the_dim_that_it_is_wanted_on():
    got = lay(
        matmul(
            "gsd,gdf->gsf",
            {"g": 8, "s": 32, "d": 16, "f": 64},
            lhs=(("model",), (), ()),
            rhs=(("model",), (), ()),
            out=((), ("model",), ()),
            axis_sizes={"model": 4},
        )
    )
    assert isinstance(got, Layout)
    assert got.ring.collective is not None
    assert (got.ring.collective.kind, got.ring.collective.letter, got.letter) == (
        "all_to_all",
        "g",
        "s",
    )
    assert got.lhs == got.rhs == (("model",), (), ())
    assert got.out == ((), ("model",), ())
    assert got.chunk() == 32 // 4
    Mesh(got).check()


def test_the_exchange_of_another_axis_comes_after_the_ring():
    """The exchange also precedes what else the result waits for; operands are gathered before."""
    got = lay(
        matmul(
            "gsd,gdf->gsf",
            {"g": 8, "s": 32, "d": 16, "f": 64},
            lhs=(("model",), ("data",), ("now", "late")),
            rhs=(("model",), ("now", "late"), ("data",)),
            out=((), ("data", "model"), ("late",)),
            axis_sizes={"late": 2, "now": 2, "model": 2, "data": 2},
        ),
        "now",
    )
    assert isinstance(got, Layout)
    kinds = [(s.axis, s.collective.kind) for s in got.others if s.collective]
    assert kinds == [("data", "all_gather"), ("model", "all_to_all"), ("late", "reduce_scatter")]
    assert (got.letter, got.chunk()) == ("f", 64 // 2)  # data has gathered it, late has no part yet
    Mesh(got).check()


def test_the_exchange_of_an_operand_leaves_no_place_for_another_ring():
    given = matmul(
        "bsn,nd->bsd",
        {"b": 8, "s": 32, "n": 16, "d": 64},
        lhs=(("data",), (), ("model",)),
        rhs=((), ("data",)),
        out=(("data",), ("model",), ()),
        axis_sizes={"data": 2, "model": 4},
    )
    assert isinstance(lay(given, "model"), Layout)
    reason = "data and another axis both move it, and that one exchanges an operand"
    assert lay(given, "data") == reason


def test_an_all_reduce_is_not_cut_along_a_dim_that_another_axis_still_has():
    """A device has 3 of the 12 columns until x has exchanged them; the rows divide."""
    got = lay(exchange_of_a_narrow_dim(), "y")
    assert isinstance(got, Layout)
    assert got.letter == "a"
    Mesh(got).check()


# -- refusals ---------------------------------------------------------------------------------------


def test_the_axis_that_stays_must_count_the_same_blocks_on_every_side():
    # Once model is gathered, data has every fourth block of s; the result wants the half of it.
    got = lay(
        matmul(
            "sd,df->sf",
            SIZES,
            lhs=(("model", "data"), ()),
            rhs=((), ("model",)),
            out=(("data",), ("model",)),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert got == "dim s is sharded in different orders: ('model', 'data') and ('data',)"


def test_the_axes_that_stay_must_lie_alike_on_every_side():
    # Rows over (a, b) in the operand, (b, a) in the result; x sums over the contracted dim.
    got = lay(
        matmul(
            "sd,df->sf",
            {"s": 32, "d": 8, "f": 3},
            lhs=(("a", "b"), ("x",)),
            rhs=(("x",), ()),
            out=(("b", "a"), ()),
            axis_sizes={"a": 2, "b": 2, "x": 2},
        )
    )
    assert got == "dim s is sharded in different orders: ('a', 'b') and ('b', 'a')"


def test_the_same_order_with_other_strides_is_refused():
    # Both axes sum over d; model has a quarter of it in x, and in w a quarter of each half.
    got = lay(
        matmul(
            "sd,df->sf",
            SIZES,
            lhs=(("data",), ("model",)),
            rhs=(("data", "model"), ()),
            out=(("data",), ("model",)),
            axis_sizes={"data": 2, "model": 4},
        ),
        "model",
    )
    assert got == "dim d is sharded in different orders: ('model',) and ('data', 'model')"


def test_axes_that_swap_their_dims_are_refused():
    """x and y hold unlike halves of the rows: y's lie across those that x still has."""
    got = lay(transposed({"a": 8, "b": 8, "c": 8}, {"x": 2, "y": 2}), "y")
    assert got == "x and y shard dim a in blocks that cross"


def test_blocks_that_do_not_nest_are_refused():
    """x has 12 of 24 columns until it exchanges them; z's blocks of 4 x 2 do not make those up."""
    assert understood(UNNESTED) is not None
    assert lay(UNNESTED, "z") == "x and z shard dim c in blocks that cross"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"s": 30, "d": 16, "f": 64}, "dim s of lhs has size 30: not divisible by 4 devices"),
        ({"s": 32, "d": 16, "f": 63}, "dim f of rhs has size 63: not divisible by 4 devices"),
    ],
)
def test_uneven_dims_are_refused_with_their_sizes(sizes, reason: str):
    got = lay(
        matmul(
            "sd,df->sf",
            sizes,
            lhs=(("model",), ()),
            rhs=((), ("model",)),
            out=((), ("model",)),
            axis_sizes={"model": 4},
        )
    )
    assert got == reason


def test_a_scattered_dim_must_divide():
    got = lay(
        matmul(
            "sf,fd->sd",
            {"s": 30, "f": 16, "d": 8},
            lhs=((), ("model",)),
            rhs=(("model",), ()),
            out=(("model",), ()),
            axis_sizes={"model": 4},
        )
    )
    assert got == "dim s of out has size 30: not divisible by 4 devices"


# -- exactness ------------------------------------------------------------------------------------


def take(array: np.ndarray, dim: int, outer: int, n: int, chunk: int) -> np.ndarray:
    """Return chunk number `chunk` of a dim seen as view(outer, n, size)."""
    shape = array.shape
    view = array.reshape(*shape[:dim], outer, n, -1, *shape[dim + 1 :])
    return view.take(chunk, dim + 1).reshape(*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def put(
    whole: np.ndarray | None, part: np.ndarray, dim: int, outer: int, n: int, chunk: int
) -> np.ndarray:
    """Return `whole` (a new one, if None) with the chunk that `take` takes written to it."""
    head, size, tail = part.shape[:dim], part.shape[dim], part.shape[dim + 1 :]
    if whole is None:
        whole = np.full((*head, n * size, *tail), UNWRITTEN)
    view = whole.reshape(*head, outer, n, -1, *tail)
    position = (*(slice(None),) * (dim + 1), chunk)
    assert (view[position] == UNWRITTEN).all(), "a chunk is written once"
    view[position] = part.reshape(*head, outer, -1, *tail)
    return view.reshape(whole.shape)


UNWRITTEN = -(10**9)


Blocks = dict[tuple[tuple[str, int], ...], np.ndarray]
"""What each device holds."""


class Mesh:
    """A mesh of numpy blocks on which the rewrite is played: rewrite.py's body, device by device."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.einsum = layout.matmul.einsum
        self.sizes = layout.matmul.axis_sizes
        collective = layout.ring.collective
        assert collective is not None
        self.collective = collective
        self.sent: Counter[str] = Counter()  # bytes, by axis, from all devices
        lhs, rhs, self.product = operands(self.einsum)
        self.lhs = self._blocks(lhs, layout.lhs, layout.matmul.lhs)
        self.rhs = self._blocks(rhs, layout.rhs, layout.matmul.rhs)

    def _blocks(self, whole: np.ndarray, spec: Spec, given: Spec) -> Blocks:
        """Return an operand's blocks, each a slice of what its device is given."""
        blocks = {}
        for device in devices(self.sizes):
            taken = block(whole.shape, spec, device, self.sizes)
            had = block(whole.shape, given, device, self.sizes)
            for part, all_of_it in zip(taken, had, strict=True):
                assert all_of_it.start <= part.start and part.stop <= all_of_it.stop
            blocks[key(device)] = whole[taken]
        return blocks

    def run(self) -> Blocks:
        """Return every device's result."""
        for other in self.layout.others:
            collective = other.collective
            assert collective is not None
            if collective.side == "out":
                continue
            assert collective.kind == "all_gather"
            blocks = self.lhs if collective.side == "lhs" else self.rhs
            dim, outer = self._at(collective.side, collective.letter, other.axis)
            blocks.update(self._gather(blocks, other.axis, dim, outer))
        results = self._ring()
        for other in self.layout.others:
            assert other.collective is not None
            if other.collective.side == "out":
                results = self._reduce(results, other, other.collective)
        return results

    def _at(self, side: Side, letter: str, axis: str) -> tuple[int, int]:
        """Return a dim, and into how many blocks a chunk of it falls when the axis moves."""
        return self.einsum.side(side).index(letter), self.layout.outer(side, letter, axis)

    def _gather(self, blocks: Blocks, axis: str, dim: int, outer: int) -> Blocks:
        """Put every device's part in its place: view(outer, size) -> view(outer, chunks, size)."""
        gathered = {}
        for d in devices(self.sizes):
            n = self.sizes[axis]
            whole = None
            for rank, k in enumerate(along(axis, d, n)):
                whole = put(whole, blocks[k], dim, outer, n, rank)
            gathered[key(d)] = whole
            self._send(axis, blocks[key(d)], n - 1)
        return gathered

    def _send(self, axis: str, part: np.ndarray, times: int = 1) -> None:
        self.sent[axis] += part.size * ITEMSIZE[0] * times

    def _exchange(self, blocks: Blocks, axis: str, dim: str, wanted: str) -> Blocks:
        """Give every device its slice of `wanted` of the result, in its place along `dim`."""
        n, slices = self.sizes[axis], {}
        for d in devices(self.sizes):
            whole = None
            for rank, k in enumerate(along(axis, d, n)):
                mine = take(blocks[k], *self._at("out", wanted, axis), n, d[axis])
                self._send(axis, mine, rank != d[axis])
                whole = put(whole, mine, *self._at("out", dim, axis), n, rank)
            slices[key(d)] = whole
        return slices

    def _reduce(self, results: Blocks, other: Split, collective: ImpliedCollective) -> Blocks:
        """Move the result on another axis than the ring's."""
        if collective.kind == "all_to_all":
            assert collective.to is not None
            return self._exchange(results, other.axis, collective.letter, collective.to)
        out, n = {}, other.axis_size
        for d in devices(self.sizes):
            total = np.sum([results[k] for k in along(other.axis, d, n)], axis=0)
            if collective.kind == "reduce_scatter":
                total = take(
                    total, *self._at("out", collective.letter, other.axis), n, d[other.axis]
                )
                self._send(other.axis, total, n - 1)
            else:  # scattered and gathered
                self.sent[other.axis] += 2 * total.size * ITEMSIZE[0] * (n - 1) // n
            out[key(d)] = total
        return out

    def _chunk(self, array: np.ndarray, side: Side, chunk: int) -> np.ndarray:
        """Return a chunk of an operand, along the ring's dim if it has that."""
        letter, at = self.layout.letter, self.layout.ring
        if letter not in self.einsum.side(side):
            return array
        return take(array, *self._at(side, letter, at.axis), at.axis_size, chunk)

    def _dot(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        return np.einsum(str(self.einsum), lhs, rhs)

    def _product(self, k: tuple[tuple[str, int], ...], chunk: int) -> np.ndarray:
        """Return a chunk of a result that moves."""
        return self._dot(
            self._chunk(self.lhs[k], "lhs", chunk), self._chunk(self.rhs[k], "rhs", chunk)
        )

    def _ring(self) -> Blocks:
        _, outer = self._at(self.collective.side, self.layout.letter, self.layout.ring.axis)
        assert self._moving_rows() == self.layout.chunk() * outer * self.layout.ring.axis_size
        if self.collective.side == "out":
            return self._exchange_of_products() if self.collective.to else self._sums()
        results: Blocks = {}
        for chunk_at, arrived in self._arrivals():
            self._read(results, arrived, chunk_at)
        return results

    def _moving_rows(self) -> int:
        """Return the size of the ring's dim on a device, were it whole over the ring's axis."""
        letter, n = self.layout.letter, self.layout.ring.axis_size
        side: Side = self.collective.side
        if side == "out":  # not there yet: an operand has it
            side, n = ("lhs" if letter in self.einsum.lhs else "rhs"), 1
        blocks = self.lhs if side == "lhs" else self.rhs
        return next(iter(blocks.values())).shape[self.einsum.side(side).index(letter)] * n

    def _hop(self, blocks: Blocks) -> Blocks:
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        for part in blocks.values():
            self._send(axis, part)
        source = {target: source for source, target in orders.permutation(n, 1)}
        return {key(d): blocks[key({**d, axis: source[d[axis]]})] for d in devices(self.sizes)}

    def _arrivals(self) -> Iterator[tuple[dict[int, int], Blocks]]:
        """Yield, at each step, each rank's chunk number and the block that each device reads."""
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        shards = dict(self.lhs if self.collective.side == "lhs" else self.rhs)
        for hop in range(n):
            chunk_at = {rank: orders.chunk_at(rank, hop, n) for rank in range(n)}
            if self.collective.to is None:
                shards = self._hop(shards) if hop else shards
                yield chunk_at, shards
                continue
            dim, outer = self._at(self.collective.side, self.collective.to, axis)
            came = {}
            for d in devices(self.sizes):  # of every other device the slice that this one wants
                theirs = shards[key({**d, axis: chunk_at[d[axis]]})]
                came[key(d)] = take(theirs, dim, outer, n, d[axis])
                self._send(axis, came[key(d)], hop > 0)
            yield chunk_at, came

    def _read(self, results: Blocks, arrived: Blocks, chunk_at: Mapping[int, int]) -> None:
        """Multiply what is there, in one step of a ring that moves an operand."""
        axis, n, letter = self.layout.ring.axis, self.layout.ring.axis_size, self.layout.letter
        for d in devices(self.sizes):
            k, chunk = key(d), chunk_at[d[axis]]
            lhs = rhs = arrived[k]
            if self.collective.side == "lhs":
                rhs = self._chunk(self.rhs[k], "rhs", chunk)
            else:
                lhs = self._chunk(self.lhs[k], "lhs", chunk)
            part = self._dot(lhs, rhs)
            if letter in self.einsum.out:
                results[k] = put(results.get(k), part, *self._at("out", letter, axis), n, chunk)
            else:
                results[k] = results.get(k, 0) + part

    def _sums(self) -> Blocks:
        """Run a ring of partial sums; for an all-reduce they are gathered again."""
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        sums: Blocks = {}
        for hop in range(n):
            sums = self._hop(sums) if sums else sums
            for d in devices(self.sizes):
                k = key(d)
                sums[k] = sums.get(k, 0) + self._product(k, orders.chunk_at(d[axis], hop + 1, n))
        if self.collective.kind == "reduce_scatter":
            return sums
        return self._gather(sums, axis, *self._at("out", self.layout.letter, axis))

    def _exchange_of_products(self) -> Blocks:
        """Multiply on each device what every other one wants, and put what comes in its place."""
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        results: Blocks = {}
        for d in devices(self.sizes):
            k, at = key(d), self._at("out", self.collective.letter, axis)
            for rank, source in enumerate(along(axis, d, n)):
                part = self._product(source, d[axis])
                self._send(axis, part, rank != d[axis])
                results[k] = put(results.get(k), part, *at, n, rank)
        return results

    def check(self) -> None:
        """Check that every device has the block that the step wants, and sent what is told."""
        results = self.run()
        count = math.prod(self.sizes.values())
        assert {axis: sent / count for axis, sent in self.sent.items()} == traffic(self.layout)
        for d in devices(self.sizes):
            wanted = block(self.product.shape, self.layout.matmul.out, d, self.sizes)
            expected = self.product[wanted]
            assert results[key(d)].shape == expected.shape
            np.testing.assert_array_equal(results[key(d)], expected)


@functools.cache
def _understandable(text: str, n: int) -> tuple[tuple[tuple[str | None, ...], ...], ...]:
    """List where an axis may lie on lhs, rhs and out so that it can be split, by its collective."""
    left, right, out = text.replace("->", ",").split(",")
    einsum = Einsum(left, right, out, dict.fromkeys(left + right, 8))
    groups: dict[str, list[tuple[str | None, ...]]] = {}
    for held in product((None, *left), (None, *right), (None, *out)):
        split_x = split(one_axis(einsum, *held, n), "x")
        if isinstance(split_x, Split):
            groups.setdefault(split_x.collective.kind if split_x.collective else "", []).append(
                held
            )
    return tuple(map(tuple, groups.values()))


@st.composite
def meshes(draw) -> ShardedMatmul:
    """Draw a matmul whose every axis may be understood; those that share a dim lie in any order."""
    einsum = draw(einsums(most=1, sizes=(8, 12)))
    assume(einsum.sizes)
    sizes = draw(st.sampled_from([{"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]))
    held = {
        axis: draw(st.sampled_from(draw(st.sampled_from(_understandable(str(einsum), n)))))
        for axis, n in sizes.items()
    }
    sides = []
    for number, side in enumerate(("lhs", "rhs", "out")):
        axes = draw(st.permutations(list(sizes)))
        letters = einsum.side(side)  # type: ignore[arg-type]
        sides.append(tuple(tuple(a for a in axes if held[a][number] == c) for c in letters))
    return ShardedMatmul(einsum, *sides, ITEMSIZE, sizes)


def check(given: ShardedMatmul) -> list[str]:
    """Play every layout of a matmul; list what became of its axes that move something."""
    shared = understood(given)
    fates = []
    for ringed in shared or ():
        if ringed.collective is None:
            continue
        layout = lay_out(given, shared, ringed)  # type: ignore[arg-type]
        if isinstance(layout, str):
            fates.append("refused")
            continue
        Mesh(layout).check()
        fates.append(f"{ringed.collective.kind} with {len(layout.others)} others{_apart(layout)}")
    return fates


def transposed(sizes: Mapping[str, int], axis_sizes: Mapping[str, int]) -> ShardedMatmul:
    """Describe x moving from rows to columns of the result, and y from the contracted dim to rows.

    Until x has gone, a device has the rows of its block, and not those that y wants of all.
    """
    return matmul(
        "ab,bc->ac",
        sizes,
        lhs=(("x",), ("y",)),
        rhs=((), ()),
        out=(("y",), ("x",)),
        axis_sizes=axis_sizes,
    )


def exchange_of_a_narrow_dim() -> ShardedMatmul:
    """Describe sums over y: a device has 3 of the 12 columns until x has exchanged them."""
    return matmul(
        "ab,bc->ac",
        {"a": 8, "b": 24, "c": 12},
        lhs=((), ()),
        rhs=(("y",), ("x",)),
        out=(("x",), ()),
        axis_sizes={"x": 4, "y": 2},
    )


def _apart(layout: Layout) -> str:
    """Return ", apart" if some chunk does not lie side by side."""
    collectives = [(s.axis, s.collective) for s in (layout.ring, *layout.others) if s.collective]
    moves = [(layout.letter, layout.ring.axis)]
    moves += [
        (c, axis)
        for axis, collective in collectives
        for c in (collective.letter, collective.to)
        if c
    ]
    for letter, axis in moves:
        for side in SIDES:
            if letter in layout.matmul.einsum.side(side) and layout.outer(side, letter, axis) > 1:
                return ", apart"
    return ""


@settings(max_examples=400, deadline=None)
@given(meshes())
@example(fsdp_and_tensor_parallel())
@example(transposed({"a": 8, "b": 8, "c": 8}, {"x": 2, "y": 2}))
@example(transposed({"a": 8, "b": 8, "c": 8}, {"x": 4, "y": 2}))
@example(exchange_of_a_narrow_dim())
def test_a_layout_computes_the_matmul(drawn: ShardedMatmul):
    for fate in check(drawn):
        event(fate)


def test_every_layout_of_a_plain_matmul_over_two_axes_computes_it():
    """Two axes are put on the dims of ab,bc->ac in all ways, in both orders if they share one."""
    einsum = Einsum("ab", "bc", "ac", {"a": 8, "b": 8, "c": 8})
    fates: Counter[str] = Counter()
    for sides in product(_all_specs("ab"), _all_specs("bc"), _all_specs("ac")):
        fates.update(check(ShardedMatmul(einsum, *sides, ITEMSIZE, {"x": 2, "y": 4})))
    kinds = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    expected = {f"{kind} with {n} others" for kind in kinds for n in (0, 1)}
    expected |= {f"{kind} with 1 others, apart" for kind in kinds[:3]}
    assert set(fates) == expected | {"refused"}


@st.composite
def crowded(draw) -> ShardedMatmul:
    """Draw ab,bc->ac with most of three axes on one dim, each side in its own order or all in one.

    A side that has an axis elsewhere gives what `meshes` gives, too.
    """
    sizes = draw(st.sampled_from([{"x": 2, "y": 3, "z": 2}, {"x": 2, "y": 2, "z": 2}]))
    einsum = Einsum("ab", "bc", "ac", dict.fromkeys("abc", 24))
    letter = draw(st.sampled_from("abc"))
    order = draw(st.permutations(list(sizes)))
    held = {
        axis: draw(st.sampled_from([at for g in _understandable(str(einsum), n) for at in g if letter in at]))
        for axis, n in sizes.items()
    }  # fmt: skip
    sides = []
    for number, side in enumerate(SIDES):
        axes = order if draw(st.integers(0, 3)) else draw(st.permutations(list(sizes)))
        letters = einsum.side(side)
        sides.append(tuple(tuple(a for a in axes if held[a][number] == c) for c in letters))
    return ShardedMatmul(einsum, *sides, ITEMSIZE, sizes)


# x, y and z all shard the columns at some time, x in halves before y and z do in sixths.
UNNESTED = ShardedMatmul(
    Einsum("ab", "bc", "ac", dict.fromkeys("abc", 24)),
    lhs=((), ("y", "z")),
    rhs=(("y", "z"), ("x",)),
    out=(("x",), ("y", "z")),
    itemsize=ITEMSIZE,
    axis_sizes={"x": 2, "y": 3, "z": 2},
)


@settings(max_examples=300, deadline=None)
@given(crowded())
@example(UNNESTED)
def test_a_layout_with_three_axes_on_a_dim_computes_the_matmul(drawn: ShardedMatmul):
    for fate in check(drawn):
        event(fate)


def _all_specs(letters: str) -> list[Spec]:
    specs = set()
    for axes in permutations(("x", "y")):
        for first in (None, *letters):
            for second in (None, *letters):
                positions = list(zip(axes, (first, second), strict=True))
                specs.add(tuple(tuple(a for a, at in positions if at == c) for c in letters))
    return sorted(specs)


def test_the_games_own_rules_notice_a_wrong_layout():
    """The simulation is not so lenient that a layout in the wrong order of axes would pass."""
    got = lay(
        matmul(
            "sd,df->sf",
            SIZES,
            lhs=(("data", "model"), ()),
            rhs=((), ("model",)),
            out=(("data",), ("model",)),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert isinstance(got, Layout)
    wrong = Layout(
        **{
            **{f: getattr(got, f) for f in got.__dataclass_fields__},
            "lhs": (("model", "data"), ()),
        }
    )
    with pytest.raises(AssertionError):
        Mesh(wrong).check()
    Mesh(got).check()
