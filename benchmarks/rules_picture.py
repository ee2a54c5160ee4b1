"""Draw the suite's steps by rules beside plain and overlapped ones, from the table in docs/results.

python -m benchmarks.rules_picture     # writes docs/ops.svg
"""

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import matplotlib.pyplot as plt
import typer

from benchmarks.pods.suite import PLAIN, RULES, SCHEDULED, STEPS

COLOURS = {PLAIN: "#9aa0a6", RULES: "#4c78a8", SCHEDULED: "#e45756"}
RESULTS = Path("docs/results.md")
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(out: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/ops.svg")) -> None:
    """Draw a bar for each row of each step, plain's as 1."""
    seconds = read(RESULTS.read_text())
    mpl.rcParams["svg.hashsalt"] = "jaxoverlap"  # the same file each time
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for place, (row, colour) in enumerate(COLOURS.items()):
        heights = [seconds[step, row] / seconds[step, PLAIN] for step in STEPS]
        at = [number + (place - 1) * 0.27 for number in range(len(STEPS))]
        bars = axes.bar(at, heights, 0.25, color=colour, label=row)
        if row != PLAIN:
            axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=6.5, padding=1)
    axes.set_xticks(range(len(STEPS)), [name.replace("-", "\n", 1) for name in STEPS], fontsize=8)
    axes.set_ylabel("time of a step, plain's as 1")
    axes.set_ylim(0, 1.18)
    axes.legend(ncols=3, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


def read(text: str) -> dict[tuple[str, str], float]:
    """Read the ms of each step and row from the table of pods; the first one counts."""
    found: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > 3 and cells[0] in STEPS and cells[1] in COLOURS:
            found.setdefault((cells[0], cells[1]), float(cells[2]))
    return found


if __name__ == "__main__":
    app()
