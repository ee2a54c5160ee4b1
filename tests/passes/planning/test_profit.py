"""Rings are left alone if they lose even when every hop hides."""

from __future__ import annotations

import re

import jax
import pytest

from jaxoverlap.cost.groups import Group
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.partitioned import Shardings as Read
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.independent_matmuls import IndependentMatmuls
from jaxoverlap.passes.planning.profit import RingCosts, chunk, local_sizes
from jaxoverlap.plan.plan import Decision, Skip, Variant
from tests.support.planned_rings import AXES, GATHER, H100, NVLINK, SCATTER, SUM, decided, ring_of
from tests.support.reads import NO, M
from tests.support.terms import terms_of

NETWORK = RingCosts(H100, {"model": Group(8, 8)})


@pytest.mark.parametrize("specs", [GATHER, SCATTER, SUM])
def test_a_large_matmul_is_cut_and_a_small_one_left_alone(specs):
    large, (ring,) = decided(specs, 32768)
    assert isinstance(large, Decision) and NVLINK.why_unprofitable(ring, ring.variant) == ""
    small, rings = decided(specs, 64, 512)
    assert isinstance(small, Skip) and not rings
    least, plain = re.findall(r"(\d+) µs", small.reason)
    assert small.reason.startswith("not ringed: its ") and int(least) > int(plain)


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [
        (GATHER, {"a": 1024, "b": 8192, "c": 1024}),  # all rows, an eighth of the columns
        (SCATTER, {"a": 1024, "b": 1024, "c": 8192}),  # an eighth of what is contracted
        (SUM, {"a": 1024, "b": 1024, "c": 8192}),
    ],
)
def test_a_device_does_an_eighth_of_the_work(specs, sizes: dict[str, int]):
    assert local_sizes(ring_of(specs, 1024).members[0].matmul) == sizes


def test_the_seconds_are_those_of_the_parts():
    ring = ring_of(GATHER, 32768)
    chunk_s = H100.matmul_s(4096, 1024, 8192) + H100.memory_s(2 * 4096 * 1024 * 2)
    assert NVLINK.cut_s(ring, Variant()) == pytest.approx(8 * chunk_s)
    halves_s = H100.matmul_s(2048, 1024, 8192) + H100.memory_s(2 * 2048 * 1024 * 2)
    assert NVLINK.cut_s(ring, Variant("one_way", 2)) == pytest.approx(16 * halves_s)


def test_partial_results_are_added_up_apart_where_xla_does_so():
    (member,) = ring_of(((M, NO), (M, NO), (M, NO)), 32768).members  # weights split by rows
    matmul, copied_bytes = chunk(member, 8, True)
    assert (matmul.m, matmul.n, matmul.k) == (4096, 8192, 1024)
    result_bytes = 4096 * 8192 * 2
    assert chunk(member, 8, True, adds_apart=True) == (matmul, copied_bytes + 3 * result_bytes)
    (rows,) = ring_of(GATHER, 32768).members  # each chunk has a part of the result of its own
    assert chunk(rows, 8, True, adds_apart=True) == chunk(rows, 8, True)
    assert not H100.on_cpus


def test_sums_between_hosts_are_scattered_whole_in_two_slices():
    small, _ = decided(SCATTER, 64, 512, prices=NETWORK)
    assert isinstance(small, Decision) and small.variant == Variant("sliced", 2)
    assert small.why.startswith("its hops take")
    odd, _ = decided(SCATTER, 8, 512, prices=NETWORK)
    assert isinstance(odd, Skip) and odd.left_plain
    assert isinstance(decided(GATHER, 64, 512, prices=NETWORK)[0], Skip)


def test_a_ring_that_keeps_its_value_for_others_and_dtypes_without_a_price_stay():
    ring = ring_of(GATHER, 65536, 8192, 64)  # as attention's scores: a large result of little
    assert NVLINK.why_unprofitable(ring, Variant()).startswith("its chunks take")
    ring.keep = True
    assert NVLINK.why_unprofitable(ring, Variant()) == ""
    by_nccl = RingCosts(H100, {"model": Group(8)})
    assert by_nccl.why_unprofitable(ring, Variant()).startswith("its hops take")
    assert isinstance(decided(GATHER, 64, 512, dtype="int8")[0], Decision)


def test_hops_by_nccl_are_slower_than_its_gather():
    """Hops by NCCL have four channels of 18 GB/s, not the link as copies, and take the longest."""
    ring = ring_of(GATHER, 32768)
    by_nccl = RingCosts(H100, {"model": Group(8)})
    assert by_nccl.hops_s(ring, Variant()) > 3 * NVLINK.hops_s(ring, Variant())
    assert by_nccl.why_unprofitable(ring, Variant()).startswith("its hops take")


def test_what_was_asked_for_is_done():
    entry, _ = decided(GATHER, 64, 512, granularity=Variant("two_way"))
    assert isinstance(entry, Decision) and entry.variant == Variant("two_way")


def layer(x, w, v, u, z):
    """Multiply gathered x by up, then by down; and do a matmul of their own beside these."""
    return (x @ w) @ v, u @ z


LAYER = {
    0: Read((M, NO), (NO, M), (NO, M)),
    1: Read((NO, M), (M, NO), (M, NO)),
    2: Read((NO, NO), (NO, NO), (NO, NO)),
}
BY_NCCL = RingCosts(H100, {"model": Group(8)})


def of_layer(aside: int, rows: int = 16384, **options):
    """Return the layer's bodies, entries and rings; `aside`: the size of the matmul beside them."""
    wide, own = ((8192, 8192), (8192, 8192)), ((aside, aside), (aside, aside))
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, 8192), *wide, *own)]
    step_bodies = bodies(jax.make_jaxpr(layer)(*shapes))
    entries, rings_by_body = decide(step_bodies, LAYER, terms_of(AXES, prices=BY_NCCL, **options))
    return (
        step_bodies,
        entries,
        [ring for body_rings in rings_by_body.values() for ring in body_rings.rings],
    )


def test_beside_a_collective_runs_what_neither_feeds_it_nor_waits_for_it():
    (body,), _, (gather, scatter) = of_layer(64, granularity=Variant())
    assert [d.index for d in IndependentMatmuls(body).of(gather)] == [2]
    assert [d.index for d in IndependentMatmuls(body).of(scatter)] == [2]


def test_a_gather_waits_for_what_it_moves_and_not_for_the_other_operand():
    def product(x, dy, w):
        return x @ (dy @ w)

    (body,) = bodies(jax.make_jaxpr(product)(*[jax.ShapeDtypeStruct((64, 64), "bfloat16")] * 3))
    read = {0: Read((NO, NO), (NO, M), (NO, M)), 1: Read(*GATHER)}
    _, rings_by_body = decide((body,), read, terms_of(AXES, granularity=Variant()))
    (ring,) = rings_by_body[body.index].rings
    assert ring.arrives and [d.index for d in IndependentMatmuls(body).of(ring)] == [0]


@pytest.mark.parametrize(("aside", "slices"), [(64, 4), (7168, 2)])
def test_slow_hops_go_in_slices_more_where_less_runs_beside(aside: int, slices: int):
    _, (up, down, _), _ = of_layer(aside)
    for entry in (up, down):
        assert isinstance(entry, Decision) and entry.variant == Variant("sliced", slices)
        assert entry.why.startswith("its hops take")


def test_what_can_hide_behind_another_matmul_stays_whole():
    _, entries, rings = of_layer(16384)
    assert not rings and all(isinstance(e, Skip) for e in entries)


def test_no_slices_where_cutting_costs_more_than_it_hides():
    _, small, rings = of_layer(64, rows=64)
    assert not rings and all(isinstance(e, Skip) for e in small)
    _, odd, rings = of_layer(64, rows=8 * 2047)
    assert not rings and all(isinstance(e, Skip) for e in odd)
