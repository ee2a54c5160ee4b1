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
from jaxoverlap.passes.sites import Einsum, Matmul, Motion, Refusal, Spec, Split, split, splits
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
    assert shared is not None, splits(given)
    moving = [s for s in shared if s.motion is not None]
    if axis is not None:
        return lay_out(given, shared, next(s for s in moving if s.axis == axis))
    return lay_out(given, shared, biggest(moving))


def understood(given: Matmul) -> list[Split] | None:
    """The splits of all axes, if none is a refusal."""
    found = splits(given)
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


# -- refusals ---------------------------------------------------------------------------------------


def test_the_moving_axis_must_be_the_minor_one():
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
    assert got == "dim s of lhs is sharded by ('model', 'data'): model is not the minor"


def test_one_dim_does_not_move_along_two_axes():
    got = lay(
        matmul(
            "sd,df->sf",
            SIZES,
            lhs=(("data", "model"), ()),
            rhs=((), ("data", "model")),
            out=((), ("data", "model")),
            axis_sizes={"data": 2, "model": 4},
        )
    )
    assert got == "axes data and model both move dim s of lhs"


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
                blocks.update(self._gather(blocks, other.axis, dim))
        results = self._ring()
        for other in self.layout.others:
            motion = other.motion
            assert motion is not None
            if motion.side == "out":
                results = self._sum(results, other, motion)
        return results

    def _gather(self, blocks: dict, axis: str, dim: int) -> dict:
        return {
            key(d): np.concatenate([blocks[k] for k in along(axis, d, self.sizes[axis])], dim)
            for d in devices(self.sizes)
        }

    def _sum(self, results: dict, other: Split, motion: Motion) -> dict:
        out = {}
        for d in devices(self.sizes):
            total = sum(results[k] for k in along(other.axis, d, other.axis_size))
            if motion.kind == "reduce_scatter":
                dim = self.einsum.out.index(motion.letter)
                total = np.split(total, other.axis_size, dim)[d[other.axis]]
            out[key(d)] = total
        return out

    def _chunk(self, array: np.ndarray, side: str, chunk: int, size: int) -> np.ndarray:
        """A chunk of `size` of an operand, along the ring's dim if it has that."""
        letters, letter = self.einsum.side(side), self.layout.letter  # type: ignore[arg-type]
        if letter not in letters:
            return array
        return array.take(range(chunk * size, (chunk + 1) * size), letters.index(letter))

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
        dim = self.einsum.out.index(self.layout.letter)
        return self._gather(scattered, self.layout.ring.axis, dim)

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
                size = shards[k].shape[self.einsum.side(motion.side).index(letter)]
                lhs, rhs = shards[k], shards[k]
                if motion.side == "lhs":
                    rhs = self._chunk(self.rhs[k], "rhs", chunk, size)
                else:
                    lhs = self._chunk(self.lhs[k], "lhs", chunk, size)
                part = self._dot(lhs, rhs)
                if letter not in self.einsum.out:
                    results[k] = results.get(k, 0) + part
                    continue
                dim = self.einsum.out.index(letter)
                parts = results.setdefault(k, [None] * n)
                assert parts[chunk] is None
                parts[chunk] = part
                if hop == n - 1:
                    results[k] = np.concatenate(parts, dim)
            shards = self._hop(shards)
        return results

    def _scatter_ring(self) -> dict:
        axis, n, letter = self.layout.ring.axis, self.layout.ring.axis_size, self.layout.letter
        sums: dict = {}
        for hop in range(n):
            sums = self._hop(sums) if sums else sums
            for d in devices(self.sizes):
                k, chunk = key(d), ring.chunk_at(d[axis], hop + 1, n)
                parts = []
                for side, array in (("lhs", self.lhs[k]), ("rhs", self.rhs[k])):
                    letters = self.einsum.side(side)  # type: ignore[arg-type]
                    size = array.shape[letters.index(letter)] // n if letter in letters else 0
                    parts.append(self._chunk(array, side, chunk, size))
                sums[k] = sums.get(k, 0) + self._dot(*parts)
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
        fates.append(f"{ringed.motion.kind} with {len(layout.others)} others")
    return fates


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
        fates.update(check(Matmul(einsum, *sides, ITEMSIZE, {"x": 2, "y": 2})))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    expected = {f"{kind} with {n} others" for kind in kinds for n in (0, 1)}
    assert set(fates) == expected | {"refused"}


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
