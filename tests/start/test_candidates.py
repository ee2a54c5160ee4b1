"""What is worth a trial: found by the search, compiled in children where there are prices."""

from __future__ import annotations

import msgspec
import pytest

import jaxoverlap
from jaxoverlap._jax import jits
from jaxoverlap.flags.published import COMPARED
from jaxoverlap.flags.required import NVLINK_STREAM
from jaxoverlap.plan.edits import SplitBatch
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.start.candidates import Offers, few_of, offers_of
from jaxoverlap.step.options import Options
from tests.start.case import arguments, make_mesh, make_step
from tests.support.megatron import megatron
from tests.support.pods import needs_plugin

SPLIT = SplitBatch(site=0, operand=0, dim=0, parts=2, shards=1, unroll=1)


def call_of(fn, args) -> jits.Call:
    return jits.without_arrays(jaxoverlap.overlap(fn)._inferred(args, {}))


@needs_plugin
@pytest.mark.pods
def test_the_fastest_few_by_simulation_and_of_each_kind():
    mesh = jaxoverlap.pod_mesh("h100-sxm:1x8", {"tp": 8})
    call = call_of(*megatron(mesh))
    found = offers_of(call, Options(schedule=jaxoverlap.Scheduler()))
    assert not found.why
    names = [offer.name for offer in found.offers]
    assert len(names) == len(set(names)) <= 5
    assert {"overlapped", "reordered"} <= set(names) and not {*COMPARED}.isdisjoint(names)
    assert "plain" not in names
    simulated = [offer.simulated_s or 0.0 for offer in found.offers]
    assert simulated[0] == min(simulated) > 0
    streams = {setting.name for setting in NVLINK_STREAM}
    assert all(streams.isdisjoint(offer.plan.xla_options) for offer in found.offers)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Offers) == found


def test_the_fastest_of_each_kind_once():
    plan = (
        offers_of(call_of(make_step(make_mesh()), arguments(make_mesh())), Options()).offers[0].plan
    )
    split = msgspec.structs.replace(plan, edits=(SPLIT, *plan.edits))
    alone = plan.left_alone()
    rows = [
        Candidate.planned(name, planned)
        for name, planned in (
            *(("gpu-recipes", alone), ("overlapped", split), ("O1", alone)),
            *(("other rows", plan), ("reordered", alone)),
        )
    ]
    names = [row.stage for row in few_of(rows)]
    assert names == ["gpu-recipes", "overlapped", "other rows", "reordered"]
    assert [row.stage for row in few_of(rows[:1])] == ["gpu-recipes"] and few_of([]) == []


def test_without_prices_the_overlapped_step_is_offered():
    mesh = make_mesh()
    found = offers_of(call_of(make_step(mesh), arguments(mesh)), Options())
    assert [offer.name for offer in found.offers] == ["overlapped"]
    assert found.offers[0].plan.rings and found.offers[0].simulated_s is None


def test_where_nothing_changes_there_is_no_trial():
    mesh = make_mesh()
    skip = Options(skip=("case.py:*",))
    found = offers_of(call_of(make_step(mesh), arguments(mesh)), skip)
    assert not found.offers and "rewrites nothing in train_step" in found.why
