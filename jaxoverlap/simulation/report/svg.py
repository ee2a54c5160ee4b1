"""Draw timelines as an SVG: each loop once, with its number of iterations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from jaxoverlap._util.files import packaged, write_atomically
from jaxoverlap.simulation.report.style import (
    COLOURS,
    detail,
    headline,
    lanes_of,
    legend_of,
    paint,
)
from jaxoverlap.simulation.report.unroll import folded_s
from jaxoverlap.simulation.timeline import Event, Repeat, Timeline

# Pixels: the picture is as wide as a page of text, so that its letters are as tall as the page's.
_WIDTH, _LEFT, _LANE, _GAP = 880, 76, 26, 6  # the picture, the lanes' names, a lane
_ABOVE, _BELOW, _ROW = 66, 30, 22  # a panel's title and loops; its axis; a row of the legend
_LETTER = 7.2  # the mean width of a letter of 13 px
_STYLE = f"<style>\n{packaged('jaxoverlap.simulation.report', 'svg.css').decode()}</style>"


def write_svg(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draw timelines one above the other at one scale, of each loop the first iteration."""
    longest = max(folded_s(t, t.step_s) for t in timelines.values())
    scale = (_WIDTH - _LEFT - 10) / longest if longest else 0.0
    lanes = lanes_of(timelines.values())
    panel = _ABOVE + len(lanes) * (_LANE + _GAP) + _BELOW
    legend, top = _legend(legend_of(timelines.values()))
    height = top + len(timelines) * panel
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">',
        _STYLE,
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        *legend,
    ]
    for index, (name, timeline) in enumerate(timelines.items()):
        lines.append(f'<g transform="translate({_LEFT},{top + index * panel})">')
        lines += [*_panel(name, timeline, scale, lanes), "</g>"]
    write_atomically(path, "\n".join([*lines, "</svg>\n"]))


def _legend(legend: Sequence[tuple[str, str]]) -> tuple[list[str], int]:
    """Return the legend's elements, wrapped to the picture's width, and its height."""
    lines, x, y = [], _LEFT, 9
    for key, text in legend:
        wide = 36 + round(_LETTER * len(text))
        if x + wide > _WIDTH and x > _LEFT:
            x, y = _LEFT, y + _ROW
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[key]}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}">{escape(text)}</text>')
        x += wide
    return lines, y + 2 * _ROW - 8


def _panel(name: str, timeline: Timeline, scale: float, lanes: Sequence[str]) -> Iterator[str]:
    title, parts = headline(name, timeline).split(" = ", 1)
    yield f'<text class="title" x="0" y="14">{escape(title)}</text>'
    yield f'<text class="faint" x="0" y="32">= {escape(parts.split(" (")[0])} ms</text>'
    for lane in lanes:
        y = _top(lanes, lane)
        yield f'<text x="-8" y="{y + 17}" text-anchor="end">{lane}</text>'
        width = _WIDTH - _LEFT - 10
        yield f'<rect class="lane" x="0" y="{y}" width="{width}" height="{_LANE}"/>'
    for event in timeline.events:
        yield _box(timeline, event, scale, lanes)
    for repeat in timeline.repeats:
        yield from _bracket(timeline, repeat, scale, _bottom(lanes))
    yield from _axis(folded_s(timeline, timeline.step_s), scale, _bottom(lanes) + 16)


def _top(lanes: Sequence[str], lane: str) -> int:
    return _ABOVE + lanes.index(lane) * (_LANE + _GAP)


def _bottom(lanes: Sequence[str]) -> int:
    return _top(lanes, lanes[-1]) + _LANE


def _box(timeline: Timeline, event: Event, scale: float, lanes: Sequence[str]) -> str:
    start, end = (folded_s(timeline, t) * scale for t in (event.start_s, event.end_s))
    loud = event.kind == "wait"  # a little taller than what stands beside it
    y, height = _top(lanes, event.lane) - 2 * loud, _LANE + 4 * loud
    took = f"{(event.end_s - event.start_s) * 1e6:.1f} us, runs {event.runs}x"
    wide = end - start - 0.4 * (end - start > 2)  # neighbours of one colour stay apart
    words = (event.name, event.op, detail(event), took, event.source)
    return (
        f'<rect x="{start:.2f}" y="{y}" width="{wide:.2f}" height="{height}" '
        f'fill="{COLOURS[paint(event)]}">'
        f"<title>{escape(chr(10).join(filter(None, words)))}</title></rect>"
    )


def _bracket(timeline: Timeline, repeat: Repeat, scale: float, bottom: int) -> Iterator[str]:
    start = folded_s(timeline, repeat.start_s) * scale
    end = folded_s(timeline, repeat.start_s + repeat.period_s) * scale
    y = _ABOVE - 8
    for x in (start, end):
        yield (f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{bottom}" stroke-dasharray="3 3"/>')
    whole = repeat.period_s * repeat.times * 1e3
    text = f"{repeat.times} times {repeat.period_s * 1e3:.2f} ms = {whole:.1f} ms"
    yield f'<line x1="{start:.2f}" x2="{end:.2f}" y1="{y}" y2="{y}"/>'
    if end - start > _LETTER * len(text):
        yield f'<text x="{(start + end) / 2:.2f}" y="{y - 4}" text-anchor="middle">{text}</text>'


def _axis(length_s: float, scale: float, y: int) -> Iterator[str]:
    if not length_s:
        return
    step = next(s for s in _STEPS_S if s * scale >= 60)
    for n in range(int(length_s / step) + 1):
        x = n * step * scale
        yield f'<text x="{x:.1f}" y="{y}" class="faint">{n * step * 1e3:g} ms</text>'


_STEPS_S = [digit * 10.0**power for power in range(-9, 7) for digit in (1, 2, 5)]
