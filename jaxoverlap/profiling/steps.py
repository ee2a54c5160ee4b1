"""Split a profile into steps: the runs of the program that keeps the devices busiest.

A program has a module's name and, in each process, a number. CPU devices number their runs. On a
GPU a run begins with an instruction that a run has once: one of the entry computation, where the
profile carries the module. Where no event names a program, the profiler's own marks are the steps,
or the full profile is one.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxoverlap.profiling.formats.events import Device, DeviceEvent, Recording
from jaxoverlap.profiling.kinds import Classifier

Window = tuple[float, float]  # start and end in ns


@dataclass(frozen=True)
class Steps:
    """The steps of a profile.

    Attributes:
        program: the program's name, empty if no event names one; number: on the first device.
        windows: for each step the window of each device, in the order of the profile's devices.
        incomplete: runs that the profile does not have from start to end, on any device.
        devices: those that ran the program.
    """

    program: str
    number: int
    windows: tuple[tuple[Window, ...], ...]
    incomplete: int
    devices: tuple[Device, ...]


def steps_of(recording: Recording, classifier: Classifier, module: str | None = None) -> Steps:
    """Split a profile into steps.

    Args:
        recording: the profile.
        classifier: what its events are.
        module: the program's name, instead of the one that takes most of the devices' time.

    Raises:
        ValueError: if no program has that name, or a device has no complete run.
    """
    program = _program(recording, module)
    if program is None:
        return _unnamed(recording)
    runs: list[tuple[Device, list[Window]]] = []
    incomplete, number = 0, -1
    for device in recording.devices:
        if events := _busiest(device, program):
            number = number if runs else events[0].program
            complete, dropped = _complete(list(_runs(events, classifier)))
            incomplete += dropped
            runs.append((device, [(r[0].start_ns, max(e.end_ns for e in r)) for r in complete]))
    windows = _aligned([windows for _, windows in runs])
    if not windows:
        raise ValueError(
            f"{recording.source} has no complete run of {program} on every device that ran it: "
            "profile more steps"
        )
    return Steps(program, number, windows, incomplete, tuple(device for device, _ in runs))


def programs(recording: Recording) -> dict[str, float]:
    """Return the seconds of the events of programs by name, all devices together."""
    seconds: dict[str, float] = defaultdict(float)
    for device in recording.devices:
        for event in device.events:
            if event.module:
                seconds[event.module] += event.seconds
    return seconds


def _program(recording: Recording, module: str | None) -> str | None:
    seconds = programs(recording)
    if module is not None and module not in seconds:
        known = ", ".join(sorted(seconds)) or "none"
        raise ValueError(f"{recording.source} has no program {module!r}: it has {known}")
    return module or max(seconds, key=lambda name: seconds[name], default=None)


def _busiest(device: Device, program: str) -> list[DeviceEvent]:
    """Return a device's events of the one program of this name that takes most of its time."""
    events: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in device.events:
        if event.module == program:
            events[event.program].append(event)
    return max(events.values(), key=lambda ran: sum(e.seconds for e in ran), default=[])


def _unnamed(recording: Recording) -> Steps:
    """Split at the profiler's marks where no event names a program; without marks take one step."""
    ends = [max(e.end_ns for e in device.events) for device in recording.devices]
    starts = [(mark,) * len(ends) for mark in recording.marks]
    starts = starts or [tuple(device.events[0].start_ns for device in recording.devices)]
    windows = (
        tuple(zip(start, end, strict=True))
        for start, end in zip(starts, [*starts[1:], tuple(ends)], strict=True)
    )
    return Steps("", -1, tuple(windows), 0, recording.devices)


# -- one device -----------------------------------------------------------------------------------


def _runs(events: Sequence[DeviceEvent], classifier: Classifier) -> Iterator[list[DeviceEvent]]:
    """Yield the events of each run of a program on a device."""
    if all(event.run >= 0 for event in events):
        runs: dict[int, list[DeviceEvent]] = defaultdict(list)
        for event in events:
            runs[event.run].append(event)
        yield from runs.values()
        return
    first = _first_of_a_run(events, classifier)
    run: list[DeviceEvent] = []
    for event in events:
        if _key(event) == first and run:
            yield run
            run = []
        run.append(event)
    yield run


def _key(event: DeviceEvent) -> tuple[str, str]:
    return event.op, event.name


def _first_of_a_run(events: Sequence[DeviceEvent], classifier: Classifier) -> tuple[str, str]:
    """Return the instruction and kernel that begin a run: of those it has once, the first.

    Programs whose order is known begin with the first of the entry computation's instructions that
    has a kernel; others after the longest pause.
    """
    entry = [event for event in events if classifier.label(event).entry]
    candidates = entry or events
    counts = Counter(map(_key, candidates))
    fewest = min(counts.values())
    once = [event for event in candidates if counts[_key(event)] <= fewest + 1]
    module = classifier.module(events[0].module, events[0].program)
    if entry and module:
        order = {i.name: place for place, i in enumerate(module.body(module.entry))}
        return _key(min(once, key=lambda event: (order[event.op], event.start_ns)))
    pauses = _pauses(events)
    return max(map(_key, once), key=lambda key: pauses.get(key, 0.0))


def _pauses(events: Sequence[DeviceEvent]) -> dict[tuple[str, str], float]:
    """Return the usual time that nothing runs before each instruction and kernel."""
    before: dict[tuple[str, str], list[float]] = defaultdict(list)
    end_ns = events[0].end_ns
    for event in events[1:]:
        before[_key(event)].append(max(event.start_ns - end_ns, 0.0))
        end_ns = max(end_ns, event.end_ns)
    return {key: statistics.median(pauses) for key, pauses in before.items()}


def _complete(runs: list[list[DeviceEvent]]) -> tuple[list[list[DeviceEvent]], int]:
    """Return the runs that the profile has from start to end, and the number of the others.

    A run is complete if it has its first and its last instruction as often as most runs do. Others
    may be missing: profilers lose the names of some events.
    """
    counts = [Counter(event.op for event in run) for run in runs]
    usual = {op for op in set().union(*counts) if 2 * sum(op in c for c in counts) >= len(runs)}
    after: dict[str, list[float]] = {op: [] for op in usual}  # the run's start, until the last one
    for run in runs:
        for op, event in {event.op: event for event in run}.items():
            if op in usual:
                after[op].append(event.start_ns - run[0].start_ns)
    place = {op: statistics.median(times) for op, times in after.items()}
    ends = (min(place, key=lambda op: place[op]), max(place, key=lambda op: place[op]))
    most = {op: statistics.mode(c[op] for c in counts if op in c) for op in ends}
    complete = [
        run
        for run, c in zip(runs, counts, strict=True)
        if all(c[op] >= most[op] for op in ends) and 2 * len(usual & c.keys()) >= len(usual)
    ]
    return complete, len(runs) - len(complete)


# -- several devices ------------------------------------------------------------------------------


def _aligned(devices: Sequence[Sequence[Window]]) -> tuple[tuple[Window, ...], ...]:
    """Match the runs of devices by time, to those of the device that has the fewest.

    A run that another device lacks is left out: that device's nearest run is matched already.
    """
    steps: list[tuple[Window, ...]] = []
    for reference in min(devices, key=len):
        center = sum(reference)
        step = tuple(min(ran, key=lambda w: abs(sum(w) - center)) for ran in devices)
        if not steps or all(now > before for now, before in zip(step, steps[-1], strict=True)):
            steps.append(step)
    return tuple(steps)
