"""Draw a measured step as a `Timeline`, so that all pictures of simulations hold for it too."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxoverlap.profiling.formats.events import DeviceEvent
from jaxoverlap.profiling.intervals import length, union
from jaxoverlap.profiling.kinds import Label
from jaxoverlap.profiling.measured import DeviceStep
from jaxoverlap.simulation.host_copies import KINDS
from jaxoverlap.simulation.replay import short_op
from jaxoverlap.simulation.schedule import Collective
from jaxoverlap.simulation.timeline import COLLECTIVES, COMPUTE, Event, Timeline, base_lane


@dataclass(frozen=True)
class MeasuredTimeline(Timeline):
    """A step as one device ran it. Its seconds are unions: overlapping events count once.

    step_s = compute_s + exposed_s + idle_s.
    """

    @functools.cached_property
    def compute_s(self) -> float:
        """Seconds in which some kernel runs."""
        return _seconds(e for e in self.events if e.kind in ("matmul", "memory"))

    @functools.cached_property
    def slowdown_s(self) -> float:
        """Return 0: a profile does not have the seconds of a kernel that nothing overlaps."""
        return 0.0

    @functools.cached_property
    def link_s(self) -> dict[str, float]:
        """Seconds in which each link is busy."""
        lanes: dict[str, list[Event]] = {}
        for event in self._collectives:
            lanes.setdefault(base_lane(event.lane), []).append(event)
        return {lane: _seconds(events) for lane, events in lanes.items()}

    @property
    def communication_s(self) -> float:
        """Seconds in which some collective runs, hidden or not."""
        return _seconds(self._collectives)

    @property
    def idle_s(self) -> float:
        """Return the seconds in which nothing runs."""
        return self.step_s - self.compute_s - self.exposed_s

    @property
    def parts(self) -> dict[str, float]:
        """What the step is made of."""
        return {"compute": self.compute_s, "exposed": self.exposed_s, "idle": self.idle_s}

    @property
    def _collectives(self) -> list[Event]:
        return [e for e in self.events if e.kind == "collective"]


def _seconds(events: Iterable[Event]) -> float:
    return length(union((e.start_s, e.end_s) for e in events))


def timeline_of(name: str, step: DeviceStep, lanes: Mapping[str, str]) -> MeasuredTimeline:
    """Draw a step.

    Args:
        name: the program's.
        step: what a device ran.
        lanes: the link of each collective by its instruction's name, where that is known.
    """
    start, end = step.window
    drawn = [*_drawn(step, lanes), *_waits(step)]
    drawn.sort(key=lambda event: event.start_s)
    return MeasuredTimeline(name, (end - start) * 1e-9, tuple(drawn), ())


def _drawn(step: DeviceStep, lanes: Mapping[str, str]) -> Iterator[Event]:
    """Yield kernels and collectives; of those that overlap each has a lane of its own."""
    ends: dict[str, list[float]] = {}
    for event, label in step.events:
        lane = COMPUTE
        if c := label.collective:
            lane = c.kind if c.kind in KINDS else lanes.get(c.name, COLLECTIVES)
        busy = ends.setdefault(lane, [])
        place = next((n for n, end in enumerate(busy) if end <= event.start_ns), len(busy))
        busy[place : place + 1] = [event.end_ns]
        kind = "matmul" if label.kind in ("matmul", "attention") else "memory"
        kind = "collective" if label.collective else kind
        lane = f"{lane} {place + 1}" if place else lane
        yield _event(step, lane, kind, event.module, label, event.start_ns, event.end_ns)


def _waits(step: DeviceStep) -> Iterator[Event]:
    """Yield the spans in which collectives ran alone, each as the wait for the earliest of them."""
    running: list[tuple[DeviceEvent, Collective]] = step.collectives
    for begin, end in step.exposed:
        time_ns = begin
        while time_ns < end:
            running = [(e, c) for e, c in running if e.end_ns > time_ns]
            event, c = next((e, c) for e, c in running if e.start_ns <= time_ns)
            until = min(event.end_ns, end)
            label = Label("collective", c.name, c.source, c.op_name, collective=c)
            yield _event(step, COMPUTE, "wait", event.module, label, time_ns, until)
            time_ns = until


def _event(
    step: DeviceStep,
    lane: str,
    kind: str,
    module: str,
    label: Label,
    start_ns: float,
    end_ns: float,
) -> Event:
    """Return an event of a step's timeline, its times from the step's start."""
    start_s, end_s = ((t - step.window[0]) * 1e-9 for t in (start_ns, end_ns))
    return Event(
        lane=lane,
        kind=kind,
        name=label.op,
        computation=module,
        start_s=start_s,
        end_s=end_s,
        alone_s=(end_ns - start_ns) * 1e-9,
        runs=1,
        source=label.source,
        op=short_op(label.op_name),
        work=label.work,
        collective=label.collective,
    )
