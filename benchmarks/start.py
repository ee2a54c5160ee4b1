"""Measure when training's first step is done, and its later ones, with `start="plain"`.

python -m benchmarks.start                      # some minutes on two idle cores

Each row is a process of its own, on 8 CPU devices: `jax.jit`; `overlap(start="plain")`, which
searches, compiles and times candidates meanwhile; and both again, with JAX's compilation cache and
the decision of the run before. Aims: the first step at most 1.15 times as late as `jax.jit`'s (1.1
again), and of 200 steps none later by more than 2%.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from rich.console import Console

import jaxoverlap
from benchmarks import frame, plain_gpt
from benchmarks.children import import_first, in_fork
from benchmarks.frame import Only, Row, Written, chosen, provenance
from benchmarks.plain_gpt import MEGATRON, Sizes

CHILD_S = 900
STEPS = 200
MESH = {"fsdp": 2, "tp": 4}
SMALL = Sizes(layers=2, hidden=128, heads=4, mlp=512, vocab=512, batch=8, sequence=64)
CASES = {
    "GPT, 2 layers of 128": SMALL,
    "GPT, 8 layers of 256": replace(SMALL, layers=8, hidden=256, heads=8, mlp=1024),
}
RUNS = ("jit", "jit again", "plain", "plain again")
COLUMNS = ("step", "run", "first s", "of jit's", "last s", "latest", "trial steps", "kept")
console = Console(width=160)
app = frame.app()


def trained(case: str, run: str, folder: str) -> Row:
    """Train in this process; return when each step was done, in seconds since the first call."""
    warnings.simplefilter("ignore")
    start = run.removesuffix(" again")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", f"{folder}/{start}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    sizes, axes = CASES[case], (AxisType.Auto,) * len(MESH)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axes)
    step: Any = plain_gpt.make_step(sizes, mesh, MEGATRON)
    weights, moments, *tokens = _filled(plain_gpt.abstract_args(sizes, mesh))
    if start == "plain":
        step = jaxoverlap.overlap(
            step, start="plain", cache=f"{folder}/decisions", on_trials=lambda _: None
        )
    began, done, loss = time.perf_counter(), list[float](), None
    for _ in range(STEPS):
        weights, moments, loss = step(weights, moments, *tokens)
        loss.block_until_ready()
        done.append(time.perf_counter() - began)
    row: Row = {"done_s": [round(s, 4) for s in done], "loss": float(loss or 0.0), **provenance()}
    if start == "plain":
        trials = step.trials[0]
        row |= {"trial_steps": trials.trial_steps, "kept": trials.taken, "said": str(trials)}
    return row


def _filled(shapes: Any) -> Any:
    """Return arrays of these shapes: tokens, or small numbers."""
    rng = np.random.default_rng(0)

    def one(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if np.issubdtype(shape.dtype, np.integer):
            value = rng.integers(0, 256, shape.shape)
        else:
            value = np.abs(rng.standard_normal(shape.shape)) * 0.02
        return jax.device_put(value.astype(shape.dtype), shape.sharding)

    return jax.tree.map(one, shapes)


@app.command()
def main(only: Only = None, out: Written = Path("benchmarks/results/start.jsonl")) -> None:
    """Train each step four times, and print a table."""
    import_first([__name__])
    rows = frame.rows_in(out)
    for name in chosen("--only", only, CASES):
        with tempfile.TemporaryDirectory() as folder:
            for run in RUNS:
                made = in_fork(trained, name, run, folder, timeout_s=CHILD_S)
                rows[name, run] = {"step": name, "row": run, **made}
                frame.write_rows(out, rows.values())
                console.print(name, run, made.get("error", ""))
    shown = [_shown(row, rows) for row in rows.values() if "error" not in row]
    words = ("step", "run", "kept")
    console.print(frame.filled("seconds to a step", COLUMNS, shown, words=words))


def _shown(row: Row, rows: dict[tuple[str, str], Row]) -> tuple[str, ...]:
    """Return the cells of a run: `latest` is how much later a step was than `jax.jit`'s at most."""
    done, plain = row["done_s"], rows[row["step"], row["row"].replace("plain", "jit")]["done_s"]
    latest = max(mine / theirs for mine, theirs in zip(done, plain, strict=True)) - 1
    return (
        *(row["step"], row["row"], f"{done[0]:.2f}", f"{done[0] / plain[0]:.2f}"),
        *(f"{done[-1]:.2f}", f"{latest:+.1%}"),
        *(str(row.get("trial_steps", "")), row.get("kept", "")),
    )


if __name__ == "__main__":
    app()
