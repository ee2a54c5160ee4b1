"""Make the rows of steps as written and as an expert writes them, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

import jaxoverlap
from benchmarks.frame import Row, provenance, sheet
from benchmarks.pods.child import seconds
from benchmarks.written import more  # noqa: F401 - it registers its steps
from benchmarks.written.steps import POD, STEPS
from jaxoverlap.hardware.pods import compiler_options

AS_WRITTEN, EXPERT, PLAIN, OVERLAPPED = "as written", "expert", "plain", "overlapped"
COLUMNS = (
    "step", "forgotten", "plain ms", "overlapped", "expert, plain", "expert, overlapped", "ratio"
)  # fmt: skip


def measured(name: str, version: str, row: str) -> Row:
    """Compile a version of a step, and simulate it."""
    step = STEPS[name]
    mesh = jaxoverlap.pod_mesh(POD, step.axes)
    fn, args = step.build(mesh, version == EXPERT)
    built: Any = fn if row == PLAIN else jaxoverlap.overlap(fn, cluster=POD)
    options = compiler_options() if row == PLAIN else None
    compiled = built.lower(*args).compile(options)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        **provenance(),
        **seconds(jaxoverlap.simulate(compiled, POD), lines=False),
        "peak_bytes": memory.peak_memory_in_bytes,
    }


def ratio(rows: Sequence[Row], name: str) -> float | None:
    """Return a step's overlapped seconds as written over the expert's; None if one is missing."""
    found = {
        row["version"]: row.get("step_s")
        for row in rows
        if row["step"] == name and row["row"] == OVERLAPPED
    }
    ours, expert = found.get(AS_WRITTEN), found.get(EXPERT)
    return ours / expert if ours and expert else None


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each step: its milliseconds by version and row, and the ratio."""
    made = []
    for name, step in STEPS.items():
        known = {
            (row["version"], row["row"]): row["step_s"]
            for row in rows
            if row["step"] == name and row.get("step_s")
        }
        if known:
            pairs = ((v, r) for v in (AS_WRITTEN, EXPERT) for r in (PLAIN, OVERLAPPED))
            ms = (f"{known[pair] * 1e3:.1f}" if pair in known else "" for pair in pairs)
            times = ratio(rows, name)
            made.append((name, step.about, *ms, f"{times:.2f}" if times else ""))
    return made


def table(rows: Sequence[Row]) -> Table:
    """Make the table of the rows."""
    made = sheet("steps as written and by an expert, by simulation", COLUMNS, words=COLUMNS[:2])
    for row in cells(rows):
        made.add_row(*row)
    return made
