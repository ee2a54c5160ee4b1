"""Simulate the gain of overlap() on 64 GPUs, and compare the losses of training with and without.

python -m models.demo
"""

import contextlib
import io
import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.panel import Panel
from rich.table import Table

import jaxoverlap
from jaxoverlap.cli.targets.plain import build
from jaxoverlap.hardware.pods import compiler_options
from models.config import Config, Mistake
from models.gpt import RECIPE
from models.processes import start
from models.trainer import console, train

OUT = Path("out/demo")
EPSILON = 2.0**-23  # the spacing of float32 numbers, relative to their size
POD, POD_MESH = "h100-sxm:8x8", {"data": 16, "model": 4}
STEPS = 40

Rows = list[dict[str, float]]


def compare(config: Config) -> None:
    """Train plain and overlapped from one seed; print and draw the losses."""
    console.rule("a small GPT on 8 simulated devices, trained plain and overlapped")
    config = replace(config, checkpoint=None)
    plain, overlapped = trained(config, "plain"), trained(config, "overlapped")
    print_losses(plain, overlapped)
    draw_losses(plain, overlapped, OUT / "losses.svg")
    largest = max(differences(plain, overlapped))
    print(f"largest relative difference of the losses: {largest:.1e}")
    print(f"drawn: {OUT / 'losses.svg'}")


def trained(config: Config, name: str) -> Rows:
    """Train without printing the trainer's lines: seconds on a CPU say nothing about a GPU."""
    print(f"training {config.steps} steps, {name}", flush=True)
    config = replace(config, plain=name == "plain", metrics=OUT / f"{name}.jsonl")
    with contextlib.redirect_stdout(io.StringIO()):
        rows, *_ = train(RECIPE, config)
    return rows


def differences(plain: Rows, overlapped: Rows) -> list[float]:
    """Return |overlapped - plain| / |plain| of each step's loss."""
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
    """Return a curve as columns of block characters, with its range at the left."""
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
    """Draw both loss curves, and below them their relative difference on a logarithmic scale."""
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


def simulate() -> None:
    """Compile a step for 64 GPUs, plain and overlapped; print and draw its simulated time."""
    console.rule(f"four layers on 64 GPUs ({POD}), simulated")
    try:
        mesh = jaxoverlap.pod_mesh(POD, POD_MESH)
    except jaxoverlap.PodsUnavailableError as error:  # its message says what to install
        console.print(f"left out: {error}")
        return
    step, args = build(mesh)
    with console.status("compiling for 64 GPUs that are not here"):
        compiled = jaxoverlap.overlap(step, cluster=POD).lower(*args).compile()
        overlapped = compiled.simulate()
        original = step.lower(*args).compile(compiler_options=compiler_options())
        plain = jaxoverlap.simulate(original, POD)
    OUT.mkdir(parents=True, exist_ok=True)
    overlapped.to_svg(OUT / "step.svg", plain=plain)
    overlapped.to_html(OUT / "step.html", plain=plain)
    print(compiled)
    for name, step_s in (("plain", plain), ("overlapped", overlapped)):
        line = f"{name:>10}: {step_s.step_s * 1e3:5.1f} ms, of which {step_s.exposed_s * 1e3:4.1f}"
        print(f"{line} waiting for communication")
    print(f"drawn: {OUT / 'step.svg'}; to zoom into: {OUT / 'step.html'}\n")


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Train to this many steps.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = Config.seed,
) -> None:
    """Simulate a step on 64 GPUs, then train a small GPT plain and overlapped, and compare."""
    try:
        config = Config(steps=steps, seed=seed)
        start(config)  # before JAX counts its devices
        simulate()
        compare(config)
    except Mistake as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
