"""Layouts, against numpy: what the rewrite would do with one must compute the matmul."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from jaxoverlap.passes import ring
from jaxoverlap.passes.layout import Layout, lay_out
from jaxoverlap.passes.sites import (
    SIDES,
    Einsum,
    Matmul,
    Motion,
    Refusal,
    Side,
    Spec,
    Split,
    split,
)
from tests.test_sites import along, block, devices, einsums, key, one_axis, operands

ITEMSIZE = (2, 2, 2)


def matmul(
    einsum: str,
    sizes: Mapping[str, int],
    lhs: Spec,
    rhs: Spec,
    out: Spec,
    axis_sizes: Mapping[str, int],
) -> Matmul:
    operand_letters, result = einsum.split("->")
    left, right = operand_letters.split(",")
    return Matmul(Einsum(left, right, result, sizes), lhs, rhs, out, ITEMSIZE, axis_sizes)


def lay(given: Matmul, axis: str | None = None) -> Layout | str:
    """Lay out for the ring of an axis, or as `decide` does: for the one that moves most."""
    shared = understood(given)
    assert shared is not None, given.splits
    moving = [s for s in shared if s.motion is not None]
    if axis is not None:
        return lay_out(given, shared, next(s for s in moving if s.axis == axis))
    return lay_out(given, shared, biggest(moving))


def understood(given: Matmul) -> list[Split] | None:
    """The splits of all axes, if none is a refusal."""
    found = given.splits
    return None if any(isinstance(s, Refusal) for s in found) else list(found)  # type: ignore[arg-type]


def biggest(moving: Sequence[Split]) -> Split:
    return max(moving, key=lambda s: s.motion.bytes_moved)  # type: ignore[union-attr]


# -- which axes turn manual, and the specs --------------------------------------------------------

SIZES = {"s": 32, "d": 16, "f": 64}


def test_the_ring_alone_turns_manual():
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
    assert got.manual == ("model",)
    assert got.letter == "s"
    assert got.others == ()
    assert got.lhs == ((), ("model",), ())
    assert got.rhs == ((), ("model",))
    assert got.out == ((), (), ("model",))


def fsdp_and_tensor_parallel() -> Matmul:
    """x: [s/model, d] and w: [d/data, f/model], the batch over data: two gathers."""
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
def test_the_axis_of_another_collective_turns_manual_too(axis: str, letter: str, other: str):
    got = lay(fsdp_and_tensor_parallel(), axis)
    assert isinstance(got, Layout)
    assert (got.ring.axis, got.letter) == (axis, letter)
    assert [s.axis for s in got.others] == [other]
    assert got.manual == ("data", "model")
    assert got.lhs == (("data",), ("model",), ())
    assert got.rhs == (("data",), ("model",))
    assert got.out == (("data",), (), ("model",))


def test_an_axis_that_shares_a_dim_turns_manual_too():
    # The sequence over both; only model gathers it. More shards of s must not cross its devices.
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
    assert got.manual == ("data", "model")
    assert got.lhs == (("data", "model"), ())
    assert got.rhs == ((), ("model",))
    assert got.out == (("data",), ("model",))


def test_the_manual_axes_are_closed_under_sharing():
    # model gathers s, data shares s with it, and pod shares nothing with either: it stays.
    got = lay(
        matmul(
            "bsd,df->bsf",
            {"b": 8, **SIZES},
            lhs=(("pod",), ("data", "model"), ()),
            rhs=((), ("model", "tail")),
            out=(("pod",), ("data",), ("model", "tail")),
            axis_sizes={"pod": 2, "data": 2, "tail": 2, "model": 2},
        )
    )
    assert isinstance(got, Layout)
    assert got.manual == ("data", "tail", "model")  # in the mesh's order
    assert got.rhs == ((), ("model", "tail"))
    assert got.out == ((), ("data",), ("model", "tail"))


def test_a_whole_operand_is_sliced_after_the_axes_that_it_has():
    # b: [f/model], contracted with a's [f/(model, data)]: data is whole there and sliced by.
    got = lay(
        matmul(
            "sf,fd->sd",
            SIZES,
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


def all_reduce(sizes: Mapping[str, int], out: Spec, axis_sizes: Mapping[str, int]) -> Matmul:
    """bsk,kd->bsd, summed over x on k; out says what the others hold, in both operands alike."""
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
    assert got.ring.motion is not None and got.ring.motion.kind == "all_reduce"
    assert got.letter == letter
    assert got.out == ((), (), ())


def test_an_all_reduce_is_rather_cut_along_a_dim_that_no_axis_shards():
    sizes = {"b": 4, "s": 64, "d": 16, "k": 8}
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert isinstance(got, Layout)
    assert (got.letter, got.manual) == ("d", ("x",))


def test_an_all_reduce_is_cut_along_a_sharded_dim_if_need_be():
    sizes = {"b": 3, "s": 64, "d": 17, "k": 8}
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert isinstance(got, Layout)
    assert (got.letter, got.manual) == ("s", ("y", "x"))
    assert got.lhs == ((), ("y",), ("x",))
    assert got.out == ((), ("y",), ())


def test_a_sharded_dim_must_divide_by_its_axes_and_the_ring():
    sizes = {"b": 3, "s": 12, "d": 17, "k": 8}  # 12 divides by 4, but not by 2 x 4
    got = lay(all_reduce(sizes, ((), ("y",), ()), {"y": 2, "x": 4}))
    assert got == "no dim of the result (b 3, s 12, d 17) divides into 4 chunks"


# -- several axes on one dim ------------------------------------------------------------------------

BOTH = ("data", "model")


def gathers_one_dim(order: tuple[str, ...]) -> Matmul:
    """Rows over two axes, whole for the matmul: two gathers of one dim."""
    return matmul(
        "sd,df->sf",
        SIZES,
        lhs=(order, ()),
        rhs=((), BOTH),
        out=((), BOTH),
        axis_sizes={"data": 2, "model": 4},
    )


def scatters_one_dim(order: tuple[str, ...]) -> Matmul:
    """Partial sums over two axes, scattered over the rows along both."""
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
    assert got.outer("out", "s", other.axis) == 1
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


def only(spec: Spec, axes: Sequence[str]) -> Spec:
    return tuple(tuple(a for a in dim if a in axes) for dim in spec)


def take(array: np.ndarray, dim: int, outer: int, n: int, chunk: int) -> np.ndarray:
    """Chunk number `chunk` of a dim seen as view(outer, n, size)."""
    shape = array.shape
    view = array.reshape(*shape[:dim], outer, n, -1, *shape[dim + 1 :])
    return view.take(chunk, dim + 1).reshape(*shape[:dim], shape[dim] // n, *shape[dim + 1 :])


def put(
    whole: np.ndarray | None, part: np.ndarray, dim: int, outer: int, n: int, chunk: int
) -> np.ndarray:
    """`whole` (a new one, if None) with the chunk that `take` takes written."""
    head, size, tail = part.shape[:dim], part.shape[dim], part.shape[dim + 1 :]
    if whole is None:
        whole = np.full((*head, n * size, *tail), UNWRITTEN)
    view = whole.reshape(*head, outer, n, -1, *tail)
    place = (*(slice(None),) * (dim + 1), chunk)
    assert (view[place] == UNWRITTEN).all(), "a chunk is written once"
    view[place] = part.reshape(*head, outer, -1, *tail)
    return view.reshape(whole.shape)


UNWRITTEN = -(10**9)


class Mesh:
    """A mesh of numpy blocks on which the rewrite is played: rewrite.py's body, device by device."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.einsum = layout.matmul.einsum
        self.sizes = {a: layout.matmul.axis_sizes[a] for a in layout.manual}
        lhs, rhs, self.product = operands(self.einsum)
        self.lhs = self._blocks(lhs, layout.lhs, layout.matmul.lhs)
        self.rhs = self._blocks(rhs, layout.rhs, layout.matmul.rhs)

    def _blocks(self, whole: np.ndarray, spec: Spec, given: Spec) -> dict:
        """An operand's blocks; each a slice of what its device is given, or something moved."""
        blocks = {}
        for device in devices(self.sizes):
            taken = block(whole.shape, spec, device, self.sizes)
            had = block(whole.shape, only(given, self.layout.manual), device, self.sizes)
            for part, all_of_it in zip(taken, had, strict=True):
                assert all_of_it.start <= part.start and part.stop <= all_of_it.stop
            blocks[key(device)] = whole[taken]
        return blocks

    def run(self) -> dict:
        """Every device's result."""
        for other in self.layout.others:
            motion = other.motion
            assert motion is not None
            if motion.kind == "all_gather":
                blocks = self.lhs if motion.side == "lhs" else self.rhs
                dim = self.einsum.side(motion.side).index(motion.letter)
                outer = self.layout.outer(motion.side, motion.letter, other.axis)
                blocks.update(self._gather(blocks, other.axis, dim, outer))
        results = self._ring()
        for other in self.layout.others:
            motion = other.motion
            assert motion is not None
            if motion.side == "out":
                results = self._sum(results, other, motion)
        return results

    def _gather(self, blocks: dict, axis: str, dim: int, outer: int) -> dict:
        """Every device's part in its place: view(outer, size) -> view(outer, chunks, size)."""
        gathered = {}
        for d in devices(self.sizes):
            n = self.sizes[axis]
            whole = None
            for rank, k in enumerate(along(axis, d, n)):
                whole = put(whole, blocks[k], dim, outer, n, rank)
            gathered[key(d)] = whole
        return gathered

    def _sum(self, results: dict, other: Split, motion: Motion) -> dict:
        out = {}
        for d in devices(self.sizes):
            total = sum(results[k] for k in along(other.axis, d, other.axis_size))
            if motion.kind == "reduce_scatter":
                dim = self.einsum.out.index(motion.letter)
                outer = self.layout.outer("out", motion.letter, other.axis)
                total = take(total, dim, outer, other.axis_size, d[other.axis])
            out[key(d)] = total
        return out

    def _chunk(self, array: np.ndarray, side: Side, chunk: int) -> np.ndarray:
        """A chunk of an operand, along the ring's dim if it has that."""
        letters, letter, at = self.einsum.side(side), self.layout.letter, self.layout.ring
        if letter not in letters:
            return array
        outer = self.layout.outer(side, letter, at.axis)
        return take(array, letters.index(letter), outer, at.axis_size, chunk)

    def _dot(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        return np.einsum(str(self.einsum), lhs, rhs)

    def _ring(self) -> dict:
        motion = self.layout.ring.motion
        assert motion is not None
        if motion.kind == "all_gather":
            return self._gather_ring(motion)
        scattered = self._scatter_ring()
        if motion.kind == "reduce_scatter":
            return scattered
        axis, letter = self.layout.ring.axis, self.layout.letter
        outer = self.layout.outer("out", letter, axis)
        return self._gather(scattered, axis, self.einsum.out.index(letter), outer)

    def _hop(self, blocks: dict) -> dict:
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        source = {target: source for source, target in ring.permutation(n, 1)}
        return {key(d): blocks[key({**d, axis: source[d[axis]]})] for d in devices(self.sizes)}

    def _gather_ring(self, motion: Motion) -> dict:
        axis, n, letter = self.layout.ring.axis, self.layout.ring.axis_size, self.layout.letter
        shards = dict(self.lhs if motion.side == "lhs" else self.rhs)
        results: dict = {}
        for hop in range(n):
            for d in devices(self.sizes):
                k, chunk = key(d), ring.chunk_at(d[axis], hop, n)
                lhs, rhs = shards[k], shards[k]
                if motion.side == "lhs":
                    rhs = self._chunk(self.rhs[k], "rhs", chunk)
                else:
                    lhs = self._chunk(self.lhs[k], "lhs", chunk)
                part = self._dot(lhs, rhs)
                if letter not in self.einsum.out:
                    results[k] = results.get(k, 0) + part
                    continue
                dim, outer = self.einsum.out.index(letter), self.layout.outer("out", letter, axis)
                results[k] = put(results.get(k), part, dim, outer, n, chunk)
            shards = self._hop(shards)
        return results

    def _scatter_ring(self) -> dict:
        axis, n = self.layout.ring.axis, self.layout.ring.axis_size
        sums: dict = {}
        for hop in range(n):
            sums = self._hop(sums) if sums else sums
            for d in devices(self.sizes):
                k, chunk = key(d), ring.chunk_at(d[axis], hop + 1, n)
                lhs, rhs = (
                    self._chunk(self.lhs[k], "lhs", chunk),
                    self._chunk(self.rhs[k], "rhs", chunk),
                )
                sums[k] = sums.get(k, 0) + self._dot(lhs, rhs)
        return sums

    def check(self) -> None:
        """Every device has the block that the step wants there."""
        results = self.run()
        wanted = only(self.layout.matmul.out, self.layout.manual)
        for d in devices(self.sizes):
            expected = self.product[block(self.product.shape, wanted, d, self.sizes)]
            assert results[key(d)].shape == expected.shape
            np.testing.assert_array_equal(results[key(d)], expected)


@functools.cache
def _understandable(text: str, n: int) -> tuple[tuple[tuple[str | None, ...], ...], ...]:
    """Where an axis may lie on lhs, rhs and out so that it can be split, by what it then moves."""
    left, right, out = text.replace("->", ",").split(",")
    einsum = Einsum(left, right, out, dict.fromkeys(left + right, 8))
    groups: dict[str, list[tuple[str | None, ...]]] = {}
    for held in product((None, *left), (None, *right), (None, *out)):
        found = split(one_axis(einsum, *held, n), "x")
        if isinstance(found, Split):
            groups.setdefault(found.motion.kind if found.motion else "", []).append(held)
    return tuple(map(tuple, groups.values()))


@st.composite
def meshes(draw) -> Matmul:
    """A matmul whose every axis may be understood; those that share a dim lie in any order."""
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
    return Matmul(einsum, *sides, ITEMSIZE, sizes)


def check(given: Matmul) -> list[str]:
    """Play every layout of a matmul; what became of its axes that move something."""
    shared = understood(given)
    fates = []
    for ringed in shared or ():
        if ringed.motion is None:
            continue
        layout = lay_out(given, shared, ringed)  # type: ignore[arg-type]
        if isinstance(layout, str):
            fates.append("refused")
            continue
        assert ringed.axis in layout.manual
        assert {s.axis for s in layout.others} <= set(layout.manual)
        _check_automatic(layout, shared)  # type: ignore[arg-type]
        Mesh(layout).check()
        fates.append(f"{ringed.motion.kind} with {len(layout.others)} others{_apart(layout)}")
        if set(layout.manual) == set(given.axis_sizes):
            continue
        everywhere = lay_out(given, shared, ringed, also=given.axis_sizes)  # type: ignore[arg-type]
        if isinstance(everywhere, Layout):  # as for a matmul that shares a ring with others
            assert set(everywhere.manual) == set(given.axis_sizes)
            Mesh(everywhere).check()
    return fates


def _apart(layout: Layout) -> str:
    """Whether some chunk does not lie side by side."""
    moves = [(layout.letter, layout.ring.axis)]
    moves += [(s.motion.letter, s.axis) for s in layout.others if s.motion]
    for letter, axis in moves:
        for side in SIDES:
            if letter in layout.matmul.einsum.side(side) and layout.outer(side, letter, axis) > 1:
                return ", apart"
    return ""


def _check_automatic(layout: Layout, shared: Sequence[Split]) -> None:
    """The axes that stay automatic move nothing, and have no dim with a manual axis."""
    for found in shared:
        if found.axis in layout.manual:
            continue
        assert found.motion is None
        for side in ("lhs", "rhs", "out"):
            if (letter := found.at(side)) is not None:
                dim = layout.matmul.einsum.side(side).index(letter)
                assert getattr(layout, side)[dim] == ()


@settings(max_examples=400, deadline=None)
@given(meshes())
@example(fsdp_and_tensor_parallel())
def test_a_layout_computes_the_matmul(drawn: Matmul):
    for fate in check(drawn):
        event(fate)


def test_every_layout_of_a_plain_matmul_over_two_axes_computes_it():
    """All ways to put two axes on the dims of ab,bc->ac, in both orders where they share one."""
    einsum = Einsum("ab", "bc", "ac", {"a": 8, "b": 8, "c": 8})
    fates: Counter[str] = Counter()
    for sides in product(_all_specs("ab"), _all_specs("bc"), _all_specs("ac")):
        fates.update(check(Matmul(einsum, *sides, ITEMSIZE, {"x": 2, "y": 4})))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    expected = {f"{kind} with {n} others" for kind in kinds for n in (0, 1)}
    expected |= {f"{kind} with 1 others, apart" for kind in kinds[:2]}
    assert set(fates) == expected | {"refused"}


@st.composite
def crowded(draw) -> Matmul:
    """ab,bc->ac with most of three axes on one dim, in an order of each side's own or one for all.

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
    return Matmul(einsum, *sides, ITEMSIZE, sizes)


@settings(max_examples=300, deadline=None)
@given(crowded())
def test_a_layout_with_three_axes_on_a_dim_computes_the_matmul(drawn: Matmul):
    for fate in check(drawn):
        event(fate)


def _all_specs(letters: str) -> list[Spec]:
    found = set()
    for axes in permutations(("x", "y")):
        for first in (None, *letters):
            for second in (None, *letters):
                places = list(zip(axes, (first, second), strict=True))
                found.add(tuple(tuple(a for a, at in places if at == c) for c in letters))
    return sorted(found)


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
    assert math.prod(Mesh(got).sizes.values()) == 8
    Mesh(got).check()
