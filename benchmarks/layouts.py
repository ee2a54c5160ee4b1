"""Compile steps whose layout is left to XLA, and the same steps with Megatron's constraints.

python -m benchmarks.layouts                      # each step of benchmarks.pods, in_shardings only
python -m benchmarks.layouts --only 7b-h100-64    # one of them; the 7B step has partial ones too

Rows: the step as it is ("plain"), laid out and overlapped with the scheduler pass ("laid out"), and
the fully constrained step overlapped ("constrained"), which is what the second is measured by. Each
is compiled for its pod by XLA's GPU compiler and simulated: nothing was timed on a GPU, and needs
none. Seconds to decide are those of this machine.
"""

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxoverlap
from benchmarks import frame, plain_gpt
from benchmarks.children import import_first, in_fork
from benchmarks.frame import Only, Row, Written, chosen, conclude, provenance, sheet, write_rows
from benchmarks.pods.child import seconds
from benchmarks.pods.suite import STEPS, Step
from jaxoverlap.hardware.pods import compiler_options
from jaxoverlap.search.stages import LAYOUT_STAGES

NONE, STREAM, FUSED, ALL = "none", "stream alone", "dot_product_attention", "all"
PLAIN, LAID_OUT, CONSTRAINED = "plain", "laid out", "constrained"
PARTIAL = {"7b-h100-64": (STREAM, FUSED)}  # what the user constrains, in place of nothing at all
MOST = 1.05  # times the constrained step, overlapped
CHILD_S = 900

app = frame.app()
console = Console(width=160)


def rows_of(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a step: its name, what is constrained, and what is compiled."""
    yield name, ALL, CONSTRAINED
    for constraints in (NONE, *PARTIAL.get(name, ())):
        yield name, constraints, PLAIN
        yield name, constraints, LAID_OUT


def measured(name: str, constraints: str, row: str) -> Row:
    """Compile a row, simulate it, and time the decision."""
    step = STEPS[name]
    mesh = jaxoverlap.pod_mesh(step.pod, step.axes)
    with _constraints(constraints):
        built, args = _built(step, constraints, mesh)
        built.trace(*args)  # jit remembers the trace, and with it what is constrained
    options, decide_s, plan = compiler_options(), 0.0, None
    function: Any = built
    if row != PLAIN:
        mode = "repair" if constraints != NONE else "complete"
        function = jaxoverlap.overlap(
            built,
            cluster=step.pod,
            never_slower=False,
            layouts=mode if row == LAID_OUT else None,
        )
        began = time.perf_counter()
        plan = function.explain(*args)
        decide_s, options = time.perf_counter() - began, None
    compiled = function.lower(*args).compile(options)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        **provenance(),
        **seconds(jaxoverlap.simulate(compiled, step.pod), lines=False),
        "temp_bytes": memory.temp_size_in_bytes,
        "decide_s": round(decide_s, 1),
        **(_searched(plan) if plan else {}),
    }


def _searched(plan: jaxoverlap.Plan) -> Row:
    assert plan.price is not None
    return {
        "pins": len(plan.pins),
        "questions": sum(one.stage in LAYOUT_STAGES for one in plan.trail),
        "plain_price_s": plan.price.plain_s,
        "price_s": plan.price.plain_s - plan.price.saved_s.get("layouts", 0.0),
    }


@contextmanager
def _constraints(constraints: str) -> Iterator[None]:
    """Leave out the constraints of a model that writes them everywhere, or inside attention."""
    patches: dict[str, Any] = {
        NONE: mock.patch("jax.lax.with_sharding_constraint", lambda x, *_: x),
        FUSED: mock.patch("benchmarks.plain_gpt.attention", _attention),
    }
    with patches.get(constraints, nullcontext()):
        yield


def _built(step: Step, constraints: str, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    if step.gpt is None:
        module = importlib.import_module(f"models.{step.model}")
        config = module.RECIPE.config.pod(**step.axes, **step.changes)
        return module.make_step(config, mesh), module.abstract_args(config, mesh)
    pinned = {
        NONE: {},
        STREAM: plain_gpt.STREAM,
        FUSED: plain_gpt.MEGATRON,
        ALL: plain_gpt.EVERYWHERE,
    }[constraints]
    return plain_gpt.make_step(step.gpt, mesh, pinned), plain_gpt.abstract_args(step.gpt, mesh)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, pin: plain_gpt.Pin, *_: Any) -> jax.Array:
    """Attention as JAX has it, which takes no constraints inside."""
    del pin
    return jax.nn.dot_product_attention(
        q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), is_causal=True
    )


@app.command()
def main(
    only: Only = None,
    out: Written = Path("out/layouts.jsonl"),
) -> None:
    """Compile and simulate; exit 1 if a step with a searched layout is too slow."""
    import_first(["benchmarks.pods.child"])
    rows: list[Row] = []
    for job in (job for name in chosen("only", only, STEPS) for job in rows_of(name)):
        row = in_fork(measured, *job, timeout_s=CHILD_S)
        rows.append(dict(zip(("step", "constraints", "row"), job, strict=True)) | row)
        write_rows(out, rows)
        console.print(" · ".join(job), row.get("error") or f"{row['step_s'] * 1e3:.1f} ms")
    console.print(table(rows))
    conclude([], list(too_slow(rows)), console)


def too_slow(rows: list[Row]) -> Iterator[str]:
    """Yield the steps whose searched layout is too slow, or failed."""
    constrained = {row["step"]: row for row in rows if row["row"] == CONSTRAINED}
    for row in rows:
        named = f"{row['step']}, {row['constraints']}, {row['row']}"
        if "error" in row:
            yield f"{named}: {row['error']}"
        elif row["row"] == LAID_OUT and "step_s" in constrained[row["step"]]:
            times = row["step_s"] / constrained[row["step"]]["step_s"]
            if times > MOST:
                yield f"{named}: {times:.3f} times the constrained step, expected {MOST}"


COLUMNS = ("step ms", "exposed", "temp GB", "decide s", "pins", "asked", "price ms")


def table(rows: list[Row]) -> Table:
    """All rows, by step; estimates are before any ring, without pins and with."""
    words = ("step", "constraints", "row")
    title = "steps with searched layouts, by simulation of XLA's schedules"
    shown = sheet(title, (*words, *COLUMNS), words=words)
    for row in rows:
        cells = [row[name] for name in words]
        shown.add_row(*cells, *([row["error"]] if "error" in row else _cells(row)))
    return shown


def _cells(row: Row) -> list[str]:
    estimates = ""
    if "price_s" in row:
        estimates = f"{row['plain_price_s'] * 1e3:.0f} -> {row['price_s'] * 1e3:.0f}"
    return [
        f"{row['step_s'] * 1e3:.1f}",
        f"{row['exposed_s'] * 1e3:.1f}",
        f"{row['temp_bytes'] / 1e9:.1f}",
        str(row["decide_s"] or ""),
        str(row.get("pins", "")),
        str(row.get("questions", "")),
        estimates,
    ]


if __name__ == "__main__":
    app()
