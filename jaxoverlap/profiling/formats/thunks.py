"""Read what XLA:CPU's devices ran out of the lines of host threads: thunks, each until its end.

A thunk's event ends where its call returns, and a kernel that is split over threads goes on. When
it is done, its "end:" event follows on the thread that finished it, but only after that thread has
run what waited for it (xla/backends/cpu/runtime/thunk_executor.cc, openxla/xla: what is attached
to a thunk's event last runs first). So if a "ThunkExecutor::Execute" has just closed on that
thread, the thunk was done when that began.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jaxoverlap.profiling.formats.events import Device, DeviceEvent

_END, _EXECUTE = "end: ", "ThunkExecutor::Execute"


class _Span(NamedTuple):
    """An event on a host thread."""

    start_ns: float
    end_ns: float
    name: str
    stats: dict[str, Any]


_Ends = dict[tuple[str, Any], list[float]]  # by thunk and its number: when it was done, rising


def cpu_devices(lines: Iterable[Any]) -> Iterator[Device]:
    """Yield the CPU devices of a host plane's lines, in the order of their numbers."""
    starts: dict[int, list[tuple[str, _Span]]] = defaultdict(list)
    ends: _Ends = defaultdict(list)
    for line in lines:
        spans = sorted(_spans(line), key=lambda s: (s.start_ns, -s.end_ns))
        for key, done_ns in _completions(spans):
            ends[key].append(done_ns)
        for span in spans:
            if "hlo_op" in span.stats and "device_ordinal" in span.stats:
                starts[int(span.stats["device_ordinal"])].append((line.name, span))
    for times in ends.values():
        times.sort()
    for number in sorted(starts):
        events = (_thunk(thread, span, ends) for thread, span in starts[number])
        yield Device(f"CPU {number}", "", tuple(sorted(events, key=lambda e: e.start_ns)))


def _spans(line: Any) -> Iterator[_Span]:
    for event in line.events:
        start, name = event.start_ns, event.name
        yield _Span(start, start + event.duration_ns, name, dict(event.stats))


def _completions(spans: list[_Span]) -> Iterator[tuple[tuple[str, Any], float]]:
    """Yield each thunk that was finished on a thread, and when."""
    running: list[_Span] = []  # executors, the innermost last
    for span in spans:
        closed = None
        while running and running[-1].end_ns <= span.start_ns:
            closed = running.pop()
        if span.name == _EXECUTE:
            running.append(span)
        elif span.name.startswith(_END):
            key = (span.name.removeprefix(_END), span.stats.get("_c"))
            yield key, closed.start_ns if closed else span.start_ns


def _thunk(thread: str, span: _Span, ends: _Ends) -> DeviceEvent:
    times = ends.get((span.name, span.stats.get("_p")), [])
    place = bisect.bisect(times, span.start_ns)  # its number comes again in the next run
    end_ns = max(span.end_ns, times[place]) if place < len(times) else span.end_ns
    return DeviceEvent(
        stream=thread,
        name=span.name,
        start_ns=span.start_ns,
        end_ns=end_ns,
        op=str(span.stats["hlo_op"]),
        module=str(span.stats.get("hlo_module", "")),
        program=int(span.stats.get("program_id", -1)),
        run=int(span.stats.get("run_id", -1)),
    )
