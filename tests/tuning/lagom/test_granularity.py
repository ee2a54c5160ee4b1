"""The model says how finely to cut rings; arithmetic by hand gives the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jaxoverlap.cost.groups import Group
from jaxoverlap.plan.plan import Plan, Variant
from jaxoverlap.simulation.timeline import COMPUTE, Event, Timeline
from jaxoverlap.tuning.lagom.granularity import GranularityModel, granularity, site_of
from jaxoverlap.tuning.lagom.search import search
from tests.support.planned_rings import GATHER, H100, SCATTER, SUM, ring_of

COPIES = Group(8, by_copy=True)
RULES = Plan(step="step", mesh={"model": 8}, entries=())
PLAIN, RING, FINER = Variant("plain"), Variant(), Variant("one_way", 2)


def modelled(*rows: int, specs=GATHER, compute_s: float = 0.0) -> GranularityModel:
    """Return the model of matmuls of so many rows, beside kernels that take so long."""
    sites = [site_of(ring_of(specs, n), f"gpt.py:{i}", COPIES) for i, n in enumerate(rows)]
    sites = [replace(site, number=i) for i, site in enumerate(sites)]
    kernel = Event(COMPUTE, "memory", "fusion", "main", 0.0, compute_s, compute_s, 1)
    return granularity(sites, RULES, Timeline("step", compute_s, (kernel,), ()), H100)


def test_a_site_knows_its_ways():
    site = site_of(ring_of(GATHER, 32768), "gpt.py:1", COPIES)
    assert {n: str(v) for n, v in site.variants.items()} == {
        **{1: "plain", 2: "sliced x 2", 4: "sliced x 4"},
        **{8: "one_way", 16: "one_way x 2"},
    }
    assert all(site.pieces(variant) == n for n, variant in site.variants.items())
    odd = site_of(ring_of(GATHER, 24), "gpt.py:1", COPIES)  # three rows a device
    assert set(odd.variants) == {1, 8}


@pytest.mark.parametrize("specs", [GATHER, SCATTER, SUM])
def test_a_ring_is_hops_and_shows_none_and_slices_show_one(specs):
    c = site_of(ring_of(specs, 32768), "gpt.py:1", COPIES).communication
    count, (kind, sent, group) = c.sent(16)
    assert (count, kind, group.size) == (14, "collective-permute", 2) and group.by_copy
    assert count * sent == c.bytes_moved and c.exposed_share(16) == 0.0
    assert c.sent(4) == (4, (c.kind, c.bytes_moved // 4, COPIES)) and c.exposed_share(4) == 0.25


def test_h_is_computation_added_for_each_second_that_no_longer_waits():
    model = modelled(32768)
    gather_s = H100.collective_s("all-gather", 7 * 4096 * 8192 * 2, Group(8))
    chunk_s = H100.matmul_s(4096, 1024, 8192) + H100.memory_s(2 * 4096 * 1024 * 2)
    added_s = 8 * chunk_s - H100.matmul_s(32768, 1024, 8192)
    h = model.lost_per_second(0, PLAIN, RING, gather_s)
    assert h == pytest.approx(added_s / gather_s)
    assert model.lost_per_second(0, PLAIN, FINER, gather_s) > h  # smaller chunks lose more
    assert model.lost_per_second(0, RING, Variant("two_way"), 1e-3) == 0.0
    assert model.lost_per_second(0, RING, PLAIN, gather_s / 2) == math.inf  # it would wait longer
    assert model.lost_per_second(7, PLAIN, RING, 1.0) == math.inf  # no site of it


def test_large_matmuls_are_cut_and_small_ones_are_not():
    first, *_ = modelled(65536, 64).plans(3)
    assert first[0] != PLAIN and first[1] == PLAIN


def test_plans_differ_and_the_best_is_the_searchs():
    model = modelled(32768, 65536, 8192, compute_s=2e-3)
    assert model.problem
    solution, plans = search(model.problem), model.plans(3)
    places = solution.config[: len(model.sites)]
    assert plans[0] == {
        site.number: site.variants[site.communication.space.setting(place)[1]]
        for site, place in zip(model.sites, places, strict=True)
    }
    assert len(plans) == 3 and all(a != b for a in plans for b in plans if a is not b)


def test_the_rest_of_the_step_is_as_long_as_the_schedule_says():
    model = modelled(32768, 65536, compute_s=0.1)
    p = model.problem
    assert p and sum(p.alone_s(i) for i in range(4)) == pytest.approx(0.1, rel=1e-3)


def test_a_step_without_sites_has_no_plans():
    empty = granularity((), RULES, Timeline("step", 1.0, (), ()), H100)
    assert empty.plans(3) == [] and empty.lost_per_second(1, RING, FINER, 1.0) == math.inf


def test_channels_are_not_the_hops_to_have():
    """NCCL gives a hop its own channels, few on a host of eight: the search must not give it more."""
    site = site_of(ring_of(GATHER, 32768), "gpt.py:1", Group(8))
    p = granularity([site], RULES, Timeline("step", 0.0, (), ()), H100).problem
    assert p
    counts, rings = site.communication.space.counts, (0, 0, [*sorted(site.variants)].index(8))
    (seconds,) = {p.seconds(0, (place, *rings)) for place in range(len(counts))}
    hop_s = H100.collective_s("collective-permute", 4096 * 8192 * 2, Group(2))
    assert seconds == pytest.approx(7 * hop_s)
