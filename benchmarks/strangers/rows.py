"""Compare two runs of a third-party trainer, check its rows, and tabulate them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks import frame
from benchmarks.frame import Row
from jaxoverlap import Plan

WHAT = ("numbers", "plain", "overlapped", "picture", "halves")
BY_RULES = ("by_rules", "ruled")  # of layers that are given a matmul, where they take one
ON_CPU = ("numbers", "halves", "by_rules")
MAX_DIFFERENCE = 1e-4  # of a loss, gradient or state in float32: rings add in another order

COLUMNS = (
    "step", "mesh", "matmuls", "ringed", "none", "skipped", "loss", "gradient", "state",
    "hops covered", "GB covered", "plain: GB covered", "temp", "compile s", "as XLA does",
    "in halves",
)  # fmt: skip
WORDS = 2  # of the columns; the others are numbers


# -- what a row says ------------------------------------------------------------------------------


def compare(plain: Row, ringed: Row) -> Row:
    """Compare the results of two runs from one start, as relative differences.

    A run has "losses", one a step, and "state", the float leaves after the first step by path.
    """
    apart = {p: difference(plain["state"][p], ringed["state"][p]) for p in plain["state"]}
    # Adam's first moments after one step are the gradients, a tenth of each.
    gradients = {p: d for p, d in apart.items() if re.search(r"\bmu\b", p)}
    others = {p: d for p, d in apart.items() if p not in gradients}
    worst, worst_state = (max(by_path, key=by_path.__getitem__) for by_path in (gradients, others))
    return {
        "losses": plain["losses"],
        "loss_difference": max(map(difference, plain["losses"], ringed["losses"])),
        "gradients": len(gradients),
        "gradients_zero": sum(not np.any(plain["state"][p]) for p in gradients),
        "gradient_difference": gradients[worst],
        "worst_gradient": worst,
        "state_difference": others[worst_state],
        "worst_state": worst_state,
    }


def difference(plain: Any, other: Any) -> float:
    """Return the norm of the difference, relative to plain's norm."""
    gap, size = np.linalg.norm(np.subtract(plain, other)), np.linalg.norm(plain)
    return 0.0 if gap == 0 else float(gap / size) if size else float("inf")


def summary(plan: Plan) -> Row:
    """Count the matmuls with rings, those without a collective, and the reasons for skips."""
    reasons = Counter(skip.reason for skip in plan.skips if not skip.idle)
    return {
        "sites": len(plan.entries),
        "ringed": len(plan.decisions),
        "no_collective": sum(skip.idle for skip in plan.skips),
        "skips": dict(reasons.most_common()),
        "parts": plan.split.parts if plan.split else 0,
        "planned_bytes": sum(d.bytes_moved for d in plan.decisions),
        "plan": str(plan),
    }


def error_of(code: int, stderr: str) -> str:
    """Return a failed run's own error, on one line and without the folders of its paths."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    named = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    last = " ".join(lines[named[-1] if named else -1 :])
    return f"exit {code}: {re.sub(r'(?<![\w.])/(?:[^\s/:]+/)+', '', last)[:500]}"


def shortfalls(row: Row) -> list[str]:
    """List what is wrong with a row, a line each."""
    name = f"{row['case']}: {row['what']}"
    if "error" in row:
        return [f"{name} failed: {row['error']}"]
    if row["what"] in ON_CPU:
        return [f"{name}: {problem}" for problem in _numbers_shortfalls(row)]
    if row["what"] in ("overlapped", "ruled") and row["hops"]["synchronous"]:
        return [f"{name}: {row['hops']['synchronous']} hops are synchronous"]
    return [f"{name}: XLA does otherwise: {text}" for text in row.get("otherwise", ())]


def _numbers_shortfalls(row: Row) -> Iterable[str]:
    for kind in ("loss", "gradient", "state"):
        apart = row[f"{kind}_difference"]
        if not apart <= MAX_DIFFERENCE:  # NaN too
            which = f" {row[f'worst_{kind}']}" if kind != "loss" else ""
            yield f"{kind}{which} is {apart:.1e} off"
    if row["gradients_zero"]:  # the comparison would say nothing of what they come from
        yield f"{row['gradients_zero']} of {row['gradients']} gradients are zero"
    if row["what"] == "halves" and not row["parts"]:
        yield "its rows are not cut"
    if row["what"] not in BY_RULES and not row["ringed"]:
        yield "no matmul is ringed"


# -- how rows read --------------------------------------------------------------------------------


def table_cells(rows: list[Row]) -> list[list[str]]:
    """A line for each case, under COLUMNS; what failed is left empty."""
    by = {(row["case"], row["what"]): row for row in rows if "error" not in row}
    names = dict.fromkeys(row["case"] for row in rows)
    return [[name, *_cells(*(by.get((name, what), {}) for what in WHAT))] for name in names]


def _cells(numbers: Row, plain: Row, ringed: Row, picture: Row, halves: Row) -> list[str]:
    plan = ringed or numbers or picture
    cells = [" x ".join(f"{axis} {n}" for axis, n in plan.get("mesh", {}).items())]
    cells += [str(plan.get(k, "")) for k in ("sites", "ringed", "no_collective")]
    cells.append(str(sum(plan["skips"].values())) if "skips" in plan else "")
    names = ("loss_difference", "gradient_difference", "state_difference")
    cells += [f"{numbers[k]:.1e}" if numbers else "" for k in names]
    cells.append(f"{ringed['hops']['covered']} of {ringed['hops']['count']}" if ringed else "")
    cells += [_gigabytes(row) for row in (ringed, plain)]
    both = ringed and plain
    cells.append(f"{ringed['temp_bytes'] / plain['temp_bytes']:.2f} x" if both else "")
    cells.append(f"{ringed['compile_s']:.0f} ({plain['compile_s']:.0f})" if both else "")
    cells.append(f"{picture['same']} of {_told(picture)}" if picture else "")
    worst = max((halves[k] for k in names), default=0.0) if halves else None
    cells.append("" if worst is None else f"{worst:.1e}")
    return cells


def _told(picture: Row) -> int:
    """The matmuls whose work on one device XLA's partitioned program shows."""
    return picture["same"] + len(picture["otherwise"])


def _gigabytes(row: Row) -> str:
    if not row:
        return ""
    total = row["all"]
    return f"{total['bytes_covered'] / 1e9:.2f} of {total['bytes_moved'] / 1e9:.2f}"


def skipped_lines(rows: list[Row]) -> list[str]:
    """Yield why matmuls with a collective were skipped, a line for each case and reason."""
    plans = {row["case"]: row["skips"] for row in rows if row.get("skips")}
    return [
        f"{name}: {count} skipped: {reason}"
        for name, skips in plans.items()
        for reason, count in skips.items()
    ]


def by_rules(rows: list[Row]) -> list[str]:
    """Say what layers that were given a matmul came to, a line for each run."""
    lines = []
    for row in rows:
        if row["what"] == "by_rules" and "error" not in row:
            worst = max(row[f"{kind}_difference"] for kind in ("loss", "gradient", "state"))
            lines.append(f"{row['case']} by rules: {worst:.1e} from plain")
        if row["what"] == "ruled" and "error" not in row:
            hops = row["hops"]
            lines.append(
                f"{row['case']} by rules: {hops['covered']} of {hops['count']} hops covered, "
                f"{_gigabytes(row)} GB"
            )
    return lines


def markdown(rows: list[Row]) -> str:
    """The table, as docs/results.md shows it, and the reasons of skipped matmuls."""
    table = frame.markdown(COLUMNS, table_cells(rows), COLUMNS[WORDS:])
    reasons = [f"- {line}" for line in skipped_lines(rows)]
    return "\n".join([table, *([""] if reasons else []), *reasons]) + "\n"
