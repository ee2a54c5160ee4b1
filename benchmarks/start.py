"""Measure when training's first step is done, and its later ones, with `start="plain"`.

python -m benchmarks.start                      # some minutes a step on two idle cores
python -m benchmarks.start --only "MLP, data 2 x model 4"

The steps are those of benchmarks/decide.py and one of flax's nnx, at sizes and meshes for 8 CPU
devices: as many layers, small matrices, and attention as XLA compiles it for CPUs. Each row is a
process of its own: `jax.jit`; `overlap(start="plain")`, which searches, compiles and times
candidates meanwhile; and both again, with JAX's compilation cache and the decision of the run
before. Aims: the first step at most 1.15 times as late as `jax.jit`'s (1.1 again), and of 200 steps
none later by more than 2%.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from rich.console import Console

import jaxoverlap
from benchmarks import explicit, frame, plain_gpt
from benchmarks.children import import_first, in_fork
from benchmarks.drawn.step import Built
from benchmarks.frame import Only, Row, Written, chosen, provenance
from jaxoverlap.cli.targets import nnx, plain
from models import moe

CHILD_S = 900
STEPS = 200
SMALL = {"BATCH": 16, "LENGTH": 64, "WIDTH": 128, "HIDDEN": 512}
SCANNED = plain_gpt.Sizes(layers=32, hidden=128, heads=4, mlp=512, vocab=512, batch=8, sequence=64)
UNROLLED = explicit.Model("", 8, 1, 8, 256, 512, 16, 64, scan=False, by_hand=False, vocab=512)


def _mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def _target(module: ModuleType, layers: int) -> Built:
    """Return a target that `jaxoverlap new-target` writes, with other sizes."""
    vars(module).update(SMALL, LAYERS=layers)  # in this process
    return Built(*module.build(_mesh(data=2, model=4)))


def _scanned() -> Built:
    mesh = _mesh(fsdp=2, tp=4)
    step = plain_gpt.make_step(SCANNED, mesh, plain_gpt.EVERYWHERE)
    return Built(step, plain_gpt.abstract_args(SCANNED, mesh))


def _unrolled() -> Built:
    attention = jax.nn.dot_product_attention

    def on_cpus(*args: Any, implementation: str = "cudnn", **more: Any) -> jax.Array:
        return attention(*args, **more)

    jax.nn.dot_product_attention = on_cpus  # in this process, for cuDNN's
    return explicit.build(UNROLLED, _mesh(data=8, model=1), "automatic")


def _experts() -> Built:
    config = moe.Config(layers=32)
    mesh = moe.RECIPE.make_mesh(config)
    return Built(moe.make_step(config, mesh), moe.abstract_args(config, mesh))


CASES: dict[str, Callable[[], Built]] = {
    "MLP, data 2 x model 4": lambda: _target(plain, 4),
    "GPT, 32 scanned layers": _scanned,
    "8 unrolled layers, FSDP 8": _unrolled,
    "mixture of experts, 32 scanned layers": _experts,
    "nnx, 8 unrolled layers": lambda: _target(nnx, 8),
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
    built = CASES[case]()
    step, args = built.function, jax.block_until_ready(_filled(built.args))
    if start == "plain":
        step = jaxoverlap.overlap(
            step, start="plain", cache=f"{folder}/decisions", on_trials=lambda _: None
        )
    done, results = list[float](), None
    with built.context():
        began = time.perf_counter()
        for _ in range(STEPS):
            results = jax.block_until_ready(step(*args))
            done.append(time.perf_counter() - began)
            args = _next(args, results)
    floats = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    row: Row = {"done_s": [round(s, 4) for s in done], **provenance()}
    row["norm"] = float(optax.global_norm(floats))
    if isinstance(step, jaxoverlap.Overlapped):
        (trials,) = step.trials
        row |= {"trial_steps": trials.trial_steps, "kept": trials.taken, "said": str(trials)}
    return row


def _next(args: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
    """Return the next call's arguments: the first results replace arguments that are like them."""
    made = results if isinstance(results, tuple) else (results,)
    like = 0
    while like < min(len(made), len(args)) and _types(made[like]) == _types(args[like]):
        like += 1
    return *made[:like], *args[like:]


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def _filled(shapes: Any) -> Any:
    """Return arrays of these shapes: counters of 0, tokens, or small numbers."""
    rng = np.random.default_rng(0)

    def one(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if not np.issubdtype(shape.dtype, np.integer):
            value = np.abs(rng.standard_normal(shape.shape)) * 0.02
        else:
            value = rng.integers(0, 256 if shape.ndim else 1, shape.shape)
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
