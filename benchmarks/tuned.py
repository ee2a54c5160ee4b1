"""Compare tuned plans on the steps of the pods suite with the best published preset.

python -m benchmarks.tuned                        # ten tunings; about 25 minutes on 2 cores
python -m benchmarks.tuned --only 7b-h100-64      # one

Each step of benchmarks/pods is tuned for its pod (`jaxoverlap.tune`, with a cache of its own that
begins empty), and the plan is compared with the suite's rows of the same step: the plain step by
XLA's defaults, with published presets, and overlapped by rules. All is simulated; nothing was timed
on a GPU. Needs no GPU.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import jaxoverlap
from benchmarks import frame
from benchmarks.frame import (
    Only,
    Row,
    Written,
    chosen,
    conclude,
    provenance,
    read_rows,
    sheet,
    write_rows,
)
from benchmarks.pods.names import PLAIN, SCHEDULED
from benchmarks.pods.rows import best_preset, known, of_step
from benchmarks.pods.suite import STEPS, Step

LEAST_GAIN = 1.15  # geometric mean over the best preset, on the communication-heavy half
COLUMNS = (
    "communication/compute", "best preset", "ms", "rules ms", "tuned ms", "over preset",
    "over plain", "of the bound", "tried", "s",
)  # fmt: skip

console = Console(width=180)
app = frame.app()


@app.command()
def main(
    only: Only = None,
    budget: Annotated[float, typer.Option(help="Seconds for each, as in jaxoverlap.tune.")] = 150.0,
    against: Annotated[Path, typer.Option(help="Rows of benchmarks/pods.")] = Path(
        "benchmarks/results/pods.jsonl"
    ),
    out: Written = Path("out/tuned.jsonl"),
) -> None:
    """Tune and compare; exit 1 if tuned plans gain too little, or lose anywhere."""
    suite = read_rows(against)
    rows: list[Row] = []
    for name in chosen("only", only, STEPS):
        with console.status(name):
            rows.append({"step": name, **tuned(STEPS[name], budget)})
        write_rows(out, rows)
    report(rows, suite)


def tuned(step: Step, budget_s: float) -> Row:
    """Run one tuning; return what the plan predicts, and what it took to find."""
    mesh = jaxoverlap.pod_mesh(step.pod, step.axes)
    function, args = step.build(PLAIN, mesh)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        plan = jaxoverlap.tune(
            function, args, cluster=step.pod, budget_s=budget_s, cache=cache, show=False
        )
        seconds = time.perf_counter() - began
        tried = len(list(Path(cache, "trials").glob("*.json")))
    assert plan.predictions is not None
    return {
        **provenance(),
        "budget_s": budget_s,
        "seconds": round(seconds, 1),
        "tried": tried,
        "plan": summary(plan),
        **{n: getattr(plan.predictions, n) for n in plan.predictions.__struct_fields__},
    }


def summary(plan: jaxoverlap.Plan) -> Row:
    """Summarize the choices of a plan."""
    counts: dict[str, int] = {}
    for decision in plan.decisions:
        if decision.site == decision.ring:
            counts[str(decision.variant)] = counts.get(str(decision.variant), 0) + 1
    return {
        "rings": counts,
        "slack": plan.schedule.slack if plan.schedule else None,
        "xla_options": len(plan.xla_options),
        "channels": len(plan.nccl.channels),
        "plain": plan.plain,
    }


def report(rows: list[Row], suite: list[Row]) -> None:
    """Print the table, and which aims it meets."""
    title = "tuned plans, by simulation; ms a step"
    table = sheet(title, ("step", *COLUMNS), words=("step", "best preset"))
    compared = [compare(row, suite) for row in rows]
    compared.sort(key=lambda c: -c["heavy"])
    for c in compared:
        table.add_row(c["step"], *cells(c))
    console.print(table)
    heavy = compared[: (len(compared) + 1) // 2]
    gain = math.exp(math.fsum(math.log(c["over_preset"]) for c in heavy) / len(heavy))
    console.print(
        f"geometric mean over the best preset, on the {len(heavy)} steps with most communication: "
        f"{gain:.3f}"
    )
    short = [] if gain >= LEAST_GAIN else [f"less than {LEAST_GAIN}"]
    short += [f"{c['step']}: loses" for c in compared if min(c["over_preset"], c["over_plain"]) < 1]
    conclude([], short, console)


def compare(row: Row, suite: list[Row]) -> Row:
    """A tuned step against the suite's rows of it; plain counts among the presets."""
    rows = of_step(suite, row["step"])
    plain, preset = rows[PLAIN], best_preset(rows) or rows[PLAIN]
    best = min(plain, preset, key=lambda r: r["step_s"])
    return row | {
        "heavy": plain["communication_s"] / plain["compute_s"],
        "best": best,
        "rules_s": known(rows)[SCHEDULED]["step_s"],
        "over_preset": best["step_s"] / row["step_s"],
        "over_plain": row["plain_step_s"] / row["step_s"],
    }


def cells(c: Row) -> tuple[str, ...]:
    """A comparison under COLUMNS."""
    return (
        f"{c['heavy']:.2f}",
        c["best"]["row"].removeprefix("plain, "),
        f"{c['best']['step_s'] * 1e3:.1f}",
        f"{c['rules_s'] * 1e3:.1f}",
        f"{c['step_s'] * 1e3:.1f}",
        f"{c['over_preset']:.2f} x",
        f"{c['over_plain']:.2f} x",
        f"{c['bound_s'] / c['step_s']:.0%}",
        str(c["tried"]),
        f"{c['seconds']:.0f}",
    )


if __name__ == "__main__":
    app()
