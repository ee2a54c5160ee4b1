"""Compare what zeroth-order fine-tuning learns: a GPT of the Python manual on Python's own source.

    python -m benchmarks.zeroth_order.learning --out learning.jsonl
    python -m benchmarks.zeroth_order.learning --table learning.jsonl

A row is a run from the same kind of first-order checkpoint: the loss on what was held out of the
new text, before and after. Rows that the file has already are not run again.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Job, MaybeOut, Row, Shown, add_missing, read_rows, shown_or_out
from models import finetune_zo, trainer
from models.config import Config
from models.finetune_zo import FineTune
from models.gpt import RECIPE
from models.text import load_text, make_batch

SEEDS = 3
PRETRAINED = 400  # steps
MODULES = ("argparse", "ast", "calendar", "decimal", "inspect", "pathlib", "tarfile", "typing")
# Steps, and rates found by one sweep of seed 0 over powers of about three.
STEPS = {"zeroth": 2000, "first": 200}
RATES = {
    "zeroth: full": 3e-5,
    "zeroth: lora": 1e-4,
    "zeroth: prefix": 1e-2,
    "first: full": 1e-3,
    "first: lora": 3e-3,
}


def source_text(folder: Path) -> Path:
    """Write the source of some modules of Python's into one file."""
    library, path = Path(sysconfig.get_paths()["stdlib"]), folder / "source.txt"
    found = [library / f"{name}.py" for name in MODULES]
    path.write_bytes(b"\n".join(one.read_bytes() for one in found if one.exists()))
    return path


def pretrained(folder: Path, seed: int) -> Path:
    """Train a GPT on the Python manual; return its checkpoint."""
    path = folder / f"gpt{seed}"
    config = Config(
        data=1,
        model=1,
        layers=2,
        hidden=64,
        heads=4,
        mlp=256,
        sequence=64,
        batch=32,
        steps=PRETRAINED,
        save_every=PRETRAINED,
        seed=seed,
        checkpoint=path,
        plain=True,
    )
    trainer.train(RECIPE, config)
    return path


def first_order(options: FineTune, rate: float) -> tuple[Any, Any]:
    """Fine-tune by AdamW on the same parameters; return what was trained and its task."""
    mesh, config = options.mesh(), finetune_zo.configuration(options)
    task = finetune_zo.task_of(options, config, mesh, finetune_zo.restored(options, config, mesh))
    optimizer = optax.adamw(optax.cosine_decay_schedule(rate, options.steps), weight_decay=0.0)
    text = load_text(options.text, sequence=config.sequence)[
        : -finetune_zo.held_out(options, config)
    ]

    @jax.jit
    def step(trained: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(task.loss)(trained, batch, task.frozen)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state

    trained, state = task.trained, optimizer.init(task.trained)
    for number in range(options.steps):
        trained, state = step(trained, state, make_batch(text, config, number))
    return trained, task


def run(name: str, checkpoint: Path, text: Path, seed: int, rate: float, steps: int) -> Any:
    """Run one method; return its row."""
    order, method = name.split(": ")
    options = FineTune(
        checkpoint, method, text, steps=steps, batch=32, seed=seed, learning_rate=rate
    )
    began = time.perf_counter()
    if order == "zeroth":
        _, trained, task = finetune_zo.finetune(options)
    else:
        trained, task = first_order(options, rate)
    seconds = time.perf_counter() - began
    before, after = (finetune_zo.evaluate(options, p, task) for p in (task.trained, trained))
    moved = sum(leaf.size for leaf in jax.tree.leaves(trained))
    return dict(
        method=name, seed=seed, steps=steps, rate=rate, eps=options.transform().eps,
        before=before, after=after, parameters=moved, seconds=seconds,
    )  # fmt: skip


def main(
    out: MaybeOut = None,
    shown: Shown = None,
    method: Annotated[str | None, typer.Option(help="One method, as 'zeroth: full'.")] = None,
    rate: float | None = None,
    steps: int | None = None,
    seeds: int = SEEDS,
) -> None:
    out = shown_or_out(shown, out, table)
    jax.config.update("jax_num_cpu_devices", 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, checkpoint = source_text(folder), functools.cache(partial(pretrained, folder))

        def made(method: str, seed: int, rate: float, steps: int) -> Row:
            return run(method, checkpoint(seed), text, seed, rate, steps)

        jobs: list[Job] = []
        for seed, one in itertools.product(range(seeds), [m for m in RATES if method in (None, m)]):
            many = steps or STEPS[one.split(":")[0]]
            labels = dict(method=one, seed=seed, rate=rate or RATES[one], steps=many)
            jobs.append((labels, partial(made, **labels)))
        add_missing(out, jobs)
    table(out)


def table(path: Path) -> None:
    """Print means and standard deviations over seeds."""
    rows = read_rows(path)
    sheet = Table("method", "rate", "steps", "parameters", "before", "after", "seeds that fell")
    for key in dict.fromkeys((r["method"], r["rate"], r["steps"]) for r in rows):
        matching = [r for r in rows if (r["method"], r["rate"], r["steps"]) == key]
        cells = []
        for name in ("before", "after"):
            values = [r[name] for r in matching]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.3f} ± {spread:.3f}")
        fell = sum(r["after"] < r["before"] for r in matching)
        words = (key[0], f"{key[1]:g}", str(key[2]), f"{matching[0]['parameters']:,}", *cells)
        sheet.add_row(*words, f"{fell} of {len(matching)}")
    Console().print(sheet)


if __name__ == "__main__":
    typer.run(main)
