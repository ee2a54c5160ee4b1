"""Draw the pictures of the pages from the rows in benchmarks/results.

python -m benchmarks.pictures                # writes docs/*.svg
python -m benchmarks.pictures ops --out ops.svg
python -m benchmarks.pictures plan --lengths FOLDER   # docs/varlen.png, which needs real lists
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import typer

from benchmarks import frame
from benchmarks.frame import Row, read_rows

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
app = frame.app()


@app.command()
def main(
    name: Annotated[str | None, typer.Argument(help="One picture; by default all of rows.")] = None,
    out: Annotated[Path | None, typer.Option(help="Its file; by default the page's.")] = None,
    lengths: Annotated[Path | None, typer.Option(help="Folder of lists, for `plan`.")] = None,
) -> None:
    """Draw one picture, or all that rows are enough for."""
    if name == "plan":
        if lengths is None:
            raise typer.BadParameter("plan needs --lengths, the folder of the lists")
        plan(lengths, out or DOCS / "varlen.png")
        return
    for one in frame.chosen("name", [name] if name else None, PICTURES):
        draw(one, out or DOCS / f"{one}.svg")


def draw(name: str, out: Path) -> None:
    """Write a picture of rows, the same file each time."""
    matplotlib.rcParams["svg.hashsalt"] = "jaxoverlap"
    PICTURES[name]().savefig(out, metadata={"Date": None})


def _rows(name: str) -> list[Row]:
    return read_rows(RESULTS / f"{name}.jsonl")


def ops() -> Any:
    """Draw a bar for each row of each step of the suite, plain's as 1."""
    from benchmarks.pods.names import PLAIN, RULES, SCHEDULED
    from benchmarks.pods.suite import STEPS

    colours = {PLAIN: "#9aa0a6", RULES: "#4c78a8", SCHEDULED: "#e45756"}
    rows = (*_rows("pods"), *_rows("pods_by_rules"))
    seconds = {(row["step"], row["row"]): row["step_s"] for row in rows if "step_s" in row}
    figure, axes = plt.subplots(figsize=(8.6, 4.6), layout="constrained")
    for offset, (row, colour) in enumerate(colours.items()):
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
    return figure


def compression() -> Any:
    """Draw how many times as fast as no compression, against the links' rate.

    A line per method, each with a look of its own: L-GreCo's solid, others dashed.
    """
    colours = {"PowerSGD": "#08519c", "QSGD": "#a63603", "TopK": "#006d2c"}
    rows = _rows("compression_race")
    found = {(r["framework"], r["method"], r["rate_mbit"]): r["step_s"] for r in rows}
    rates = sorted({r["rate_mbit"] for r in rows})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for framework, method in dict.fromkeys((r["framework"], r["method"]) for r in rows):
        if method in ("none", "alone"):
            continue
        kind = method.rpartition(", ")[2]
        line = [
            (rate, found[framework, "none", rate] / found[framework, method, rate])
            for rate in rates
            if (framework, method, rate) in found
        ]
        style: Any = {"ls": "--", "marker": "^", "mfc": "white"}
        if framework == "PyTorch":
            style = {"ls": ":", "marker": "s", "color": "0.4"}
        elif "L-GreCo" in method:
            style = {"ls": "-", "marker": "o"}
        name = f"PyTorch DDP, {method}" if framework == "PyTorch" else method
        style = {"color": colours[kind], **style}
        axes.plot(*zip(*line, strict=True), ms=5, label=name, **style)
    axes.axhline(1, color="0.6", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="rate of every link, Mbit/s")
    axes.set(ylabel="times as fast as no compression", title="four hosts, a step")
    axes.minorticks_off()
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ticks = (0.5, 1, 2, 5, 10, 20)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend(frameon=False, fontsize=9, handlelength=3.5)
    return figure


def local_updates() -> Any:
    """Draw tokens a second of one GPU, simulated, against the number of GPUs."""
    found = [r for r in _rows("local_updates_pods") if r["what"] == "scale"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for every in sorted({r["every"] for r in found}, reverse=True):
        line = sorted((r["workers"], r["tokens_per_s"]) for r in found if r["every"] == every)
        name = f"CO2, every {every}" if every else "AdamW, synchronous"
        style: dict[str, Any] = {} if every else dict(color="black", linestyle="--")
        each = [tokens / workers / 1e3 for workers, tokens in line]
        axes.plot([w for w, _ in line], each, marker="o", markersize=4, label=name, **style)
    workers = sorted({r["workers"] for r in found})
    axes.set_xscale("log", base=2)
    axes.set_ylim(0)
    axes.set_xticks(workers, [str(count) for count in workers])
    axes.set(
        xlabel="GPUs, a worker each",
        ylabel="thousand tokens/s of one GPU",
        title="a100-sxm-80, 80 Gbit/s a host (simulated)",
    )
    axes.legend(frameon=False, fontsize=8)
    return figure


def zeroth_order() -> Any:
    """Draw tokens per second against GPUs, sliced and not, and compiled bytes against ZO2's."""
    from benchmarks.zeroth_order.pods import PUBLISHED_GB

    rows = [r for r in _rows("zeroth_order_pods") if r["chip"] == "a100-sxm-80"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    large = [r for r in rows if r["model"] == "175b" and r["layers"] == 96]
    alone = next(r for r in large if r["gpus"] == 1)
    for sliced, name in ((True, "each GPU uploads a slice"), (False, "each uploads whole blocks")):
        several = [r for r in large if r["gpus"] > 1 and r["sliced"] == sliced]
        line = sorted((r["gpus"], r["tokens_per_s"]) for r in [alone, *several])
        left.plot(*zip(*line, strict=True), marker="o", label=name)
    left.set(xlabel="GPUs of one host", ylabel="tokens/s", ylim=0, title="OPT-175B, simulated")
    left.legend(frameon=False)
    names = list(PUBLISHED_GB)
    right.plot(names, list(PUBLISHED_GB.values()), "k--", marker="x", label="ZO2, published")
    for gpus in (1, 4):
        found = {r["model"]: r["device_bytes"] for r in rows if r["gpus"] == gpus and r["sliced"]}
        known = [name for name in names if name in found]
        values = [found[name] / 1e9 for name in known]
        right.plot(known, values, marker="o", label=f"{gpus} GPU{'s' * (gpus > 1)}")
    right.set(xlabel="OPT", ylabel="GB on a device", ylim=0, title="compiled memory")
    right.legend(frameon=False)
    return figure


def plan(lengths: Path, out: Path) -> None:
    """Plan batches of 128K tokens, no document above a quarter; draw the one of most ring sizes.

    On two nodes of eight H200s.
    """
    import numpy as np

    from benchmarks.varlen.table import first, setup_of
    from jaxoverlap.train.varlen import Planner

    known = np.loadtxt(lengths / "wlbllm.txt", dtype=int)
    setup = setup_of("C", 2, 8192)
    planner = Planner(setup.costs, setup.nodes, capacity=setup.capacity)
    sample = first(known, 16 * 8192, 60, seed=1, share=0.25)
    planner.fit(sample)
    plans = map(planner, sample)
    plan = max(plans, key=lambda plan: (len(set(plan.size.tolist())), plan.balance))
    print(plan)
    plan.draw(out)


PICTURES: Mapping[str, Callable[[], Any]] = {
    "ops": ops,
    "compression": compression,
    "local_updates": local_updates,
    "zeroth_order": zeroth_order,
}


if __name__ == "__main__":
    app()
