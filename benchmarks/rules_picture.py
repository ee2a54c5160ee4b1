"""Draw the suite's steps by rules, plain and overlapped, from the rows in benchmarks/results.

python -m benchmarks.rules_picture     # writes docs/ops.svg
"""

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import matplotlib.pyplot as plt
import typer

from benchmarks.pod_step import read_rows
from benchmarks.pods.suite import PLAIN, RULES, SCHEDULED, STEPS

COLOURS = {PLAIN: "#9aa0a6", RULES: "#4c78a8", SCHEDULED: "#e45756"}
RESULTS = Path(__file__).parent / "results"
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/ops.svg")) -> None:
    """Draw a bar for each row of each step, plain's as 1."""
    seconds = read()
    mpl.rcParams["svg.hashsalt"] = "jaxoverlap"  # the same file each time
    figure, axes = plt.subplots(figsize=(8.6, 4.6), layout="constrained")
    for offset, (row, colour) in enumerate(COLOURS.items()):
        heights = [seconds[step, row] / seconds[step, PLAIN] for step in STEPS]
        positions = [number + (offset - 1) * 0.27 for number in range(len(STEPS))]
        bars = axes.bar(positions, heights, 0.25, color=colour, label=row)
        if row != PLAIN:
            texts = [f"{height:.2f}" for height in heights]
            axes.bar_label(bars, texts, fontsize=9, padding=2, rotation=90)
    axes.set_xticks(range(len(STEPS)), [name.replace("-", "\n", 1) for name in STEPS], fontsize=9)
    axes.set_ylabel("time of a step, plain's as 1")
    axes.set_ylim(0, 1.25)
    axes.legend(ncols=3, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


def read() -> dict[tuple[str, str], float]:
    """Return the seconds of each step and row of the suite."""
    rows = [*read_rows(RESULTS / "pods.jsonl"), *read_rows(RESULTS / "pods_by_rules.jsonl")]
    return {(row["step"], row["row"]): row["step_s"] for row in rows if "step_s" in row}


if __name__ == "__main__":
    app()
