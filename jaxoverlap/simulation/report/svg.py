"""A timeline as an SVG: each loop drawn once, with how often it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

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

_WIDTH, _LEFT, _LANE, _GAP = 1600, 70, 26, 6  # pixels: the picture, names of lanes, a lane
_TOP, _ABOVE, _BELOW = 34, 46, 24  # above the first panel; a panel's title and loops; its axis


def write_svg(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draw timelines under each other at one scale; a loop's copies are cut out of the axis."""
    longest = max(folded_s(t, t.step_s) for t in timelines.values())
    scale = (_WIDTH - _LEFT - 10) / longest if longest else 0.0
    lanes = lanes_of(timelines.values())
    panel = _ABOVE + len(lanes) * (_LANE + _GAP) + _BELOW
    height = _TOP + len(timelines) * panel
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_legend(legend_of(timelines.values())),
    ]
    for place, (name, timeline) in enumerate(timelines.items()):
        lines.append(f'<g transform="translate({_LEFT},{_TOP + place * panel})">')
        lines += [*_panel(name, timeline, scale, lanes), "</g>"]
    Path(path).write_text("\n".join([*lines, "</svg>\n"]))


def _legend(legend: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = _LEFT
    for key, text in legend:
        yield f'<rect x="{x}" y="9" width="14" height="14" fill="{COLOURS[key]}"/>'
        yield f'<text x="{x + 20}" y="20">{escape(text)}</text>'
        x += 60 + 7 * len(text)


def _panel(name: str, timeline: Timeline, scale: float, lanes: Sequence[str]) -> Iterator[str]:
    yield f'<text x="0" y="14" font-weight="bold">{escape(headline(name, timeline))}</text>'
    for lane in lanes:
        y = _top(lanes, lane)
        yield f'<text x="-8" y="{y + 17}" text-anchor="end">{lane}</text>'
        width = _WIDTH - _LEFT - 10
        yield f'<rect x="0" y="{y}" width="{width}" height="{_LANE}" fill="#f3f3f1"/>'
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
    words = (event.name, event.op, detail(event), took, event.source)
    return (
        f'<rect x="{start:.2f}" y="{y}" width="{end - start:.2f}" height="{height}" '
        f'fill="{COLOURS[paint(event)]}" stroke="white" stroke-width="0.3">'
        f"<title>{escape(chr(10).join(filter(None, words)))}</title></rect>"
    )


def _bracket(timeline: Timeline, repeat: Repeat, scale: float, bottom: int) -> Iterator[str]:
    start = folded_s(timeline, repeat.start_s) * scale
    end = folded_s(timeline, repeat.start_s + repeat.period_s) * scale
    y = _ABOVE - 8
    for x in (start, end):
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{bottom}" stroke="#444" '
            'stroke-dasharray="3 3"/>'
        )
    whole = repeat.period_s * repeat.times * 1e3
    text = f"{repeat.times} times {repeat.period_s * 1e3:.2f} ms = {whole:.1f} ms"
    yield f'<line x1="{start:.2f}" x2="{end:.2f}" y1="{y}" y2="{y}" stroke="#444"/>'
    if end - start > 6 * len(text):
        yield f'<text x="{(start + end) / 2:.2f}" y="{y - 4}" text-anchor="middle">{text}</text>'


def _axis(length_s: float, scale: float, y: int) -> Iterator[str]:
    if not length_s:
        return
    step = next(s for s in _STEPS_S if s * scale >= 60)
    for n in range(int(length_s / step) + 1):
        x = n * step * scale
        yield f'<text x="{x:.1f}" y="{y}" fill="#555" font-size="11">{n * step * 1e3:g} ms</text>'


_STEPS_S = [digit * 10.0**power for power in range(-9, 7) for digit in (1, 2, 5)]
