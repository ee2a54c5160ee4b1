"""Write timelines in Chrome's trace event format, which ui.perfetto.dev opens.

The format: "Trace Event Format" (Google, 2016); complete events ("X"), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxoverlap._util.files import write_atomically
from jaxoverlap.simulation.report.style import detail, lanes_of
from jaxoverlap.simulation.report.unroll import unrolled
from jaxoverlap.simulation.timeline import Event, Timeline


def write_perfetto(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Write timelines as processes of one trace, and lanes as threads, with loops unrolled."""
    events = []
    for process, (name, timeline) in enumerate(timelines.items()):
        lanes = lanes_of([timeline])
        events += _names(process, name, lanes)
        events += [_event(process, lanes, event) for event in unrolled(timeline)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(trace, separators=(",", ":")))


def _names(process: int, name: str, lanes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for thread, lane in enumerate(lanes):
        head = {"ph": "M", "pid": process, "tid": thread}
        yield {**head, "name": "thread_name", "args": {"name": lane}}
        yield {**head, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(process: int, lanes: tuple[str, ...], event: Event) -> dict[str, Any]:
    exposed = event.kind == "wait"
    head = {"ph": "X", "pid": process, "tid": lanes.index(event.lane)}
    times = {"ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6}
    colour = {"cname": "terrible"} if exposed else {}
    args = {"source": event.source, "op": event.op, "what": detail(event)}
    name = f"exposed: {event.name}" if exposed else event.name
    return {**head, **times, **colour, "name": name, "cat": event.kind, "args": args}
