"""Show what a race measured: tables by rate, and speed-up by rate against the prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.lab.timing import hidden

Row = dict[str, Any]
ALONE = ("compute alone", "communication alone")
_COLORS = {"jaxoverlap": "#08306b", "by hand": "#d94801", "plain, flags": "#969696"}


def rows_of(case: str, rate_mbit: float, timed: dict[str, Any], more: dict[str, Any]) -> list[Row]:
    """Make the rows of one case at one rate, one a contender.

    Args:
        timed: by contender, from `timing.timed`.
        more: what goes into every row; of "predicted_s" each contender its own.
    """
    predictions = more.pop("predicted_s", {})
    alone = [timed[name].median_s for name in ALONE] if ALONE[0] in timed else None
    rows = []
    for name, one in timed.items():
        row = {
            "case": case,
            "rate_mbit": rate_mbit,
            "contender": name,
            "step_s": one.median_s,
            "seconds": list(one.seconds),
            "sent_bytes": one.sent_bytes,
            "predicted_s": predictions.get(name),
            **more,
        }
        if alone and name not in ALONE:
            row["hidden"] = hidden(one.median_s, *alone)
            row["over_bound"] = one.median_s / max(alone)
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Tabulate rows: seconds, speed over plain, share hidden, over the bound, bytes, prediction."""
    grid = Table(title="medians of all runs, interleaved; hidden: of what could be")
    for name in ("case", "Mbit/s", "contender"):
        grid.add_column(name, justify="left" if name != "Mbit/s" else "right")
    for name in ("ms", "of plain", "hidden", "of bound", "MB sent", "by form", "predicted"):
        grid.add_column(name, justify="right")
    for row in rows:
        plain_s = step_s(rows, row, "plain")
        form = row.get("closed_form_bytes")
        cells = (
            f"{row['step_s'] * 1e3:.0f}",
            f"{plain_s / row['step_s']:.2f} x" if plain_s and row["contender"] not in ALONE else "",
            f"{row['hidden']:.0%}" if "hidden" in row else "",
            f"{row['over_bound']:.2f}" if "over_bound" in row else "",
            f"{row['sent_bytes'] / 1e6:.1f}",
            f"{form / 1e6:.1f}" if form else "",
            f"{row['predicted_s'] * 1e3:.0f}" if row.get("predicted_s") else "",
        )
        head = row["case"], f"{row['rate_mbit']:g}", row["contender"]
        grid.add_row(*head, *cells, end_section=row["contender"] == "jaxoverlap")
    return grid


def step_s(rows: Sequence[Row], like: Row, contender: str) -> float | None:
    """Return the median step of a contender in the case and at the rate of another row."""
    same = (
        r["step_s"]
        for r in rows
        if r["contender"] == contender
        and (r["case"], r["rate_mbit"]) == (like["case"], like["rate_mbit"])
        and r.get("framework") == like.get("framework")
    )
    return next(same, None)


def prediction_error(rows: Sequence[Row]) -> float:
    """Return the mean of |predicted / measured - 1|."""
    errors = [abs(r["predicted_s"] / r["step_s"] - 1) for r in rows if r.get("predicted_s")]
    return statistics.fmean(errors)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each case: how many times as fast as plain, against the rate of links."""
    cases = list(dict.fromkeys(r["case"] for r in rows if r["contender"] == "jaxoverlap"))
    lines = math.ceil(len(cases) / 2)
    # 8.6 inches are the width of a page, where 10 points are as tall as the page's letters.
    figure = Figure(figsize=(8.6, 3.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, 2, squeeze=False, sharey=True).flat)
    for ax in axes[len(cases) :]:
        ax.remove()
    for ax, case in zip(axes, cases, strict=False):
        ours = [r for r in rows if r["case"] == case and r.get("framework") != "PyTorch"]
        for name in dict.fromkeys(r["contender"] for r in ours):
            if name == "plain" or name in ALONE:
                continue
            points = sorted((r["rate_mbit"], r) for r in ours if r["contender"] == name)
            ys = [_over_plain(ours, r, r["step_s"]) for _, r in points]
            ax.plot([x for x, _ in points], ys, "o-", ms=4, color=_COLORS.get(name), label=name)
            if name == "jaxoverlap":
                predicted = [_predicted(ours, r) for _, r in points]
                ax.plot(
                    [x for x, _ in points],
                    predicted,
                    "--",
                    color=_COLORS[name],
                    label="jaxoverlap, predicted",
                )
        ax.axhline(1, color="0.6", lw=1)
        ax.set(xscale="log", xlabel="rate of every link, Mbit/s", title=case)
        ax.minorticks_off()
        rates = sorted({r["rate_mbit"] for r in ours})
        ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
        ax.grid(axis="y", color="0.92")
        ax.spines[["top", "right"]].set_visible(False)
    figure.supylabel("times as fast as plain jit", fontsize=10)
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=110)


def _over_plain(rows: Sequence[Row], row: Row, seconds: float) -> float:
    plain_s = step_s(rows, row, "plain")
    assert plain_s is not None
    return plain_s / seconds


def _predicted(rows: Sequence[Row], row: Row) -> float:
    plain = next(
        r for r in rows if r["contender"] == "plain" and r["rate_mbit"] == row["rate_mbit"]
    )
    return plain["predicted_s"] / row["predicted_s"]
