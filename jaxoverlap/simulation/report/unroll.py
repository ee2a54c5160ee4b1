"""Arrange the events of loops for pictures: as a tree, unrolled, or each loop once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxoverlap.simulation.timeline import Event, Repeat, Timeline


@dataclass(frozen=True)
class Loop:
    """A loop: the items of its first iteration, which all others repeat."""

    repeat: Repeat
    items: tuple[Event | Loop, ...]


def tree(timeline: Timeline) -> tuple[Event | Loop, ...]:
    """Return the events of a timeline as a tree, in which each loop is a node."""
    outer_first = sorted(timeline.repeats, key=lambda r: (r.events[0], -r.events[1]))
    return _items(timeline, outer_first, 0, len(timeline.events))


def _items(
    timeline: Timeline, repeats: list[Repeat], first: int, last: int
) -> tuple[Event | Loop, ...]:
    """Return the items of [first, last); removes its repeats from the front of the list."""
    items: list[Event | Loop] = []
    while repeats and repeats[0].events[1] <= last:
        repeat = repeats.pop(0)
        items += timeline.events[first : repeat.events[0]]
        items.append(Loop(repeat, _items(timeline, repeats, *repeat.events)))
        first = repeat.events[1]
    return (*items, *timeline.events[first:last])


def unrolled(timeline: Timeline) -> Iterator[Event]:
    """Yield every event of a step at each time that it runs, with `runs` of 1."""
    return _unrolled(tree(timeline), 0.0)


def _unrolled(items: tuple[Event | Loop, ...], later_s: float) -> Iterator[Event]:
    for item in items:
        if isinstance(item, Event):
            start_s, end_s = item.start_s + later_s, item.end_s + later_s
            yield replace(item, start_s=start_s, end_s=end_s, runs=1)
        else:
            for n in range(item.repeat.times):
                yield from _unrolled(item.items, later_s + n * item.repeat.period_s)


def folded_s(timeline: Timeline, time_s: float) -> float:
    """Return a time of the step on an axis that has each loop's first iteration only."""
    cut = 0.0
    for r in timeline.repeats:
        past_first = time_s - r.start_s - r.period_s
        cut += min(max(past_first, 0.0), r.period_s * (r.times - 1))
    return time_s - cut
