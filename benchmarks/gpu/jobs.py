"""Run measurements one after the other, each in processes of its own, and write their rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frame import Row, rows_in, write_rows
from benchmarks.gpu.place import LAST_S, Place
from benchmarks.gpu.processes import FailedError, Start, messages
from benchmarks.gpu.wires import Wire


@dataclass(frozen=True)
class Job:
    """A measurement in new processes, which gives rows of one step.

    Attributes:
        step: what is measured.
        row: the name of its row, if it fails before it has one.
        function: "module:name", which sends "doing" and "row"s (`benchmarks.gpu.child`).
        arguments: of the function.
        wire: of several processes that share the GPU; None: one process.
        devices: CPU devices of one process in a rehearsal.
        environment: more variables on a GPU.
        options: more of `Start`.
        seconds_s: that it may take.
    """

    step: str
    row: str
    function: str
    arguments: dict[str, Any]
    wire: Wire | None = None
    devices: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, float] = field(default_factory=dict)
    seconds_s: float = 600.0


def run(
    jobs: Iterable[Job], place: Place, out: Path, until: float, say: Callable[[str], None]
) -> list[Row]:
    """Run jobs until time is up; return all rows of the file, theirs among them.

    Args:
        until: the `time.monotonic()` at which all ends.
        say: shows a line of progress.
    """
    rows = rows_in(out)
    for job in jobs:
        if time.monotonic() > until - LAST_S:
            say(f"{job.step}, {job.row}: not measured, time is up")
            continue
        end = min(until - LAST_S, time.monotonic() + job.seconds_s)
        about, name = dict(place.about), job.row
        if job.wire:
            about |= {"wire": job.wire.name}
        try:
            with _starting(job, place) as start:
                for together in messages(start, job.function, job.arguments, until=end):
                    first = together[0]
                    if first["kind"] == "device":
                        about |= {key: value for key, value in first.items() if key != "kind"}
                    elif first["kind"] == "doing":
                        name = first.get("row", name)
                        say(f"{job.step}, {name}: {first['what']}")
                    else:
                        name = first.get("row", job.row)
                        found = {"step": job.step, "row": name, **about, **_merged(together)}
                        rows[job.step, name] = found
                        write_rows(out, rows.values())
        except FailedError as error:
            say(f"{job.step}, {name}: {error}")
            rows[job.step, name] = {"step": job.step, "row": name, **about, "error": str(error)}
            write_rows(out, rows.values())
    return list(rows.values())


@contextlib.contextmanager
def _starting(job: Job, place: Place) -> Iterator[Start]:
    if job.wire is None:
        yield place.alone(job.devices, job.environment)
        return
    with place.together(job.wire, job.environment, **job.options) as start:
        yield start


def _merged(together: list[Row]) -> Row:
    """Return a row of all processes: a run takes as long as on the slowest."""
    first = {key: value for key, value in together[0].items() if key not in ("kind", "row")}
    if "seconds" in first:
        first["seconds"] = list(map(max, zip(*(m["seconds"] for m in together), strict=True)))
    return first
