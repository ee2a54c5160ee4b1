"""Pictures show what is in the timeline."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jaxoverlap.simulation import report
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.report.unroll import folded_s, tree, unrolled
from jaxoverlap.simulation.timeline import COMPUTE, Event, Timeline
from tests.support.clock import clock
from tests.support.steps import (
    BODY,
    FAR,
    INNER,
    computation,
    copy,
    done,
    gemm,
    hop,
    loop,
    module,
    sync,
)

OUTER = computation("%outer", gemm("o"), loop(3, body="inner"), sync("h"))


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Replay a loop in a loop, a loop with a collective around it, and some more."""
    lines = (copy("c"), loop(2, "l", "outer"), hop("s", 1, FAR), loop(5, "m"), done("s"), gemm("z"))
    return replay(module(*lines, before=BODY + INNER + OUTER), clock(sms=1))


def total(events: list[Event], kind: str) -> float:
    return sum(e.end_s - e.start_s for e in events if e.kind == kind)


def test_unrolled_events_fill_the_step(timeline: Timeline):
    events = list(unrolled(timeline))
    assert len(events) == sum(e.runs for e in timeline.events)
    assert total(events, "wait") == pytest.approx(timeline.exposed_s)
    assert total(events, "collective") == pytest.approx(timeline.communication_s)
    compute = [e for e in events if e.lane == COMPUTE]
    ends = [0.0, *(e.end_s for e in compute)]
    assert [e.start_s for e in compute] == pytest.approx(ends[:-1])  # no gap, no overlap
    assert ends[-1] == pytest.approx(timeline.step_s)


def test_the_tree_has_every_event_once(timeline: Timeline):
    def events(items) -> list[Event]:
        return [
            e for item in items for e in ([item] if isinstance(item, Event) else events(item.items))
        ]

    assert sorted(map(id, events(tree(timeline)))) == sorted(map(id, timeline.events))


def test_folded_times_leave_out_the_copies(timeline: Timeline):
    copies = sum(r.period_s * (r.times - 1) for r in timeline.repeats)
    # The inner loop's copies are cut out of the outer's first iteration only.
    assert folded_s(timeline, timeline.step_s) == pytest.approx(timeline.step_s - copies)
    times = [folded_s(timeline, timeline.step_s * n / 100) for n in range(101)]
    assert times == sorted(times)
    for r in timeline.repeats:
        first = folded_s(timeline, r.start_s + r.period_s)
        assert folded_s(timeline, r.start_s + r.period_s * r.times) == pytest.approx(first)


def test_a_trace_for_perfetto(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "trace.json"
    report.write_perfetto(path, {"plain": timeline, "overlapped": timeline})
    events = json.loads(path.read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == 2 * sum(e.runs for e in timeline.events)
    assert {e["pid"] for e in drawn} == {0, 1}
    exposed = sum(e["dur"] for e in drawn if e["name"].startswith("exposed: ") and e["pid"] == 1)
    assert exposed == pytest.approx(timeline.exposed_s * 1e6)
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"compute", "NVLink", "network"}


def test_an_svg_draws_every_event_of_both_steps(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "step.svg"
    report.write_svg(path, {"plain": timeline, "a < b": timeline})
    root = ET.parse(path).getroot()
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * len(timeline.events)
    assert any("waits for" in t for t in titles) and any("runs 6x" in t for t in titles)
    texts = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(t.startswith("a < b: step") for t in texts)
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) >= 0 and float(box.get("width", 0)) >= 0


def page_data(path: Path) -> dict:
    tag = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text())
    assert tag
    return json.loads(tag.group(1))


def played(items: list, later: float = 0.0) -> list[list]:
    """Return the events of a page's data as its script draws them, unrolled and shifted in time."""
    events = []
    for item in items:
        if len(item) == 4:
            _, period, times, inner = item
            for n in range(times):
                events += played(inner, later + n * period)
        else:
            events.append([item[0], item[1], item[2] + later, item[3] + later, *item[4:]])
    return events


def test_a_page_has_the_whole_step(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "step.html"
    report.write_page(path, {"plain": timeline, "</script>": timeline}, title="a step & its <twin>")
    data = page_data(path)
    assert [s["headline"].split(":")[0] for s in data["steps"]] == ["plain", "</script>"]
    events = played(data["steps"][0]["items"])
    assert len(events) == sum(e.runs for e in timeline.events)
    waits = [e for e in events if data["words"][e[1]] == "wait"]
    assert sum(e[3] - e[2] for e in waits) == pytest.approx(timeline.exposed_s * 1e6)
    assert max(e[3] for e in events) == pytest.approx(timeline.step_s * 1e6)
    rows = data["steps"][0]["worst"]
    assert sum(float(row[-1]) for row in rows) == pytest.approx(timeline.exposed_s * 1e3)


def test_a_page_needs_nothing_but_itself(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "step.html"
    report.write_page(path, {"step": timeline}, title="t")
    text = path.read_text()
    assert "http" not in text and "src=" not in text and "{{" not in text


def test_a_page_of_many_events_stays_small(tmp_path: Path):
    many = "".join(f"\n  {gemm(f'g{n}')}" for n in range(500))
    body = computation("%body", many.strip())
    step = replay(module(loop(2000), before=body), clock())
    assert sum(e.runs for e in step.events) == 1_000_000
    path = tmp_path / "step.html"
    report.write_page(path, {"step": step}, title="t")
    assert path.stat().st_size < 100_000
