"""Report the rows of a suite: the table, and the verdicts on them."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.frame import Row, sheet
from benchmarks.pods.names import OVERLAPPED, PLAIN, PRESET_ROWS, SCHEDULED
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.passes.scheduling.reorder import SAME
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS

MAX_EXPOSED_RATIO, MAX_MEMORY_RATIO = 0.25, 1.15  # of plain's
NEEDED = (PLAIN, OVERLAPPED, SCHEDULED)  # without these there is nothing to compare
BEST_PRESET = "plain, best preset"
COLUMNS = (
    "step ms", "compute", "communication", "exposed", "bound", "of it", "of plain's", "peak GB",
    "temp GB",
    "compile s", "CPU s", "pass s", "notes",
)  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """All rows, step by step; of the presets only the best."""
    title = "train steps on pods, by simulation of XLA's schedules; ms and GB a GPU"
    grid = sheet(title, ("step", "row", *COLUMNS), words=("step", "row", "notes"))
    for step in steps(rows):
        mine = of_step(rows, step)
        for row in shown(mine):
            grid.add_row(step, row["row"], *cells(row, mine.get(PLAIN, {}).get("bound_s")))
        grid.add_section()
    return grid


def cells(row: Row, plain_bound_s: float | None = None) -> tuple[str, ...]:
    """A row under COLUMNS; its bound includes what overlap adds, plain's does not."""
    if why := unfinished(row):
        return ("",) * (len(COLUMNS) - 1) + (why,)
    ms = ("step_s", "compute_s", "communication_s", "exposed_s", "bound_s")
    return (
        *(f"{row[name] * 1e3:.1f}" for name in ms),
        f"{row['step_s'] / row['bound_s']:.3f}",
        f"{row['step_s'] / plain_bound_s:.3f}" if plain_bound_s else "",
        *(f"{row[name] / 1e9:.1f}" for name in ("peak_bytes", "temp_bytes")),
        *(f"{row[name]:.0f}" for name in ("compile_s", "compile_cpu_s")),
        f"{row['pass_s']:.1f}" if "pass_s" in row else "",
        "; ".join(notes(row)),
    )


def notes(row: Row) -> list[str]:
    """List the remarks that belong to a row's numbers."""
    remarks = [row["preset"]] if "preset" in row else []
    if row["peak_bytes"] > row["chip_bytes"]:
        remarks.append(f"does not fit in {row['chip_bytes'] / 1e9:.0f} GB")
    if row["unknown"]:
        remarks.append("unknown: " + ", ".join(row["unknown"]))
    if row.get("order_kept"):
        remarks.append(f"XLA's order: {row['order_kept']}")
    return remarks


def steps(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["step"] for row in rows))


def of_step(rows: Iterable[Row], step: str) -> dict[str, Row]:
    """A step's rows by name."""
    return {row["row"]: row for row in rows if row["step"] == step}


def shown(rows: dict[str, Row]) -> list[Row]:
    """A step's rows, with the best preset instead of all that have seconds."""
    listed = [row for name, row in rows.items() if name not in PRESET_ROWS or unfinished(row)]
    if best := best_preset(rows):
        name = best["row"].removeprefix("plain, ")
        listed.insert(1, {**best, "row": BEST_PRESET, "preset": name})
    return listed


def best_preset(rows: dict[str, Row]) -> Row | None:
    """The fastest of the presets whose seconds are known."""
    presets = [row for name, row in known(rows).items() if name in PRESET_ROWS]
    return min(presets, key=lambda row: row["step_s"], default=None)


def known(rows: dict[str, Row]) -> dict[str, Row]:
    """The rows that have seconds of a complete step, by name."""
    return {name: row for name, row in rows.items() if not unfinished(row)}


def unfinished(row: Row) -> str:
    """Return why a row has no seconds of a complete step; empty if it has them."""
    if UNKNOWN_TRIPS in row.get("unknown", ()):
        return f"{UNKNOWN_TRIPS}: the simulation ran one turn of its layers"
    return row.get("error", "")


# -- verdicts -------------------------------------------------------------------------------------


def refused(rows: Iterable[Row]) -> list[str]:
    """List the flags that XLA refuses, a line for each preset."""
    refused = {row["row"]: row["refused"] for row in rows if row.get("refused")}
    return [f"{name}: this XLA refuses {', '.join(flags)}" for name, flags in refused.items()]


def verdicts(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """(what holds and what each part adds, what falls short), a line each."""
    lines, short = [], []
    for step in steps(rows):
        mine = of_step(rows, step)
        for name, row in mine.items():
            if why := unfinished(row):  # an opponent that XLA fails on is no fault of the step
                (short if name in NEEDED else lines).append(f"{step}, {name}: {why}")
        good = known(mine)
        if SCHEDULED not in good:
            continue
        for line, holds in _held(good):
            (lines if holds else short).append(f"{step}: {line}")
        if OVERLAPPED in good:
            lines.append(f"{step}: {what_the_pass_adds(good[OVERLAPPED], good[SCHEDULED])}")
    return lines, short


def _held(rows: dict[str, Row]) -> Iterable[tuple[str, bool]]:
    """Yield each aim for overlapped + pass, and whether it holds."""
    mine = rows[SCHEDULED]
    others = [row for name, row in rows.items() if name != SCHEDULED]
    if others:
        best = min(others, key=lambda row: row["step_s"])
        times = best["step_s"] / mine["step_s"]
        line = f"{times:.3f} times as fast as the best of the others, {best['row']}"
        yield line, mine["step_s"] <= best["step_s"] * (1 + SAME)
    if PLAIN in rows:
        plain = rows[PLAIN]
        line, little = exposed(rows)
        yield line, little or not copies(mine["pod"])
        ratio = mine["peak_bytes"] / plain["peak_bytes"]
        yield f"{ratio:.2f} times plain's peak memory", ratio <= MAX_MEMORY_RATIO


def copies(pod: str) -> bool:
    """Return whether hops inside a host are copies, which leave less exposed than NCCL's can."""
    return parse_cluster(pod).gpus_per_process > 1


def exposed(rows: dict[str, Row]) -> tuple[str, bool]:
    """Say whether the exposed time is at most a quarter of plain's, wherever the bound allows.

    A step lasts at least as long as its busiest link. Kernels run for compute + slowdown, so the
    link's time beyond those is exposed in any order: the bound allows a quarter where that rest is
    no more. The link's seconds are the least that any row of the step needs: a row that sends more,
    or slower, is not excused by it.
    """
    mine, plain = rows[SCHEDULED], rows[PLAIN]
    link_s = min(max(row["link_s"].values()) for row in rows.values())
    least_s = max(0.0, link_s - mine["compute_s"] - mine["slowdown_s"])
    goal_s = MAX_EXPOSED_RATIO * plain["exposed_s"]
    ratio = mine["exposed_s"] / plain["exposed_s"] if plain["exposed_s"] else 0.0
    line = f"{mine['exposed_s'] * 1e3:.1f} ms exposed, {ratio:.2f} of plain's"
    if least_s > goal_s:
        return f"{line}; the busiest link leaves {least_s * 1e3:.1f} ms exposed at least", True
    return line, mine["exposed_s"] <= goal_s


def what_the_pass_adds(barriers: Row, scheduled: Row) -> str:
    """Say whether barriers alone are as fast, or what the pass saves."""
    saved = barriers["step_s"] - scheduled["step_s"]
    if abs(saved) <= SAME * barriers["step_s"]:
        return "barriers suffice: the pass finds nothing faster"
    return (
        f"the pass takes {saved * 1e3:.1f} ms off ({saved / barriers['step_s']:.1%}), "
        f"exposed {barriers['exposed_s'] * 1e3:.1f} → {scheduled['exposed_s'] * 1e3:.1f} ms"
    )
