"""A step's seconds are unions of intervals, whatever runs side by side."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.profiling.formats.events import Device, DeviceEvent
from jaxoverlap.profiling.kinds import Classifier
from jaxoverlap.profiling.measured import DeviceStep, connected, waits
from jaxoverlap.profiling.timeline import timeline_of
from tests.profiling import synthetic

SIZE = 40
NCCL, GEMM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", "gemm"
INTERVALS = st.lists(
    st.tuples(st.sampled_from((NCCL, GEMM)), st.integers(0, SIZE), st.integers(1, SIZE)),
    max_size=12,
)


def _step(intervals) -> DeviceStep:
    events = [
        DeviceEvent(f"Stream #{n}", name, float(start), float(min(start + took, SIZE)))
        for n, (name, start, took) in enumerate(sorted(intervals, key=lambda one: one[1]))
        if start < SIZE
    ]
    return DeviceStep.from_device(
        Device("GPU 0", "", tuple(events)), (0.0, SIZE), Classifier({}, 1)
    )


def _cells(step: DeviceStep, name: str) -> np.ndarray:
    marked = np.zeros(SIZE, bool)
    for event, _ in step.events:
        if event.name == name:
            marked[int(event.start_ns) : int(event.end_ns)] = True
    return marked


@given(INTERVALS)
def test_the_parts_of_a_step(intervals):
    step = _step(intervals)
    sums, moves, works = step.sums, _cells(step, NCCL), _cells(step, GEMM)
    ns = pytest.approx
    assert sums.compute_s * 1e9 == ns(works.sum())
    assert sums.communication_s * 1e9 == ns(moves.sum())
    assert sums.exposed_s * 1e9 == ns((moves & ~works).sum())
    assert sums.overlapped_s * 1e9 == ns((moves & works).sum())
    assert sums.idle_s * 1e9 == ns((~moves & ~works).sum())
    assert sums.compute_s + sums.exposed_s + sums.idle_s == ns(sums.step_s)


@given(INTERVALS)
def test_the_timeline_says_the_same(intervals):
    step = _step(intervals)
    sums, drawn = step.sums, timeline_of("step", step, {})
    for name in ("step_s", "compute_s", "communication_s", "exposed_s", "idle_s"):
        assert getattr(drawn, name) == pytest.approx(getattr(sums, name), abs=1e-15), name
    assert drawn.step_s == pytest.approx(sum(drawn.parts.values()))
    lanes: dict[str, list] = {}
    for event in drawn.events:  # what runs side by side has lanes of its own, beside the waits
        if event.kind != "wait":
            lanes.setdefault(event.lane, []).append((event.start_s, event.end_s))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(INTERVALS)
def test_each_collective_by_itself(intervals):
    step = _step(intervals)
    works = _cells(step, GEMM)
    runs = list(step.runs({}))
    assert len(runs) == sum(event.name == NCCL for event, _ in step.events)
    for run, (event, _) in zip(runs, step.collectives, strict=True):
        inside = slice(int(event.start_ns), int(event.end_ns))
        assert run.exposed_s * 1e9 == pytest.approx((~works[inside]).sum())
        beside = [
            (min(event.end_ns, e.end_ns) - max(event.start_ns, e.start_ns))
            for e, _ in step.events
            if e.name == GEMM
        ]
        expected = sum(ns for ns in beside if ns > 0) * 1e-9
        assert sum(seconds for _, seconds in run.overlapped_with) == pytest.approx(expected)


def _device(name: str, *collectives: tuple[str, float, float]) -> DeviceStep:
    events = tuple(
        DeviceEvent("s", "nccl", start, end, op, "jit_step", 3) for op, start, end in collectives
    )
    window = (0.0, max(end for *_, end in collectives))
    return DeviceStep.from_device(
        Device(name, "", events), window, Classifier(synthetic.MODULES, 2)
    )


def test_the_last_to_come_is_waited_for_whatever_the_clocks_say():
    hours = 3.6e12  # of difference between two hosts' clocks
    early = _device("GPU 0", ("gather", 0, 50), ("hop", 60, 70), ("hop", 80, 95))
    late = _device("GPU 1", ("gather", 30 + hours, 50 + hours), ("hop", 60 + hours, 90 + hours), ("hop", 80 + hours, 95 + hours))  # fmt: skip
    waited, stragglers = waits([early, late])
    assert waited[0] == pytest.approx({0: 30e-9, 1: 0, 2: 0})
    assert waited[1] == pytest.approx({0: 0, 1: 20e-9, 2: 0})
    assert [(one.device, one.waited_for_s) for one in stragglers] == [
        ("GPU 1", pytest.approx(30e-9)),
        ("GPU 0", pytest.approx(20e-9)),
    ]


def test_a_permutes_devices_meet_over_its_pairs():
    assert connected([(0, 1), (2, 3), (1, 2)]) == ((0, 1, 2, 3),)
    assert connected([(0, 1), (1, 0), (2, 3), (3, 2)]) == ((0, 1), (2, 3))
