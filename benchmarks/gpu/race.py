"""Race ways to compile train steps on n processes that share one GPU, over several wires.

For each wire the processes are started anew, under an MPS of their own, measure the wire's prices,
and race the candidates of each step in turn. A candidate that fails or hangs gets a row with its
reason; the others are raced without it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frame import Row, rows_in, write_rows
from benchmarks.gpu.place import LAST_S, PROCESSES, Place
from benchmarks.gpu.processes import FailedError, messages
from benchmarks.gpu.wires import Wire
from benchmarks.lab.timing import Timed, timed

PLAIN, DEFAULT = "plain", "default"
COLUMNS = (
    *("step", "wire", "candidate", "median ms", "fastest", "slowest", "of plain"),
    *("simulated ms", "simulated / measured", "float32 difference", "notes"),
)
NUMBERS = COLUMNS[3:-1]


@dataclass
class Race:
    """The race over wires, and the file of its rows.

    Attributes:
        place: where it runs.
        out: the file of rows; rows that are there stay until they are measured again.
        rounds: how often each candidate runs.
        until: the `time.monotonic()` at which all ends.
        say: shows a line of progress.
    """

    place: Place
    out: Path
    rounds: int
    until: float
    say: Callable[[str], None]
    rows: dict[tuple[str, str], Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = rows_in(self.out)

    def run(self, wires: Sequence[Wire], steps: Sequence[str], candidates: Sequence[str]) -> None:
        """Race on each wire in turn; numbers are compared on the first on which a step is raced."""
        numbers = list(steps)
        for wire in wires:
            if time.monotonic() > self.until - LAST_S:
                self.say(f"{wire.name}: not raced, time is up")
                continue
            jobs = {step: list(dict.fromkeys((PLAIN, *candidates))) for step in steps}
            self._race_on(wire, jobs, numbers)
            done = {s for s, _ in self.rows if self._is_compared(s, wire)}
            numbers = [step for step in numbers if step not in done]

    def dtype(self, wire: Wire) -> str:
        """Return the dtype of matmuls on a wire; float32 in a rehearsal."""
        return wire.dtype if self.place.gpu else "float32"

    def _is_compared(self, step: str, wire: Wire) -> bool:
        row = self.rows.get((step, f"{wire.name}, {PLAIN}"), {})
        return row.get("commit") == self.place.about["commit"] and "difference" in row

    def _race_on(self, wire: Wire, jobs: dict[str, list[str]], numbers: list[str]) -> None:
        """Start processes until every step is raced; without what made them fail, each time."""
        with tempfile.TemporaryDirectory(prefix="prices-") as folder:
            session = _Session(self, wire, jobs, numbers, Path(folder) / "prices.json")
            while session.jobs and time.monotonic() < self.until - LAST_S:
                if not session.go():
                    break


@dataclass
class _Session:
    """What is still to be raced on a wire, and what is known of it.

    Attributes:
        doing: the step and candidate that the processes are at, and what they do.
        device: what they said of their devices.
    """

    race: Race
    wire: Wire
    jobs: dict[str, list[str]]
    numbers: list[str]
    prices: Path
    doing: Row = field(default_factory=dict)
    device: Row = field(default_factory=dict)

    def go(self) -> bool:
        """Race until all is done or something fails; return whether to start again."""
        race, self.doing = self.race, {}
        left_s = race.until - time.monotonic() - LAST_S
        arguments = dict(
            jobs=self.jobs,
            dtype=race.dtype(self.wire),
            hosts=self.wire.hosts(PROCESSES),
            prices=str(self.prices),
            rounds=race.rounds,
            until=time.time() + left_s,
            numbers=self.numbers,
        )
        began = time.monotonic()
        try:
            with race.place.together(self.wire) as start:
                function = "benchmarks.gpu.race_child:race"
                for together in messages(start, function, arguments, until=began + left_s):
                    self._hear(together)
        except FailedError as error:
            return self._failed(str(error))
        return False

    def _hear(self, together: list[Row]) -> None:
        first = together[0]
        step, candidate = first.get("step", ""), first.get("candidate", "")
        match first["kind"]:
            case "device":
                self.device = {k: v for k, v in first.items() if k != "kind"}
            case "doing" if first["what"] == self.doing.get("what") == "racing":
                self.doing = first  # one of many turns
            case "doing":
                self.doing = first
                said = ", ".join(filter(None, (self.wire.name, step, candidate)))
                self.race.say(f"{said}: {first['what']}")
            case "wire":
                self.race.say(f"{self.wire.name}: measured in {first['seconds']:.0f} s")
                self.device |= {"calibration_s": first["seconds"]}
            case "compiled":
                seconds = max(message["compile_s"] for message in together)
                found = dict(compile_s=seconds, taken=first["taken"], simulated=first["simulated"])
                self._set(step, candidate, **found)
            case "refused" | "incomparable":
                why = next((m["why"] for m in together if m["why"]), "")
                name = "error" if first["kind"] == "refused" else "difference_error"
                self._set(step, candidate, **{name: why})
                if name == "error":
                    self.jobs[step].remove(candidate)
            case "raced":
                self._raced(step, timed([message["rows"] for message in together]))
            case "compared":
                worst = max(message["difference"] for message in together)
                self._set(step, candidate, difference=worst)
            case "late":
                self.race.say(f"{self.wire.name}, {step}: not raced, time is up")
            case other:
                raise ValueError(f"message {other!r}: expected one of race_child's")

    def _raced(self, step: str, taken: dict[str, Timed]) -> None:
        for candidate, one in taken.items():
            found = dict(step_s=one.median_s, seconds=list(one.seconds))
            self._set(step, candidate, **found)

    def _set(self, step: str, candidate: str, **found: Any) -> None:
        """Change or add a row, and write the file."""
        rows, key = self.race.rows, (step, f"{self.wire.name}, {candidate}")
        if "compile_s" in found or "error" in found:  # this row is measured anew
            rows.pop(key, None)
        names = {"step": step, "row": key[1], "wire": self.wire.name, "candidate": candidate}
        about = self.race.place.about | self.device | {"dtype": self.race.dtype(self.wire)}
        rows[key] = rows.get(key, {}) | names | about | found
        write_rows(self.race.out, rows.values())

    def _failed(self, why: str) -> bool:
        """Write why the processes failed; return whether the rest is worth another start."""
        self.race.say(f"{self.wire.name}: {why}")
        step, candidate = self.doing.get("step", ""), self.doing.get("candidate", "")
        what = self.doing.get("what", "starting")
        if not step or why == "time is up":
            self._leave(f"{what}: {why}")
            return False
        raced = [s for s in self.jobs if s != step and self._has_seconds(s)]
        for name in raced:
            del self.jobs[name]
        if what.startswith("comparing") or what.startswith("building in"):
            self._set(step, candidate or PLAIN, difference_error=why)
            self.numbers = [s for s in self.numbers if s != step]
            del self.jobs[step]
        elif candidate and candidate != PLAIN:
            self._set(step, candidate, error=f"{what}: {why}")
            self.jobs[step].remove(candidate)
        else:
            self._set(step, candidate or PLAIN, error=f"{what}: {why}")
            del self.jobs[step]
        return True

    def _leave(self, why: str) -> None:
        """Give each candidate that was begun a row with the reason, and each step one at least."""
        rows, commit = self.race.rows, self.race.place.about["commit"]
        for step, candidates in self.jobs.items():
            for candidate in candidates:
                row = rows.get((step, f"{self.wire.name}, {candidate}"))
                begun = row and row["commit"] == commit and not row.keys() & {"step_s", "error"}
                if begun or (row is None and candidate == PLAIN):
                    self._set(step, candidate, error=why)

    def _has_seconds(self, step: str) -> bool:
        row = self.race.rows.get((step, f"{self.wire.name}, {PLAIN}"), {})
        return "step_s" in row and row.get("commit") == self.race.place.about["commit"]


# -- what is shown --------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row under COLUMNS."""
    plain = {
        (row["step"], row["wire"]): row["step_s"]
        for row in rows
        if row["candidate"] == PLAIN and "step_s" in row
    }
    return [_cells(row, plain.get((row["step"], row["wire"]))) for row in rows]


def _cells(row: Row, plain_s: float | None) -> tuple[str, ...]:
    head = row["step"], row["wire"], row["candidate"]
    seconds, simulated_s = row.get("seconds"), row.get("simulated", {}).get("step_s")
    times = ("", "", "")
    if seconds:
        times = (f"{s * 1e3:.2f}" for s in (row["step_s"], min(seconds), max(seconds)))
    of_plain = f"{row['step_s'] / plain_s:.3f}" if seconds and plain_s else ""
    predicted = f"{simulated_s * 1e3:.2f}" if simulated_s else ""
    ratio = f"{simulated_s / row['step_s']:.2f}" if seconds and simulated_s else ""
    off = f"{row['difference']:.1e}" if "difference" in row else ""
    notes = "; ".join(
        str(row[key]) for key in ("taken", "error", "difference_error") if row.get(key)
    )
    return *head, *times, of_plain, predicted, ratio, off, notes.replace("|", "/")


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Say, for each step and wire, how the default compares with the best candidate."""
    by_race: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "step_s" in row:
            by_race.setdefault((row["step"], row["wire"]), {})[row["candidate"]] = row
    lines = []
    for (step, wire), raced in by_race.items():
        if DEFAULT in raced and len(raced) > 1:
            best = min(raced.values(), key=lambda row: row["step_s"])
            more = raced[DEFAULT]["step_s"] / best["step_s"] - 1
            lines.append(f"{step}, {wire}: default {more:+.1%} of {best['candidate']}")
    off = [
        abs(row["simulated"]["step_s"] / row["step_s"] - 1)
        for row in rows
        if "step_s" in row and row["simulated"]["step_s"]
    ]
    if off:
        lines.append(
            f"simulated against measured: {statistics.fmean(off):.1%} off in the mean, "
            f"{max(off):.1%} at most ({len(off)} rows)"
        )
    return lines


def shown(rows: Sequence[Row]) -> Any:
    """Return the columns, the numbers among them, and the cells."""
    return COLUMNS, NUMBERS, table(rows)
