"""The orders of `rings/orders.py` are played by hand: every rank is an entry of a list."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.passes.rings import orders
from jaxoverlap.passes.rings.orders import chunk_at, gather_steps, permutation, scatter_steps
from jaxoverlap.plan.plan import Style, Variant

SIZES = range(1, 10)
RINGS: tuple[Style, ...] = ("one_way", "two_way", "direct")
every = pytest.mark.parametrize("size", SIZES)
styles = pytest.mark.parametrize("style", RINGS)


def permute(held: list, size: int, shift: int) -> list:
    """Return what each rank holds after one permute; every rank must receive exactly one thing."""
    arrived: dict[int, object] = {}
    for source, target in permutation(size, shift):
        assert target not in arrived
        arrived[target] = held[source]
    return [arrived[rank] for rank in range(size)]


@every
def test_permutes_by_one_lead_round_all_ranks(size: int):
    target = dict(permutation(size, 1))
    path, at = [], 0
    while at not in path:
        path.append(at)
        at = target[at]
    assert at == 0
    assert sorted(path) == list(range(size))


@pytest.mark.parametrize("size", [2, 5, 8])
def test_ranks_may_be_of_any_kind_of_integer(size: int):
    ranks = np.arange(size)
    assert chunk_at(ranks, size - 1, size).tolist() == [(r + 1) % size for r in range(size)]
    assert chunk_at(ranks, -1, size).tolist() == [(r + 1) % size for r in range(size)]


@every
@styles
def test_a_gather_has_each_chunk_once_and_before_it_is_wanted(style: Style, size: int):
    held = {0: list(range(size))}  # by what a rank calls it: the chunks that the ranks have
    seen: list[list[int]] = [[] for _ in range(size)]
    hops = 0
    for step in gather_steps(style, size):
        for rank, chunk in enumerate(held[step.back]):
            assert chunk == chunk_at(rank, step.back, size)
            seen[rank].append(chunk)
        for send in step.sends:
            assert send.arrives_as not in held, "sent twice"
            held[send.arrives_as] = permute(held[send.back], size, send.shift)
            hops += 1
    assert hops == orders.num_hops(Variant(style), size)
    for rank in range(size):
        assert seen[rank][0] == rank, "the own chunk is first"
        assert sorted(seen[rank]) == list(range(size))


@every
@styles
def test_a_scatter_ends_with_the_whole_sum_of_its_own_chunk(style: Style, size: int):
    steps = scatter_steps(style, size)
    arrived: dict[int, list[tuple[int, set[int]]]] = {}  # by step: chunk, and whose products
    kept: list[set[int]] = [set() for _ in range(size)]
    multiplied: list[list[int]] = [[] for _ in range(size)]
    for i, step in enumerate(steps):
        sums = []
        for rank in range(size):
            chunk, summed = chunk_at(rank, step.back, size), {rank}
            multiplied[rank].append(chunk)
            for joined in step.joins:
                arriving, ranks = arrived[joined][rank]
                assert arriving == chunk
                assert not ranks & summed
                summed |= ranks
            for keeping in step.keeps:
                arriving, ranks = arrived[keeping][rank]
                assert arriving == rank, "only the owner keeps a sum"
                assert not ranks & kept[rank]
                kept[rank] |= ranks
            sums.append((chunk, summed))
        for used in (*step.joins, *step.keeps):
            del arrived[used]
        if step.shift:
            arrived[i] = permute(sums, size, step.shift)
        assert bool(step.shift) == (i < len(steps) - 1), "only the last sum stays"
    assert not arrived, "a sum that nobody added"
    for rank, (chunk, summed) in enumerate(sums):
        assert chunk == rank == multiplied[rank][-1], "the own chunk is last"
        assert sorted([*summed, *kept[rank]]) == list(range(size))
        assert sorted(multiplied[rank]) == list(range(size))


@every
def test_two_ways_are_half_as_long(size: int):
    """Each of the two rings has ceil((N - 1) / 2) hops, less one to the left where N is even."""
    for shifts in (
        [send.shift for step in gather_steps("two_way", size) for send in step.sends],
        [step.shift for step in scatter_steps("two_way", size)[:-1]],
    ):
        assert (shifts.count(1), shifts.count(-1)) == (size // 2, (size - 1) // 2)
        assert set(shifts) <= {1, -1}


# -- closed forms ---------------------------------------------------------------------------------


def gather_lives(style: Style, n: int, m: int) -> Iterator[int]:
    """Count the pieces alive in each matmul of a gather: written by hops, and not yet read."""
    steps = gather_steps(style, n)
    turn = {step.back: i for i, step in enumerate(steps)}
    sent = {s.arrives_as: i for i, step in enumerate(steps) for s in step.sends}
    for now in range(n * m):
        arrivals = [(sent[b] * m + j, turn[b] * m + j) for b in sent for j in range(m)]
        yield sum(first <= now <= last for first, last in arrivals)


def scatter_lives(style: Style, n: int, m: int, *, count_own: bool) -> Iterator[int]:
    """Count the pieces alive in each matmul of a scatter: both ends of a hop, and the product."""
    steps = scatter_steps(style, n)
    added = {s: i for i, step in enumerate(steps) for s in (*step.joins, *step.keeps)}
    for now in range(n * m):
        flights = [(s * m + j + 1, added[s] * m + j) for s in added for j in range(m)]
        own = max(0, now - (n - 1) * m + 1)  # what there is of the result
        product = (own if count_own else 0) if own else 1
        yield 2 * sum(first <= now <= last for first, last in flights) + product


def exchange_lives(n: int, m: int) -> Iterator[int]:
    """Count a gather's pieces, and the slice that each hop reads, until it surely has arrived."""
    for now in range(n * m):
        sources = [(i * m + j, (i + 1) * m + j - 1) for i in range(n - 1) for j in range(m)]
        copies = sum(first <= now <= last for first, last in sources)
        arrivals = [(i * m + j, (i + 1) * m + j) for i in range(n - 1) for j in range(m)]
        yield copies + sum(first <= now <= last for first, last in arrivals)


@given(st.sampled_from(RINGS), st.integers(2, 12), st.integers(1, 4))
def test_peak_bytes_are_those_of_the_order(style: Style, n: int, m: int):
    chunk_bytes, variant = 64 * m, Variant(style, m)

    def peak(collective):
        return orders.peak_bytes(collective, variant, n, chunk_bytes) * m // chunk_bytes

    assert peak("all_gather") == max(gather_lives(style, n, m))
    assert peak("reduce_scatter") == max(scatter_lives(style, n, m, count_own=False))
    assert peak("all_reduce") == max(scatter_lives(style, n, m, count_own=True))
    if style == "direct":
        assert peak("all_to_all") == max(exchange_lives(n, m))


@given(st.integers(2, 12), st.integers(2, 8))
def test_slices_of_the_whole_need_less_the_more_there_are(n: int, m: int):
    for collective, at_once in (("all_gather", 2), ("reduce_scatter", 2), ("all_to_all", 3)):
        peak = orders.peak_bytes(collective, Variant("sliced", m), n, 64 * m)  # type: ignore[arg-type]
        assert peak == at_once * n * 64
    assert orders.num_hops(Variant("sliced", m), n) == m


def test_one_device_sends_and_holds_nothing():
    for style in RINGS:
        assert orders.num_hops(Variant(style, 2), 1) == 0
        assert orders.peak_bytes("all_reduce", Variant(style, 2), 1, 64) == 0
    assert orders.bytes_sent("all_reduce", 1, 64) == 0


def test_bytes_of_known_collectives():
    # Eight devices, shards of 1 KiB: seven go out; an all-reduce sends them twice.
    assert orders.bytes_sent("all_gather", 8, 1024) == 7 * 1024
    assert orders.bytes_sent("reduce_scatter", 8, 1024) == 7 * 1024
    assert orders.bytes_sent("all_reduce", 8, 1024) == 14 * 1024
    # Each device has 8 KiB of a whole of 64 KiB, and sends all but one eighth of them.
    assert orders.bytes_sent("all_to_all", 8, 1024) == (64 - 8) * 1024 // 8
