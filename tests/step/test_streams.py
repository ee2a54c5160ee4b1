"""overlap() gives NVLink's collectives a stream of their own where that is worth it."""

from __future__ import annotations

import pytest

import jaxoverlap
from jaxoverlap.flags.required import NVLINK_STREAM, STREAMS_VARIABLE
from jaxoverlap.plan.plan import Plan
from jaxoverlap.simulation.audit import audit
from tests.support.pods import pytestmark as pods
from tests.support.two_axes import AXES, POD, two_axes

pytestmark = [*pods, pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")]

BUSY = {"rows": 16384, "wide": 4096}  # both links are busy at the same time
OPTION = NVLINK_STREAM[0].name


def explained(pod: str = POD, rows: int = 16384, wide: int = 4096, **options) -> Plan:
    step, args = two_axes(pod, rows, wide)
    return jaxoverlap.overlap(step, cluster=pod, **options).explain(*args)


def test_a_step_whose_links_are_both_busy_gets_a_second_stream():
    plan = explained()
    assert plan.xla_options[OPTION] == "scale_up_fabric"
    assert plan.price and plan.price.saved_s["streams"] > 0.01 * plan.price.step_s
    assert "Collectives over NVLink have a stream of their own: " in str(plan)


def test_a_step_that_gains_less_than_a_hundredth_keeps_one():
    plan = explained(rows=1 << 19)  # compute hides it all
    assert OPTION not in plan.xla_options
    assert "All collectives share one stream: a second one gains " in str(plan)


def test_where_nvlink_reaches_all_there_is_nothing_to_say():
    plan = explained("h100-sxm:1x16", **BUSY)
    assert "stream of their own" not in str(plan) and "one stream" not in str(plan)


def test_one_stream_may_be_asked_for(monkeypatch):
    plan = explained(streams="one")
    assert "All collectives share one stream: streams='one' is set." in plan.notes
    monkeypatch.setenv(STREAMS_VARIABLE, "one")
    forced = explained()
    assert f"All collectives share one stream: {STREAMS_VARIABLE}=one is set." in forced.notes
    assert OPTION not in plan.xla_options and OPTION not in forced.xla_options


def test_what_is_asked_for_wrongly_is_named(monkeypatch):
    with pytest.raises(ValueError, match="streams='two': expected 'auto' or 'one'"):
        jaxoverlap.overlap(lambda x: x, streams="two")  # type: ignore[arg-type]
    mesh = jaxoverlap.pod_mesh(POD, AXES)
    with pytest.raises(ValueError, match="streams='auto': expected 'one' or 'two'"):
        jaxoverlap.compiler_options(mesh, streams="auto")  # type: ignore[arg-type]
    monkeypatch.setenv(STREAMS_VARIABLE, "2")
    for ask in (explained, lambda: jaxoverlap.compiler_options(mesh, streams="two")):
        with pytest.raises(ValueError, match=f"{STREAMS_VARIABLE}=2: expected 'auto' or 'one'"):
            ask()


def test_a_plan_brings_its_streams_and_its_step_runs_on_them():
    step, args = two_axes(**BUSY)
    plan = Plan.from_json(explained(layouts=None, halves=None).to_json())
    overlapped = jaxoverlap.overlap(step, cluster=POD, plan=plan)
    with pytest.raises(ValueError, match="streams beside plan="):
        jaxoverlap.overlap(step, plan=plan, streams="one")
    assert overlapped.explain(*args).notes == plan.notes
    streams = {c.stream for c in audit(overlapped.lower(*args).compile()).collectives}
    assert {0, 3} <= streams


def test_operations_with_rules_get_it_where_they_ask(monkeypatch):
    mesh = jaxoverlap.pod_mesh(POD, AXES)
    assert jaxoverlap.compiler_options(mesh, streams="two")[OPTION] == "scale_up_fabric"
    assert OPTION not in jaxoverlap.compiler_options(mesh)
    near = jaxoverlap.pod_mesh("h100-sxm:1x8", {"model": 8})
    assert OPTION not in jaxoverlap.compiler_options(near, streams="two")
    monkeypatch.setenv(STREAMS_VARIABLE, "one")
    assert OPTION not in jaxoverlap.compiler_options(mesh, streams="two")
