"""The same training run without and with overlap: do the losses agree, and what was done?

python -m models.demo
"""

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Annotated

import jax
import typer
from matplotlib.figure import Figure
from rich.panel import Panel
from rich.table import Table

import jaxoverlap
from jaxoverlap.hardware.pods import compiler_options
from models.config import Config, Mistake
from models.gpt import RECIPE, abstract_args, make_mesh, make_step
from models.trainer import console, train

OUT = Path("out/demo")
EPSILON = 2.0**-23  # the spacing of float32 numbers, relative to their size
POD, POD_MESH = "h100-sxm:1x8", {"data": 2, "model": 4}

Rows = list[dict[str, float]]


def compare(config: Config) -> None:
    """Train both ways from one seed; print and draw the losses, the plan and a pod's audit."""
    config = dataclasses.replace(config, checkpoint=None)
    plain, *_ = train(RECIPE, dataclasses.replace(config, plain=True, metrics=OUT / "plain.jsonl"))
    overlapped, step, _ = train(
        RECIPE, dataclasses.replace(config, plain=False, metrics=OUT / "overlapped.jsonl")
    )

    print_losses(plain, overlapped)
    draw_losses(plain, overlapped, OUT / "losses.svg")
    print(step.explain(*abstract_args(config, make_mesh(config))))
    print_audit()
    print_summary(plain, overlapped)


def differences(plain: Rows, overlapped: Rows) -> list[float]:
    """|overlapped - plain| / |plain| of the loss, a step at a time."""
    pairs = zip(plain, overlapped, strict=True)
    return [abs(b["loss"] - a["loss"]) / abs(a["loss"]) for a, b in pairs]


def print_losses(plain: Rows, overlapped: Rows) -> None:
    table = Table(title="loss")
    for name in ("step", "plain", "overlapped", "relative difference"):
        table.add_column(name, justify="right")
    relative = differences(plain, overlapped)
    every = max(1, len(plain) // 10)
    for index in sorted({*range(0, len(plain), every), len(plain) - 1}):
        losses = (f"{rows[index]['loss']:.6f}" for rows in (plain, overlapped))
        table.add_row(str(index + 1), *losses, f"{relative[index]:.1e}")

    pictures = Table.grid(padding=(0, 1))
    pictures.add_row(
        Panel(picture([row["loss"] for row in plain]), title="plain", style="cyan"),
        Panel(picture([row["loss"] for row in overlapped]), title="overlapped", style="magenta"),
    )
    console.print(pictures)
    console.print(table)


def picture(values: list[float], *, width: int = 28, height: int = 9) -> str:
    """A curve as filled columns of characters, the range of its columns at the left."""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    columns = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(columns), max(columns)
    scale = (8 * height - 1) / ((high - low) or 1)
    eighths = [1 + round((value - low) * scale) for value in columns]
    lines = []
    for row in reversed(range(height)):
        filled = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, n - 8 * row))] for n in eighths)
        label = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        lines.append(f"{label:>5} {filled}")
    return "\n".join(lines)


def draw_losses(plain: Rows, overlapped: Rows, path: Path) -> None:
    """Both curves above; below, their relative difference on a logarithmic scale."""
    steps = [row["step"] + 1 for row in plain]
    figure = Figure(figsize=(7.6, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))

    # The curves coincide: a thin dark line inside a thick pale one shows both.
    top.plot(steps, [row["loss"] for row in plain], color="#a6cee3", lw=6, label="plain")
    top.plot(
        steps, [row["loss"] for row in overlapped], color="#08306b", lw=1.4, label="overlapped"
    )
    top.set_title("One training run, plain and overlapped", loc="left", weight="bold", pad=12)
    top.set(ylabel="loss, nats per byte")
    top.legend(frameon=False)

    # A logarithm has no place for equal losses: they lie on the bottom line, named as such.
    lowest = EPSILON / 8
    relative = [max(value, lowest) for value in differences(plain, overlapped)]
    bottom.axhline(EPSILON, color="#d94801", lw=1.2, label="one rounding of float32")
    bottom.plot(steps, relative, "o", color="#08306b", ms=3, clip_on=False)
    bottom.set(xlabel="step", ylabel="relative difference", yscale="log")
    bottom.set_ylim(lowest, max(1e-4, 2 * max(relative)))
    bottom.minorticks_off()
    bottom.text(-0.012, 0, "equal", transform=bottom.transAxes, ha="right", va="center")
    bottom.legend(frameon=False, loc="upper right")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set(axisbelow=True, xmargin=0.02)
    figure.savefig(path)


def print_audit() -> None:
    """Print what the compiler's schedule for a pod hides, for the same model at a pod's size."""
    config = Config.pod(**POD_MESH)
    print(f"\nThe same model at hidden {config.hidden}, compiled for {POD} (no GPU is needed):")
    try:
        mesh = jaxoverlap.pod_mesh(POD, POD_MESH)
    except ImportError as error:  # its message says what to install
        print(f"left out: {error}")
        return
    step, args = make_step(config, mesh), abstract_args(config, mesh)
    overlapped = jaxoverlap.overlap(step).lower(*args).compile().audit()
    print(overlapped)
    plain = jaxoverlap.audit(step.lower(*args).compile(compiler_options=compiler_options()))
    print(f"the plain step's:  {plain.total}")


def print_summary(plain: Rows, overlapped: Rows) -> None:
    print()
    table = Table(title="summary")
    for name in ("", "first step, with compiling", "later steps, median", "last loss"):
        table.add_column(name, justify="right")
    for name, rows in (("plain", plain), ("overlapped", overlapped)):
        later = statistics.median(row["seconds"] for row in rows[1:] or rows)
        first, last = rows[0]["seconds"], rows[-1]["loss"]
        table.add_row(name, f"{first:.1f} s", f"{later:.3f} s", f"{last:.4f}")
    console.print(table)
    console.print(
        f"largest relative difference of the losses: {max(differences(plain, overlapped)):.1e}"
    )
    if jax.default_backend() == "cpu":
        console.print("seconds are of devices simulated on a CPU: they say nothing about a GPU")
    console.print(f"curves: {OUT / 'losses.svg'}")


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Train to this many steps.")] = Config.steps,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = Config.seed,
) -> None:
    """Train a small GPT without and with overlap from the same seed, and compare."""
    try:
        compare(Config(steps=steps, seed=seed))
    except Mistake as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
