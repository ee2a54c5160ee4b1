"""Write timelines as an interactive HTML page: page.html, with the events as JSON in it.

The page gets each loop's iteration once and draws its copies itself, so that a step of a hundred
thousand events stays small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from jaxoverlap._util.files import packaged, write_atomically
from jaxoverlap._util.text import human_bytes
from jaxoverlap.simulation.report.style import (
    COLOURS,
    detail,
    headline,
    lanes_of,
    legend_of,
    paint,
)
from jaxoverlap.simulation.report.unroll import Loop, tree
from jaxoverlap.simulation.timeline import Event, Timeline

_WORST = 12  # source lines in the table


def write_page(path: str | Path, timelines: Mapping[str, Timeline], *, title: str) -> None:
    """Write a page with timelines one above the other, at one scale."""
    words, lanes = _Words(), lanes_of(timelines.values())
    data = {
        "lanes": lanes,
        "colours": COLOURS,
        "legend": legend_of(timelines.values()),
        "steps": [
            {
                "headline": headline(name, t),
                "step_s": t.step_s,
                "items": [_item(item, words, lanes) for item in tree(t)],
                "worst": _worst(t),
            }
            for name, t in timelines.items()
        ],
        "words": words.all,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no tag ends in data
    page = packaged("jaxoverlap.simulation.report", "page.html").decode()
    page = page.replace("{{title}}", escape(title)).replace("{{data}}", text)
    write_atomically(path, page)


class _Words:
    """A table of texts by number, as source lines and operations repeat a thousand times."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def _item(item: Event | Loop, words: _Words, lanes: tuple[str, ...]) -> list[Any]:
    """Return an event as a list of eight or a loop as one of four, times in microseconds."""
    if isinstance(item, Loop):
        r = item.repeat
        items = [_item(inner, words, lanes) for inner in item.items]
        return [_us(r.start_s), _us(r.period_s), r.times, items]
    texts = (item.name, detail(item), item.op, item.source)
    head = (lanes.index(item.lane), words.number(paint(item)))
    return [*head, _us(item.start_s), _us(item.end_s), *map(words.number, texts)]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _worst(timeline: Timeline) -> list[list[str]]:
    """Return the source lines that expose most: kind, line, runs, bytes, ms, exposed ms."""
    lines: dict[tuple[str, str, str], list[float]] = {}
    for s in timeline.spent:
        c = s.collective
        sums = lines.setdefault((c.kind, c.source, s.lane), [0, 0, 0.0, 0.0])
        more = (s.runs, s.runs * c.bytes_moved, s.seconds, s.exposed_s)
        sums[:] = [a + b for a, b in zip(sums, more, strict=True)]
    longest = sorted(lines.items(), key=lambda item: -item[1][3])[:_WORST]
    return [
        [*key, f"{runs:.0f}", human_bytes(sent), f"{took * 1e3:.1f}", f"{exposed * 1e3:.1f}"]
        for key, (runs, sent, took, exposed) in longest
    ]
