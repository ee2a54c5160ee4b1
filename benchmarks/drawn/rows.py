"""Report the rows of random steps: the table, and which aims they miss."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from benchmarks.frame import Row, sheet
from benchmarks.pods.rows import notes, unfinished
from jaxoverlap.passes.scheduling.reorder import SAME

PLAIN, OVERLAPPED, FALLBACK, UNRINGED = "plain", "overlapped", "never slower", "no rings"
ALONE, UNCUT, UNPINNED = "scheduler pass alone", "halves=None", "layouts=None"
ROWS = (PLAIN, OVERLAPPED, FALLBACK, UNRINGED, ALONE, UNCUT, UNPINNED)
OPTIONS: dict[str, dict[str, Any]] = {  # of overlap(), for each row that it makes
    OVERLAPPED: {"never_slower": False},
    FALLBACK: {},
    UNRINGED: {"granularity": "plain", "never_slower": False},
    ALONE: {"granularity": "plain", "halves": None, "layouts": None, "never_slower": False},
    UNCUT: {"halves": None, "never_slower": False},
    UNPINNED: {"layouts": None, "never_slower": False},
}

MOST_SLOWER = 0.03  # that a step may be slower than plain by the rules alone
SLOWER_SHARE = 1 / 20  # of the steps may be slower than plain by the rules alone
LARGE = "no remat, 7B"  # a step that has to gain, and may not move more bytes
LARGE_RATIO = 0.9  # of plain's time


@dataclass(frozen=True)
class Compared:
    """The rows of one step.

    Attributes:
        name: the step's.
        rows: by name of the row.
    """

    name: str
    rows: dict[str, Row]

    @cached_property
    def known(self) -> dict[str, Row]:
        """The rows that have seconds of a complete step."""
        return {name: row for name, row in self.rows.items() if not unfinished(row)}

    def ratio(self, row: str) -> float | None:
        """Return a row's seconds over plain's; None if either is not known."""
        if PLAIN not in self.known or row not in self.known:
            return None
        return self.known[row]["step_s"] / self.known[PLAIN]["step_s"]


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Group rows by step, in the order in which steps come first."""
    names = dict.fromkeys(row["step"] for row in rows)
    return [Compared(n, {r["row"]: r for r in rows if r["step"] == n}) for n in names]


# -- verdicts -------------------------------------------------------------------------------------


def verdicts(steps: Sequence[Compared]) -> tuple[list[str], list[str]]:
    """(what the steps come to, what falls short), a line each."""
    verdicts, short = [], []
    for step in steps:
        short += [
            f"{step.name}, {n}: {why}" for n, r in step.rows.items() if (why := unfinished(r))
        ]
    for row, most, share in ((OVERLAPPED, MOST_SLOWER, SLOWER_SHARE), (FALLBACK, 0.0, 0.0)):
        ratios = {s.name: r for s in steps if (r := s.ratio(row)) is not None}
        if not ratios:
            continue
        slower = {name: ratio for name, ratio in ratios.items() if ratio > 1 + SAME}
        verdicts.append(_summary(row, ratios, slower))
        short += [
            f"{name}, {row}: {ratio:.3f} times plain's time"
            for name, ratio in slower.items()
            if ratio > 1 + max(most, SAME)
        ]
        if len(slower) > share * len(ratios):
            short.append(f"{row}: {len(slower)} of {len(ratios)} steps are slower than plain")
    large = (line for step in steps if step.name == LARGE for line in _large(step))
    return verdicts, short + list(large)


def _summary(row: str, ratios: dict[str, float], slower: dict[str, float]) -> str:
    mean = sum(ratios.values()) / len(ratios)
    worst = max(ratios, key=lambda name: ratios[name])
    by = f", by {ratios[worst] - 1:.1%} at most ({worst})" if slower else ""
    return f"{row}: {len(slower)} of {len(ratios)} slower than plain{by}; {mean:.3f} on average"


def _large(step: Compared) -> Iterator[str]:
    """Yield what the large step falls short of."""
    ratio = step.ratio(OVERLAPPED)
    if ratio is None:
        return
    if ratio > LARGE_RATIO:
        yield f"{step.name}: {ratio:.3f} of plain's time, more than {LARGE_RATIO}"
    plain, mine = (sum(step.known[row]["link_bytes"].values()) for row in (PLAIN, OVERLAPPED))
    if mine > plain:
        yield f"{step.name}: moves {mine / 1e9:.2f} GB a GPU, plain {plain / 1e9:.2f}"


# -- the table ------------------------------------------------------------------------------------

COLUMNS = (
    "plain ms", "overlapped", "ratio", "never slower", "taken", "no rings", "compute", "exposed",
    "NVLink GB", "network GB", "peak GB", "decided", "notes",
)  # fmt: skip
WORDS = ("taken", "decided", "notes")


def table(steps: Sequence[Compared]) -> Table:
    """Make a table with a line a step; "a → b" is of plain and overlapped."""
    head = ("step", "pod", "mesh")
    title = "steps by simulation of XLA's schedules; ms and GB a GPU"
    grid = sheet(title, (*head, *COLUMNS), words=(*head, *WORDS))
    for step in steps:
        row = next(iter(step.rows.values()))
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
        grid.add_row(step.name, row["pod"], mesh, *_cells(step))
    return grid


GAINS = ("taken", "steps", "slower", "least", "median", "most")


def gains(steps: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """Yield under GAINS, for all steps and by what was taken, how many times as fast as plain."""
    times: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        if ratio := step.ratio(FALLBACK):
            for taken in ("all", step.known[FALLBACK]["taken"]):
                times[taken].append(1 / ratio)
    for taken, gained in times.items():
        slower = sum(1 / one > 1 + SAME for one in gained)
        least, most = min(gained), max(gained)
        figures = (f"{one:.2f}" for one in (least, statistics.median(gained), most))
        yield taken, str(len(gained)), str(slower), *figures


def _cells(step: Compared) -> tuple[str, ...]:
    """A step under COLUMNS."""
    plain, mine = step.known.get(PLAIN), step.known.get(OVERLAPPED)
    ms = {n: f"{r['step_s'] * 1e3:.1f}" for n, r in step.known.items()}
    ratio = step.ratio(OVERLAPPED)
    cells = [ms.get(PLAIN, ""), ms.get(OVERLAPPED, ""), f"{ratio:.3f}" if ratio else ""]
    taken = step.known.get(FALLBACK, {}).get("taken", "")
    cells += [ms.get(FALLBACK, ""), taken, ms.get(UNRINGED, "")]
    if plain is None or mine is None:
        reasons = {why: None for row in step.rows.values() if (why := unfinished(row))}
        return (*cells, *[""] * 6, "; ".join(reasons))
    pairs = [(r["compute_s"] * 1e3, r["exposed_s"] * 1e3) for r in (plain, mine)]
    sent = [[r["link_bytes"].get(link, 0) / 1e9 for r in (plain, mine)] for link in _LINKS]
    cells += [f"{a:.1f} → {b:.1f}" for a, b in zip(*pairs, strict=True)]
    cells += [f"{a:.2f} → {b:.2f}" for a, b in sent]
    cells.append(f"{plain['peak_bytes'] / 1e9:.1f} → {mine['peak_bytes'] / 1e9:.1f}")
    return *cells, _decided(mine), "; ".join(notes(mine))


_LINKS = ("NVLink", "network")


def _decided(row: Row) -> str:
    counts = {"rings": "rings", "slices": "sliced", "left_plain": "left", "skipped": "skipped"}
    return ", ".join(f"{row[key]} {word}" for key, word in counts.items() if row.get(key))
