"""Colours, legend and texts that all pictures share."""

from __future__ import annotations

from collections.abc import Iterable

from jaxoverlap._util.text import human_bytes
from jaxoverlap.simulation.host_copies import KINDS
from jaxoverlap.simulation.timeline import (
    COLLECTIVES,
    COMPUTE,
    NETWORK,
    NVLINK,
    Event,
    Timeline,
    base_lane,
)

COLOURS = {  # by kind of event; a collective has its link's
    "matmul": "#2f6fb5",
    "memory": "#a9c7e6",
    "wait": "#e5261f",
    NVLINK: "#3f9a55",
    NETWORK: "#8a5cb8",
    COLLECTIVES: "#4f9a9a",
    **dict.fromkeys(KINDS, "#c98a2b"),
}
LEGEND = (
    ("matmul", "matmul"),
    ("memory", "memory-bound kernel"),
    ("wait", "exposed: kernels wait for a collective"),
    (NVLINK, "collective on NVLink"),
    (NETWORK, "collective on the network"),
)


def lanes_of(timelines: Iterable[Timeline]) -> tuple[str, ...]:
    """Return the lanes to draw: kernels, links, and all other lanes with events."""
    used = {event.lane for timeline in timelines for event in timeline.events}
    others = sorted(
        used - {COMPUTE, NVLINK, NETWORK, *KINDS}, key=lambda lane: (base_lane(lane), lane)
    )
    usual = [COMPUTE, *(lane for lane in others if base_lane(lane) == COMPUTE), NVLINK, NETWORK]
    host = KINDS if used & set(KINDS) else ()
    return (*usual, *(lane for lane in others if base_lane(lane) != COMPUTE), *host)


def legend_of(timelines: Iterable[Timeline]) -> tuple[tuple[str, str], ...]:
    """Return the legend: the keys of colours, each with its text."""
    unknown = any(base_lane(e.lane) == COLLECTIVES for t in timelines for e in t.events)
    return (*LEGEND, *((COLLECTIVES, "collective"),) * unknown)


def paint(event: Event) -> str:
    """Return the key of an event's colour."""
    return base_lane(event.lane) if event.kind == "collective" else event.kind


def headline(title: str, timeline: Timeline) -> str:
    """Return a step's times as one line, in milliseconds."""
    t = timeline
    parts = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in t.parts.items())
    links = ", ".join(f"{lane} {seconds * 1e3:.1f}" for lane, seconds in t.link_s.items())
    moved = f"{t.communication_s * 1e3:.1f}" + (f" ({links})" if links else "")
    return (
        f"{title}: step {t.step_s * 1e3:.1f} ms = {parts}; communication {moved}; bound "
        f"{t.bound_s * 1e3:.1f}"
    )


def detail(event: Event) -> str:
    """Describe an event: a collective's sizes, or a kernel's work."""
    if (c := event.collective) and c.kind in KINDS:
        return f"{'waits for ' * (event.kind == 'wait')}{human_bytes(c.bytes_moved)} {c.kind}"
    if (c := event.collective) and not c.group_size:  # no HLO says more
        return f"waits for {c.kind}" if event.kind == "wait" else c.kind
    if c := event.collective:
        where = f"{c.kind} of {c.group_size} devices, {human_bytes(c.bytes_moved)} sent by each"
        ring = f", {c.ring}" if c.ring else ""
        stream = "" if c.stream is None else f", stream {c.stream}"
        said = f"{where}{ring}{stream}"
        return f"waits for {said}" if event.kind == "wait" else said
    asked = event.work
    parts = [str(kernel) for kernel in (*asked.matmuls, asked.attention) if kernel]
    if event.work.memory_bytes:
        parts.append(f"{human_bytes(event.work.memory_bytes)} of memory")
    if event.work.unknown:
        parts.append(f"not known: {event.work.unknown}")
    return "; ".join(parts)
