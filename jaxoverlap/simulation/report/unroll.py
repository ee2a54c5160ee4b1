"""Loops in pictures: as a tree, every iteration in its place, or each loop once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxoverlap.simulation.timeline import Event, Repeat, Timeline


@dataclass(frozen=True)
class Loop:
    """An iteration and all its copies; items' times are those of the first of them."""

    repeat: Repeat
    items: tuple[Event | Loop, ...]


def tree(timeline: Timeline) -> tuple[Event | Loop, ...]:
    """The events of a timeline, those of each loop in a node of their own."""
    outer_first = sorted(timeline.repeats, key=lambda r: (r.events[0], -r.events[1]))
    return _items(timeline, outer_first, 0, len(timeline.events))


def _items(
    timeline: Timeline, repeats: list[Repeat], first: int, last: int
) -> tuple[Event | Loop, ...]:
    """The items of [first, last); takes the repeats that stand in it off the front of the list."""
    items: list[Event | Loop] = []
    while repeats and repeats[0].events[1] <= last:
        repeat = repeats.pop(0)
        items += timeline.events[first : repeat.events[0]]
        items.append(Loop(repeat, _items(timeline, repeats, *repeat.events)))
        first = repeat.events[1]
    return (*items, *timeline.events[first:last])


def unrolled(timeline: Timeline) -> Iterator[Event]:
    """Every event of a step, each where it runs, with `runs` of one."""
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
    """A time of the step on an axis from which the copies of every iteration are cut out."""
    cut = 0.0
    for r in timeline.repeats:
        past_first = time_s - r.start_s - r.period_s
        cut += min(max(past_first, 0.0), r.period_s * (r.times - 1))
    return time_s - cut
