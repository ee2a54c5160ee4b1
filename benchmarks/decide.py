"""Measure how long overlap() takes to decide and compile a step, next to a plain compile.

python -m benchmarks.decide                     # five minutes on two idle cores, and an install
python -m benchmarks.decide --only "MLP, data 16 x model 4"

Wall clock, each step in a process of its own: tracing, lowering and compiling the plain step; and
the same of the overlapped one, which is searched for, compared with the plain one and compiled.
Counted are the questions to XLA's partitioner, the candidates that were evaluated, and the programs
that XLA compiled, in this process and in children. Nothing runs. MaxText gets an environment of its
own. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

import jaxoverlap
from benchmarks import explicit, frame
from benchmarks.children import import_first, in_child, in_fork
from benchmarks.drawn.step import Built, lower
from benchmarks.frame import Only, Row, Written, chosen, provenance
from benchmarks.pods.names import SCHEDULED
from benchmarks.pods.suite import STEPS as SUITE
from benchmarks.strangers.environments import environment_of
from benchmarks.strangers.pod_steps import POD_STEPS
from jaxoverlap._jax import partitioner
from jaxoverlap.cli.targets.plain import build as build_mlp
from jaxoverlap.flags.required import SEEN
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.search import choice, compiled, search

CHILD_S = 1200
COLUMNS = (
    "step", "plain s", "deciding s", "all s", "times", "partitions", "candidates", "compiles",
    "seconds by stage",
)  # fmt: skip
console = Console(width=200)
app = frame.app()


def _mlp() -> Built:
    fn, args = build_mlp(jaxoverlap.pod_mesh("h100-sxm:8x8", {"data": 16, "model": 4}))
    return Built(fn, args)


def _of_suite(name: str) -> Callable[[], Built]:
    def built() -> Built:
        step = SUITE[name]
        fn, args = step.build(SCHEDULED, jaxoverlap.pod_mesh(step.pod, step.axes))
        return Built(fn, args)

    return built


def _unrolled() -> Built:
    model = explicit.CASES["transformer, FSDP 64"]
    axes = {"data": model.data, "model": model.model}
    return explicit.build(model, jaxoverlap.pod_mesh(model.pod, axes), "automatic")


def _maxtext() -> Built:
    step = POD_STEPS["maxtext, fsdp 8 x tensor 8"]
    return step.build(jaxoverlap.pod_mesh(step.pod, step.axes))


CASES: dict[str, Callable[[], Built]] = {
    "MLP, data 16 x model 4": _mlp,
    "7B, 32 scanned layers, 64 H100s": _of_suite("7b-h100-64"),
    "8 unrolled layers, FSDP 64": _unrolled,
    "mixture of experts, 64 H100s": _of_suite("moe-h100-64"),
    "MaxText, fsdp 8 x tensor 8": _maxtext,
}
OTHERS = {"MaxText, fsdp 8 x tensor 8": "maxtext fsdp 8"}  # in environments of their own


def measured(case: str) -> Row:
    """Return the seconds of a step, plain and overlapped, and what was asked of XLA."""
    warnings.simplefilter("ignore")
    built = CASES[case]()
    with built.context(), counted() as counts, tempfile.TemporaryDirectory() as kept:
        began = time.perf_counter()
        options = {**compiler_options(), **{setting.name: setting.value for setting in SEEN}}
        lower(built.function, built.args).compile(compiler_options=options)
        plain_s = time.perf_counter() - began
        counts.clear()
        with mock.patch.object(choice, "kept_folder", lambda: Path(kept)):
            began = time.perf_counter()
            lowered = lower(jaxoverlap.overlap(built.function), built.args)
            decided_s = time.perf_counter() - began
            lowered.compile()
            all_s = time.perf_counter() - began
    stages = {name: s for name, s in counts.items() if name not in ("partitions", "children")}
    return {
        "plain_s": plain_s,
        "decided_s": decided_s,
        "all_s": all_s,
        "partitions": counts["partitions"],
        "candidates": len(lowered.plan.trail),
        "compiles": counts["children"] + 1,
        "stages": stages,
        **provenance(),
    }


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count questions to the partitioner, children, and the seconds of each stage."""
    counts = Counter[str]()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    through = search._through
    partitions = counting("partitions", partitioner._partitioned)

    def timed(stage: search.Stage, *args: Any) -> None:
        began = time.perf_counter()
        through(stage, *args)
        counts[stage.name] += time.perf_counter() - began  # type: ignore[assignment]

    with (
        mock.patch.object(partitioner, "_partitioned", partitions),
        mock.patch.object(compiled, "attempt", counting("children", compiled.attempt)),
        mock.patch.object(search, "_through", timed),
    ):
        yield counts


@app.command()
def main(only: Only = None, out: Written = Path("benchmarks/results/decide.jsonl")) -> None:
    """Measure the steps, one after the other, and print a table."""
    names = chosen("--only", only, CASES)
    import_first([__name__])
    rows = frame.rows_in(out)
    for name in names:
        if name in OTHERS:
            python = environment_of(OTHERS[name], console)
            made = in_child("benchmarks.decide_child", name, python=python)
        else:
            made = in_fork(measured, name, timeout_s=CHILD_S)
        rows[name, "overlapped"] = {"step": name, "row": "overlapped", **made}
        frame.write_rows(out, rows.values())
        console.print(name, made.get("error", f"{made.get('all_s', 0.0):.1f} s"))
    shown = [_shown(row) for row in rows.values() if "error" not in row]
    words = ("step", "seconds by stage")
    console.print(frame.filled("seconds to decide and compile", COLUMNS, shown, words=words))


def _shown(row: Row) -> tuple[str, ...]:
    stages = sorted(row["stages"].items(), key=lambda item: -item[1])
    return (
        row["step"],
        *(f"{row[name]:.1f}" for name in ("plain_s", "decided_s", "all_s")),
        f"{row['all_s'] / row['plain_s']:.1f}",
        *(str(row[name]) for name in ("partitions", "candidates", "compiles")),
        ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages if seconds >= 0.05),
    )


if __name__ == "__main__":
    app()
