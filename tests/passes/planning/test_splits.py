"""The sharding algebra agrees with numpy: what a split says is what a matmul needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from jaxoverlap.passes.analysis.einsum import LETTERS, SIDES, Einsum, einsum_of
from jaxoverlap.passes.planning.splits import (
    ImpliedCollective,
    Refusal,
    ShardedMatmul,
    Split,
    split,
)
from tests.support.splits import along, block, devices, einsums, key, one_axis, operands, spec_of

# -- a mesh of numpy arrays ----------------------------------------------------------------------


# -- letters ------------------------------------------------------------------------------------


@st.composite
def dimension_numbers(draw):
    """Draw any dimension numbers of dot_general with shapes that fit them."""
    shared, batch = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    lhs_order = draw(st.permutations(range(shared + batch + left)))
    rhs_order = draw(st.permutations(range(shared + batch + right)))
    numbers = (
        (tuple(lhs_order[:shared]), tuple(rhs_order[:shared])),
        (tuple(lhs_order[shared : shared + batch]), tuple(rhs_order[shared : shared + batch])),
    )
    lhs_shape = [draw(st.integers(1, 3)) for _ in lhs_order]
    rhs_shape = [draw(st.integers(1, 3)) for _ in rhs_order]
    for lhs_dims, rhs_dims in numbers:
        for left_dim, right_dim in zip(lhs_dims, rhs_dims, strict=True):
            rhs_shape[right_dim] = lhs_shape[left_dim]
    return numbers, tuple(lhs_shape), tuple(rhs_shape)


def dot_general(numbers, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Do what `lax.dot_general` documents: batch dims, then left free, then right free."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    left = [d for d in range(lhs.ndim) if d not in (*lhs_contract, *lhs_batch)]
    right = [d for d in range(rhs.ndim) if d not in (*rhs_contract, *rhs_batch)]
    lhs = lhs.transpose(*lhs_batch, *left, *lhs_contract)
    rhs = rhs.transpose(*rhs_batch, *right, *rhs_contract)
    b, k = len(lhs_batch), len(lhs_contract)
    batch, summed = lhs.shape[:b], lhs.shape[lhs.ndim - k :]
    lhs_free, rhs_free = lhs.shape[b : lhs.ndim - k], rhs.shape[b : rhs.ndim - k]
    # @ on three dims: all batch dims in one, all free ones in one, all contracted ones in one.
    flat = lhs.reshape(math.prod(batch), -1, math.prod(summed)) @ rhs.reshape(
        math.prod(batch), -1, math.prod(summed)
    ).transpose(0, 2, 1)
    return flat.reshape((*batch, *lhs_free, *rhs_free))


@settings(max_examples=150, deadline=None)
@given(dimension_numbers())
def test_einsum_of_computes_what_dot_general_computes(drawn):
    numbers, lhs_shape, rhs_shape = drawn
    einsum = einsum_of(numbers, lhs_shape, rhs_shape)
    assert tuple(einsum.sizes[c] for c in einsum.lhs) == lhs_shape
    assert tuple(einsum.sizes[c] for c in einsum.rhs) == rhs_shape
    lhs, rhs, out = operands(einsum)
    np.testing.assert_array_equal(out, dot_general(numbers, lhs, rhs))


def test_letters_of_an_attention_matmul():
    # bsnh,btnh->bnst: batch (b, n), contracted h
    einsum = einsum_of((((3,), (3,)), ((0, 2), (0, 2))), (2, 16, 4, 8), (2, 32, 4, 8))
    assert str(einsum) == "abcd,aecd->acbe"
    assert einsum.sizes == {"a": 2, "b": 16, "c": 4, "d": 8, "e": 32}
    assert [einsum.role(c) for c in "acdbe"] == [
        "batch",
        "batch",
        "contracted",
        "lhs free",
        "rhs free",
    ]
    assert [einsum.side(s) for s in ("lhs", "rhs", "out")] == ["abcd", "aecd", "acbe"]


def test_a_matmul_may_have_as_many_dims_as_there_are_letters():
    most = len(LETTERS) // 2
    batch = tuple(range(most))
    numbers = (((), ()), (batch, batch))
    einsum = einsum_of(numbers, (1,) * most, (1,) * most)
    assert einsum.out == einsum.lhs == einsum.rhs
    assert len(einsum.sizes) == most
    problem = rf"{most} and {most + 1} dims has more dims than.*\({len(LETTERS)}\).*reshape"
    with pytest.raises(ValueError, match=problem):
        einsum_of(numbers, (1,) * most, (1,) * (most + 1))


# -- the classical cases ------------------------------------------------------------------------
# a: sequence (rows), b: contracted, c: columns. x @ w -> y, bfloat16, 8 devices unless said.

ROWS, INNER, COLUMNS = 64, 32, 16
MATMUL = Einsum("ab", "bc", "ac", {"a": ROWS, "b": INNER, "c": COLUMNS})


def of(lhs: str | None, rhs: str | None, out: str | None, n: int = 8) -> Split | Refusal:
    return split(one_axis(MATMUL, lhs, rhs, out, n), "x")


def test_sequence_parallel_to_column_parallel_gathers_the_rows():
    moved = (ROWS // 8) * INNER * 2 * 7  # seven hops of a shard of bfloat16
    collective = ImpliedCollective("all_gather", "lhs", "a", moved)
    assert of("a", "c", "c") == Split("x", 8, "a", "c", "c", collective)


def test_an_fsdp_weight_is_gathered_along_its_contracted_dim():
    moved = (INNER // 8) * COLUMNS * 2 * 7
    collective = ImpliedCollective("all_gather", "rhs", "b", moved)
    assert of("a", "b", "a") == Split("x", 8, "a", "b", "a", collective)


def test_an_fsdp_weight_may_be_sharded_on_its_columns():
    moved = INNER * (COLUMNS // 8) * 2 * 7
    collective = ImpliedCollective("all_gather", "rhs", "c", moved)
    assert of("a", "c", "a") == Split("x", 8, "a", "c", "a", collective)


def test_row_parallel_to_sequence_parallel_scatters_the_sums():
    moved = (ROWS // 8) * COLUMNS * 2 * 7
    collective = ImpliedCollective("reduce_scatter", "out", "a", moved)
    assert of("b", "b", "a") == Split("x", 8, "b", "b", "a", collective)


def test_row_parallel_alone_sums_on_all_devices():
    moved = ROWS * COLUMNS * 2 // 8 * 7 * 2  # a scatter and a gather
    collective = ImpliedCollective("all_reduce", "out", "b", moved)
    assert of("b", "b", None) == Split("x", 8, "b", "b", None, collective)


def test_a_sequence_sharded_weight_gradient_gathers_a_contracted_dim():
    # dy: [s, f/N] and x: [s/N, d] give dw: [f/N, d]; in letters a,b over s=b.
    einsum = Einsum("ba", "bc", "ac", {"a": 16, "b": 64, "c": 32})
    got = split(one_axis(einsum, "a", "b", "a", 4), "x")
    collective = ImpliedCollective("all_gather", "rhs", "b", (64 // 4) * 32 * 2 * 3)
    assert got == Split("x", 4, "a", "b", "a", collective)


def test_an_fsdp_weight_gradient_is_scattered():
    # x: [b/N, d] and dy: [b/N, f] give dw: [d/N, f], summed over the batch.
    einsum = Einsum("ba", "bc", "ac", {"a": 32, "b": 64, "c": 16})
    got = split(one_axis(einsum, "b", "b", "a", 4, (2, 2, 4)), "x")
    collective = ImpliedCollective("reduce_scatter", "out", "a", (32 // 4) * 16 * 4 * 3)
    assert got == Split("x", 4, "b", "b", "a", collective)


def test_a_data_parallel_gradient_is_reduced():
    einsum = Einsum("ba", "bc", "ac", {"a": 32, "b": 64, "c": 16})
    got = split(one_axis(einsum, "b", "b", None, 4, (2, 2, 4)), "x")
    collective = ImpliedCollective("all_reduce", "out", "b", 2 * 32 * 16 * 4 * 3 // 4)
    assert got == Split("x", 4, "b", "b", None, collective)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out"),
    [("a", None, "a"), (None, "c", "c")],
    ids=["batch-sharded", "column-parallel"],
)
def test_free_dims_split_without_a_word(lhs, rhs, out):
    assert of(lhs, rhs, out) == Split("x", 8, lhs, rhs, out, None)


def test_head_sharded_attention_is_local():
    einsum = Einsum("bsnh", "btnh", "bnst", {"b": 2, "s": 16, "n": 8, "h": 4, "t": 16})
    got = split(one_axis(einsum, "n", "n", "n", 8), "x")
    assert got == Split("x", 8, "n", "n", "n", None)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "sliced"),
    [
        (None, None, "a", ("a", None, "a")),
        (None, None, "c", (None, "c", "c")),
    ],
)
def test_a_whole_operand_is_sliced_for_nothing(lhs, rhs, out, sliced):
    assert of(lhs, rhs, out) == Split("x", 8, *sliced, None)


def test_a_whole_operand_is_sliced_to_meet_a_sharded_one():
    sizes = {"a": 64, "b": 32, "c": 2}  # a narrow result: its sums are the least to send
    got = split(one_axis(Einsum("ab", "bc", "ac", sizes), "b", None, "a", 8), "x")
    collective = ImpliedCollective("reduce_scatter", "out", "a", (64 // 8) * 2 * 2 * 7)
    assert got == Split("x", 8, "b", "b", "a", collective)


def test_an_operand_is_exchanged_where_that_sends_less_than_the_sums():
    collective = ImpliedCollective(
        "all_to_all", "lhs", "b", (ROWS // 8) * (INNER // 8) * 2 * 7, to="a"
    )
    assert of("b", None, "a") == Split("x", 8, "b", None, "a", collective)


def test_a_batch_dim_that_one_operand_has_whole_is_sliced():
    einsum = Einsum("abc", "acd", "abd", {"a": 8, "b": 4, "c": 4, "d": 4})
    assert split(one_axis(einsum, "a", None, "a", 8), "x") == Split("x", 8, "a", "a", "a", None)


def test_a_result_that_must_be_gathered_is_refused():
    got = of("a", None, None)
    assert isinstance(got, Refusal)
    assert got.axis == "x"
    assert got.reason == "x wants gather of out dim a: no ring for that"


def test_a_result_is_exchanged():
    # All have their part of the batch; the result is wanted split along what is free.
    einsum = Einsum("ab", "ac", "abc", {"a": 8, "b": 8, "c": 8})
    collective = ImpliedCollective("all_to_all", "out", "a", 8 * 2 * 7, to="b")
    got = split(one_axis(einsum, "a", "a", "b", 8), "x")
    assert got == Split("x", 8, "a", "a", "b", collective)


def test_heads_for_sequence_are_exchanged():
    # Ulysses, on the way back: heads are whole for the projection, which has the sequence split.
    einsum = Einsum("bsnh", "nhd", "bsd", {"b": 2, "s": 16, "n": 8, "h": 4, "d": 64})
    collective = ImpliedCollective(
        "all_to_all", "lhs", "n", 2 * (16 // 4) * (8 // 4) * 4 * 2 * 3, to="s"
    )
    got = split(one_axis(einsum, "n", None, "s", 4), "x")
    assert got == Split("x", 4, "n", None, "s", collective)


def refused(a: int, b: int, c: int) -> Refusal:
    """Refuse x of 8 devices on lhs's contracted dim, rhs's columns and the result's rows."""
    refusal = split(
        one_axis(Einsum("ab", "bc", "ac", {"a": a, "b": b, "c": c}), "b", "c", "a", 8), "x"
    )
    assert isinstance(refusal, Refusal)
    return refusal


def test_two_motions_are_refused_with_what_may_come_before():
    """The operand's collective may come before, as cheaply as can be; the result's is then a ring."""
    first = ImpliedCollective("all_to_all", "rhs", "c", (64 // 8) * (8 // 8) * 2 * 7, to="b")
    reason = (
        "x wants all_to_all of rhs dim c to b and reduce_scatter of out dim a: no ring for that"
    )
    assert refused(8, 64, 8) == Refusal("x", reason, (first,))
    first = ImpliedCollective("all_gather", "lhs", "b", 8 * (32 // 8) * 2 * 7)
    reason = "x wants all_gather of lhs dim b and all_to_all of out dim c to a: no ring for that"
    assert refused(8, 32, 64) == Refusal("x", reason, (first,))


def test_of_two_operands_the_smaller_one_may_come_first():
    """The larger operand's collective can then be a ring."""
    first = ImpliedCollective("all_gather", "rhs", "c", 8 * (8 // 8) * 2 * 7)
    reason = "x wants all_to_all of lhs dim b to a and all_gather of rhs dim c: no ring for that"
    assert refused(128, 8, 8) == Refusal("x", reason, (first,))


def test_no_motion_of_an_operand_may_come_before_a_gather_of_the_result():
    assert of("a", None, None).first == ()  # type: ignore[union-attr]


def test_work_is_shared_even_where_a_gather_would_move_less():
    got = of("b", None, None)
    collective = ImpliedCollective("all_reduce", "out", "b", 2 * ROWS * COLUMNS * 2 // 8 * 7)
    assert got == Split("x", 8, "b", "b", None, collective)


def test_two_gathers_are_refused_by_name():
    einsum = Einsum("ab", "bc", "ac", {"a": 8, "b": 8, "c": 8})
    got = split(one_axis(einsum, "a", "c", None, 8), "x")
    assert isinstance(got, Refusal)
    assert " and " in got.reason


def test_an_axis_of_one_device_moves_nothing():
    matmul = ShardedMatmul(
        MATMUL, (("x", "one"), ()), ((), ("x",)), ((), ("x",)), (2, 2, 2), {"one": 1, "x": 8}
    )
    assert matmul.axes() == ("x",)
    (only,) = matmul.splits
    assert only == of("a", "c", "c")


def test_an_axis_that_shards_nothing_is_not_asked():
    matmul = ShardedMatmul(
        MATMUL, ((), ()), ((), ("x",)), ((), ("x",)), (2, 2, 2), {"y": 4, "x": 8}
    )
    assert [s.axis for s in matmul.splits] == ["x"]


def test_axes_are_asked_in_the_order_of_the_mesh():
    lhs, rhs, out = (("x",), ("y",)), (("y",), ()), (("x",), ())
    for sizes in ({"x": 2, "y": 4}, {"y": 4, "x": 2}):
        got = ShardedMatmul(MATMUL, lhs, rhs, out, (2, 2, 2), sizes).splits
        assert [s.axis for s in got] == list(sizes)


def test_other_axes_make_less_to_move():
    # The gathered rows hold half of the contracted dim each: y shards it.
    matmul = ShardedMatmul(
        MATMUL,
        lhs=(("x",), ("y",)),
        rhs=(("y",), ("x",)),
        out=((), ("x",)),
        itemsize=(2, 4, 8),
        axis_sizes={"x": 4, "y": 2},
    )
    gather, reduce = matmul.splits
    assert isinstance(gather, Split) and isinstance(reduce, Split)
    assert gather.collective == ImpliedCollective(
        "all_gather", "lhs", "a", 3 * (ROWS // 4) * (INNER // 2) * 2
    )
    assert reduce.collective == ImpliedCollective(
        "all_reduce", "out", "b", 2 * ROWS * (COLUMNS // 4) * 8 // 2
    )


# -- exactness ----------------------------------------------------------------------------------


def simulate(matmul: ShardedMatmul, split_x: Split) -> tuple[dict, int]:
    """Do what a split says, on numpy arrays: every device's result, and the bytes it sent."""
    einsum, n = matmul.einsum, split_x.axis_size
    lhs, rhs, _ = operands(einsum)
    sides: dict[str, dict] = {"lhs": {}, "rhs": {}}
    for device in devices(matmul.axis_sizes):
        for side, whole in (("lhs", lhs), ("rhs", rhs)):
            letters = einsum.side(side)
            assert matmul.letter_of(side, "x") in (None, split_x.letter_on(side)), (
                "moved without a collective"
            )
            spec = spec_of(letters, split_x.letter_on(side))
            sides[side][key(device)] = whole[block(whole.shape, spec, device, matmul.axis_sizes)]
    collective, group = split_x.collective, along("x", {"x": 0}, n)
    sent = 0
    if collective and collective.side != "out":
        sides[collective.side], sent = moved(matmul, collective, sides[collective.side])
    results = {k: np.einsum(str(einsum), sides["lhs"][k], sides["rhs"][k]) for k in group}
    if collective and collective.kind == "all_to_all" and collective.side == "out":
        results, sent = moved(matmul, collective, results)
    elif collective and collective.side == "out":
        total = np.sum(list(results.values()), axis=0)
        hop = total.size * matmul.itemsize[2] / n  # a ring sends an n-th of the sums at a time
        if collective.kind == "reduce_scatter":
            parts = np.split(total, n, einsum.out.index(collective.letter))
            results = dict(zip(group, parts, strict=True))
            sent = (n - 1) * hop
        else:
            results = {k: total for k in group}
            sent = 2 * (n - 1) * hop
    return results, int(sent)


def moved(
    matmul: ShardedMatmul, collective: ImpliedCollective, blocks: Mapping
) -> tuple[dict, int]:
    """Gather or exchange the blocks of one side; count the bytes that each device sent."""
    n = matmul.axis_sizes["x"]
    letters, itemsize = (
        matmul.einsum.side(collective.side),
        matmul.itemsize[SIDES.index(collective.side)],
    )
    group, dim = along("x", {"x": 0}, n), letters.index(collective.letter)
    if collective.kind == "all_gather":
        whole = np.concatenate([blocks[k] for k in group], dim)
        return {k: whole for k in group}, (n - 1) * blocks[group[0]].size * itemsize
    assert collective.kind == "all_to_all" and collective.to not in (None, collective.letter)
    parts = {k: np.split(blocks[k], n, letters.index(collective.to)) for k in group}
    got = {k: np.concatenate([parts[g][i] for g in group], dim) for i, k in enumerate(group)}
    return got, sum(p.size for p in parts[group[0]][1:]) * itemsize


@st.composite
def one_axis_matmuls(draw) -> ShardedMatmul:
    einsum = draw(einsums())
    assume(einsum.sizes)
    held = [draw(st.sampled_from([None, *einsum.side(side)])) for side in ("lhs", "rhs", "out")]
    n = draw(st.sampled_from([2, 4]))
    return one_axis(einsum, *held, n, draw(st.tuples(*[st.sampled_from([2, 4, 8])] * 3)))


@settings(max_examples=400, deadline=None)
@given(one_axis_matmuls())
@example(one_axis(MATMUL, "a", "c", "c", 4))
@example(one_axis(MATMUL, "b", None, "a", 4))
@example(one_axis(Einsum("ab", "ac", "abc", {"a": 8, "b": 8, "c": 8}), "a", "a", "b", 4))
@example(one_axis(MATMUL, "b", "b", None, 2, (2, 2, 4)))
def test_a_split_computes_the_matmul(matmul: ShardedMatmul):
    for split_x in matmul.splits:
        if isinstance(split_x, Refusal):
            event("refused")
            continue
        event(split_x.collective.kind if split_x.collective else "local")
        check(matmul, split_x)


def check(matmul: ShardedMatmul, split_x: Split) -> None:
    """Check that a split computes the matmul, and sends as many bytes as it says."""
    results, sent = simulate(matmul, split_x)
    assert sent == (split_x.collective.bytes_moved if split_x.collective else 0)
    _, _, whole = operands(matmul.einsum)
    for device in devices(matmul.axis_sizes):
        wanted = whole[block(whole.shape, matmul.out, device, matmul.axis_sizes)]
        np.testing.assert_array_equal(results[key(device)], wanted)


@settings(max_examples=400, deadline=None)
@given(one_axis_matmuls())
@example(one_axis(MATMUL, "b", "c", "a", 4))
@example(one_axis(MATMUL, "a", "c", None, 4))
def test_what_may_come_before_leaves_a_split_that_computes_the_matmul(matmul: ShardedMatmul):
    """Only a gather of the result itself may be left over."""
    (refusal,) = matmul.splits or (None,)
    assume(isinstance(refusal, Refusal))
    assert isinstance(refusal, Refusal)
    for collective in refusal.first:
        assert collective.side != "out"
        held = matmul.letter_of(collective.side, "x")
        assert held == collective.letter
        letters = matmul.einsum.side(collective.side)
        whole = operands(matmul.einsum)[SIDES.index(collective.side)]
        before, after = spec_of(letters, held), spec_of(letters, collective.to)
        at = {key(d): d for d in devices(matmul.axis_sizes)}
        blocks = {k: whole[block(whole.shape, before, d, matmul.axis_sizes)] for k, d in at.items()}
        blocks, sent = moved(matmul, collective, blocks)
        assert sent == collective.bytes_moved
        for k, d in at.items():
            wanted = whole[block(whole.shape, after, d, matmul.axis_sizes)]
            np.testing.assert_array_equal(blocks[k], wanted)
        matmul = replace(matmul, **{collective.side: after})
    for left in matmul.splits:
        if isinstance(left, Refusal):
            event("the result must be gathered")
            assert "gather of out" in left.reason
        else:
            event(
                f"{len(refusal.first)} before, then {left.collective.kind if left.collective else 'local'}"
            )
            check(matmul, left)


@settings(max_examples=200, deadline=None)
@given(one_axis_matmuls())
def test_no_motion_is_paid_for_where_none_is_needed(matmul: ShardedMatmul):
    """A dim that lets all devices work without communication is taken."""
    for split_x in matmul.splits:
        local = any(
            all(
                matmul.letter_of(side, "x") in (None, c if c in matmul.einsum.side(side) else None)
                for side in ("lhs", "rhs")
            )
            and matmul.letter_of("out", "x") == c
            for c in matmul.einsum.out
        )
        assert local == (isinstance(split_x, Split) and split_x.collective is None)
