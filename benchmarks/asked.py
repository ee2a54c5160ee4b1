"""Compare overlap()'s default with every explicit setting, by simulation.

python -m benchmarks.asked                     # three steps with cuDNN's attention, ten settings
python -m benchmarks.asked --only "8 hosts"    # one of them

Each setting is compiled for a pod by XLA's GPU compiler and its schedule simulated, as is the
original step's: nothing was timed on a GPU. A step fails where a setting is over 1% faster than the
default. Needs no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame
from benchmarks.children import import_first, in_fork
from benchmarks.drawn import trainer
from benchmarks.drawn.sketch import Sketch
from benchmarks.drawn.step import Step
from benchmarks.frame import (
    Only,
    Written,
    chosen,
    conclude,
    in_ms,
    provenance,
    rows_in,
    sheet,
    write_rows,
)
from benchmarks.pod_step import of_cut

DEFAULT = "unasked"  # as rows name it
MOST_ABOVE = 0.01  # of the best setting's step
CHILD_S = 1200

_SKETCH = Sketch(
    seed=0, pod="h100-sxm:8x8", axes={"dp": 8, "tp": 8}, layers=8, hidden=4096, mlp=16384,
    gated=False, parallel=False, attention="cudnn", heads=32, kv_heads=32, projection="headwise",
    sequence=4096, batch=64, vocab=0, tied=False, loss="labels", dtype="bfloat16", scan=True,
    remat="all", optimizer="sgd", stream="sequence", constrained=("stream", "qkv", "hidden"),
    layout="tp alone", mixed={}, donate=True, stated="in",
)  # fmt: skip
_ONE_HOST = {"pod": "h100-sxm:1x8", "axes": {"dp": 1, "tp": 8}, "batch": 8}
_SKETCHES: dict[str, dict[str, Any]] = {
    "8 hosts": {},
    "one host": _ONE_HOST,
    "8 hosts, stream and heads": {"constrained": ("stream", "qkv")},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "layouts=None": {"layouts": None},
    "halves=None": {"halves": None},
    "granularity=plain": {"granularity": "plain"},
    "halves=2": {"halves": 2},
}
console = Console(width=200)
app = frame.app()


def steps() -> dict[str, Step]:
    """The steps, by name."""
    made = {}
    for name, changes in _SKETCHES.items():
        sketch = replace(_SKETCH, **changes)
        made[name] = Step(name, sketch.pod, sketch.axes, partial(trainer.build, sketch))
    return made


def settings() -> dict[str, dict[str, Any]]:
    """The settings of overlap(), by name: the default, each option, each pair of options."""
    pairs = {
        f"{a}, {b}": {**_OPTIONS[a], **_OPTIONS[b]}
        for a, b in itertools.combinations(_OPTIONS, 2)
        if not _OPTIONS[a].keys() & _OPTIONS[b].keys()
    }
    return {DEFAULT: {}, **_OPTIONS, **pairs}


def measured(name: str, setting: str) -> dict[str, Any]:
    """Compile a step with a setting, and the original step, and simulate both."""
    step = steps()[name]
    built = step.build(jaxoverlap.pod_mesh(step.pod, step.axes))
    overlapped: Any = jaxoverlap.overlap(built.function, cluster=step.pod, **settings()[setting])
    compiled = overlapped.lower(*built.args).compile()
    simulation, speedup = compiled.simulate(), compiled.speedup
    return {
        **provenance(),
        "step_s": simulation.step_s,
        "plain_s": speedup and speedup.plain_s,
        "exposed_s": simulation.exposed_s,
        "taken": speedup.name if speedup else "",
        "unknown": simulation.unknown,
        **(_done(compiled.plan) if compiled.plan else {}),
    }


def _done(plan: jaxoverlap.Plan) -> dict[str, Any]:
    rings = sum(d.site == d.ring for d in plan.decisions)
    return {**of_cut(plan), "pins": len(plan.pins), "rings": rings}


@app.command()
def main(
    only: Only = None,
    setting: Annotated[list[str] | None, typer.Option(help="Only these settings.")] = None,
    out: Written = Path("out/asked.jsonl"),
) -> None:
    """Compile and simulate; exit 1 where a setting is over 1% faster than the default."""
    names = chosen("only", only, steps())
    import_first(["benchmarks.asked"])
    rows = rows_in(out)
    for name, kind in itertools.product(names, chosen("setting", setting, settings())):
        made = in_fork(measured, name, kind, timeout_s=CHILD_S)
        rows[name, kind] = {"step": name, "row": kind, **made}
        console.print(f"{name}, {kind}: {in_ms(made.get('step_s'))}{made.get('error', '')}")
        write_rows(out, rows.values())
    shown = {name: [row for (step, _), row in rows.items() if step == name] for name in names}
    verdicts, short = [], []
    for name, of_step in shown.items():
        console.print(table(name, of_step))
        verdict, falls_short = judged(name, of_step)
        verdicts += verdict
        short += falls_short
    conclude(verdicts, short, console)


def judged(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return a line that compares the default with the best setting, and what falls short."""
    known = {row["row"]: row["step_s"] for row in rows if "step_s" in row}
    short = [f"{name}, {row['row']}: {row['error']}" for row in rows if "error" in row]
    short += [f"{name}, {row['row']}: no plain" for row in rows if not row.get("plain_s", True)]
    if DEFAULT not in known:
        return [], short
    best = min(known, key=lambda setting: known[setting])
    above = known[DEFAULT] / known[best] - 1
    if above > MOST_ABOVE:
        short.append(f"{name}: the default is {above:.1%} above {best}")
    return [f"{name}: default {in_ms(known[DEFAULT])}, best {in_ms(known[best])} ({best})"], short


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make the table of a step, a row per setting."""
    numbers = ("ms", "plain ms", "times", "exposed ms", "parts", "pins", "rings", "taken")
    title = f"{name}: by simulation of XLA's schedules"
    grid = sheet(title, ("asked for", *numbers), words=("asked for",))
    for row in rows:
        plain_s, step_s = row.get("plain_s"), row.get("step_s")
        times = f"{plain_s / step_s:.3f}" if plain_s and step_s else ""
        grid.add_row(
            row["row"], in_ms(step_s), in_ms(plain_s), times, in_ms(row.get("exposed_s")),
            str(row.get("parts", "")), str(row.get("pins", "")), str(row.get("rings", "")),
            row.get("taken", row.get("error", "")),
        )  # fmt: skip
    return grid


if __name__ == "__main__":
    app()
