"""Add up one step of one device by unions of intervals, and compare devices."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.plan.collectives import PERMUTE
from jaxoverlap.profiling.formats.events import Device, DeviceEvent
from jaxoverlap.profiling.intervals import Spans, length, union, within, without
from jaxoverlap.profiling.kinds import Classifier, Label
from jaxoverlap.profiling.steps import Window
from jaxoverlap.simulation.device_groups import parties
from jaxoverlap.simulation.host_copies import KINDS
from jaxoverlap.simulation.schedule import Collective

_MAX_NAMED = 3  # kernels named per collective, longest overlap first


@dataclass(frozen=True)
class Sums:
    """A step's seconds on one device, or the mean over devices; all by unions of intervals.

    step_s = compute_s + exposed_s + idle_s, and communication_s = overlapped_s + exposed_s.

    Attributes:
        step_s: from its first event to the end of its last.
        compute_s: a kernel runs that is no collective.
        communication_s: a collective runs, or a copy from or to the host.
        overlapped_s: both; exposed_s: communication alone.
        idle_s: nothing runs.
    """

    step_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    exposed_s: float
    idle_s: float

    @classmethod
    def mean(cls, parts: Sequence[Sums]) -> Sums:
        """Return the mean of several."""
        names = cls.__dataclass_fields__
        return cls(*(sum(getattr(p, name) for p in parts) / len(parts) for name in names))

    @property
    def hidden(self) -> float:
        """Return the share of communication that compute overlaps; 1 without communication."""
        return self.overlapped_s / self.communication_s if self.communication_s else 1.0


@dataclass(frozen=True)
class CollectiveRun:
    """One collective as one device ran it.

    Attributes:
        collective: the collective; its bytes and devices are 0 where no HLO says them.
        start_s: from the step's start; seconds: until its end.
        exposed_s: seconds in which no kernel overlapped it.
        waited_s: seconds longer than on the device that came last to it, for which it waited.
        overlapped_with: the kernels that overlapped it longest, with seconds.
        stream: the stream that it ran on.
    """

    collective: Collective
    start_s: float
    seconds: float
    exposed_s: float
    waited_s: float
    overlapped_with: tuple[tuple[str, float], ...]
    stream: str


@dataclass(frozen=True)
class DeviceStep:
    """A step as one device ran it.

    Attributes:
        device: the device's name.
        window: start and end, in ns.
        events: what ran, with what it is, by start; nothing that only wraps others.
        compute, communication: when kernels ran, when collectives did: spans in ns.
    """

    device: str
    window: Window
    events: tuple[tuple[DeviceEvent, Label], ...]
    compute: Spans = field(repr=False)
    communication: Spans = field(repr=False)

    @classmethod
    def from_device(cls, device: Device, window: Window, classifier: Classifier) -> DeviceStep:
        """Select the events of one step from a device's events, by their start."""
        start, end = window
        inside = [(e, classifier.label(e)) for e in device.events if start <= e.start_ns < end]
        inside = [(e, m) for e, m in inside if m.kind != "container"]
        moves = ((e.start_ns, e.end_ns) for e, m in inside if m.kind == "collective")
        works = ((e.start_ns, e.end_ns) for e, m in inside if m.kind != "collective")
        compute, communication = (within(union(spans), start, end) for spans in (works, moves))
        return cls(device.name, window, tuple(inside), compute, communication)

    @property
    def sums(self) -> Sums:
        """Add the step up."""
        start, end = self.window
        compute, communication = length(self.compute), length(self.communication)
        exposed = length(self.exposed)
        parts = (end - start, compute, communication, communication - exposed, exposed)
        return Sums(*(ns * 1e-9 for ns in (*parts, end - start - compute - exposed)))

    @property
    def exposed(self) -> Spans:
        """The spans in which collectives ran alone."""
        return self.alone(self.communication)

    def alone(self, spans: Spans) -> Spans:
        """Return the part of some spans in which no kernel ran."""
        return without(spans, self.compute)

    @property
    def collectives(self) -> list[tuple[DeviceEvent, Collective]]:
        """The collectives, by start."""
        return [(e, m.collective) for e, m in self.events if m.collective]

    def runs(self, waited_s: dict[int, float]) -> Iterator[CollectiveRun]:
        """Yield each collective's run; `waited_s` has the seconds each waited, by its index."""
        kernels = [(e, m) for e, m in self.events if not m.collective]
        starts = np.array([e.start_ns for e, _ in kernels])
        longest = max((e.end_ns - e.start_ns for e, _ in kernels), default=0.0)
        for place, (event, collective) in enumerate(self.collectives):
            first = int(np.searchsorted(starts, event.start_ns - longest))
            last = int(np.searchsorted(starts, event.end_ns))
            span = np.array([[event.start_ns, event.end_ns]])
            yield CollectiveRun(
                collective=collective,
                start_s=(event.start_ns - self.window[0]) * 1e-9,
                seconds=event.seconds,
                exposed_s=length(self.alone(span)) * 1e-9,
                waited_s=waited_s.get(place, 0.0),
                overlapped_with=_overlapped_with(event, kernels[first:last]),
                stream=event.stream,
            )


def _overlapped_with(
    event: DeviceEvent, kernels: Iterable[tuple[DeviceEvent, Label]]
) -> tuple[tuple[str, float], ...]:
    seconds: dict[str, float] = defaultdict(float)
    for kernel, label in kernels:
        both = min(event.end_ns, kernel.end_ns) - max(event.start_ns, kernel.start_ns)
        if both > 0:
            seconds[label.op] += both * 1e-9
    return tuple(sorted(seconds.items(), key=lambda item: -item[1])[:_MAX_NAMED])


# -- comparing devices -------------------------------------------------------------------


@dataclass(frozen=True)
class Straggler:
    """How often a device was the last to come to collectives, and what that cost the others.

    Attributes:
        device: its name.
        times: collectives of a step to which it came last.
        waited_for_s: seconds of a step that the others waited for it, the mean over them.
    """

    device: str
    times: int
    waited_for_s: float


def waits(steps: Sequence[DeviceStep]) -> tuple[list[dict[int, float]], tuple[Straggler, ...]]:
    """Return how long each device waited in its collectives, and the stragglers, longest first.

    The device that comes last to a collective is the one on which it takes shortest, whatever the
    hosts' clocks say. Devices of one group of the HLO are compared, counted in the order of
    `steps`; without HLO all devices are. A profile of some of the devices is taken for the first.
    """
    met: dict[tuple[str, int, tuple[int, ...]], list[tuple[int, int, float]]] = defaultdict(list)
    for device, step in enumerate(steps):
        seen: dict[str, int] = defaultdict(int)
        for place, (event, collective) in enumerate(step.collectives):
            if collective.kind not in KINDS:
                group = _group(collective, device, len(steps))
                turn = (collective.name, seen[collective.name], group)
                met[turn].append((device, place, event.seconds))
                seen[collective.name] += 1
    waited: list[dict[int, float]] = [{} for _ in steps]
    times, cost = [0] * len(steps), [0.0] * len(steps)
    for came in met.values():
        if len(came) < 2:
            continue
        last, _, shortest = min(came, key=lambda one: one[2])
        times[last] += 1
        cost[last] += sum(seconds - shortest for *_, seconds in came) / (len(came) - 1)
        for device, place, seconds in came:
            waited[device][place] = seconds - shortest
    stragglers = [Straggler(s.device, n, c) for s, n, c in zip(steps, times, cost, strict=True)]
    return waited, tuple(sorted(stragglers, key=lambda one: -one.waited_for_s))


def _group(collective: Collective, device: int, num_devices: int) -> tuple[int, ...]:
    """Return the devices that take part together with one; all of them if no HLO says it."""
    groups = _groups(collective.groups, num_devices, collective.kind == PERMUTE)
    return next((group for group in groups if device in group), (device,))


@functools.lru_cache(maxsize=4096)
def _groups(groups: str, num_devices: int, permute: bool) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a collective; of a permute, the devices that its pairs connect."""
    together = parties(groups, num_devices)
    return connected(together) if permute else together


def connected(pairs: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that pairs connect, directly or through others."""
    joined: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in joined if group & set(pair)]
        joined = [group for group in joined if group not in touching]
        joined.append(set(pair).union(*touching))
    return tuple(tuple(sorted(group)) for group in joined)
