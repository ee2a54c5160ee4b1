"""The training loop that all models share, and its command line."""

import contextlib
import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jaxoverlap
from models.checkpoint import Checkpoints
from models.config import Mistake, Run
from models.recipe import Recipe

console = Console()


class Trained(NamedTuple):
    """The results of training: metrics of each step taken here, the step, the last state."""

    rows: list[dict[str, float]]
    step: Any
    state: Any


def train(recipe: Recipe, config: Run) -> Trained:
    """Train to `config.steps` steps, from the newest checkpoint if there is one."""
    simulate_devices(config)
    if config.local_updates:
        from models import local_updates  # which imports this module

        return local_updates.train(recipe, config)
    mesh, batch_of = recipe.make_mesh(config), recipe.batches(config)
    rows = []

    step = recipe.make_step(config, mesh)
    if not config.plain:
        step = jaxoverlap.overlap(step, halves=config.halves or "auto")

    with Checkpoints(config) as checkpoints:
        state, start = checkpoints.restore(recipe.abstract_args(config, mesh)[0])
        if state is None:
            state = recipe.init_state(config, mesh, config.seed)
        else:
            console.print(f"resuming after step {start} of {config.steps}")

        with metrics_file(config.metrics, start) as write, progress(config, start) as show:
            for index in range(start, config.steps):
                began = time.perf_counter()
                state, metrics = step(state, batch_of(index))
                numbers = {name: float(value) for name, value in metrics.items()}  # waits
                row = {"step": index, **numbers, "seconds": time.perf_counter() - began}
                rows.append(row)
                write(row)
                show(row)
                checkpoints.save(index + 1, state)
    return Trained(rows, step, state)


def main(recipe: Recipe, config: Run) -> list[dict[str, float]]:
    """Train, then say how well, and what became of the step's collectives."""
    rows, step, state = train(recipe, config)
    mesh = recipe.make_mesh(config)
    if recipe.report:
        print(recipe.report(config, mesh, state["params"]))
    if not config.plain and not config.local_updates:
        print(step.explain(*recipe.abstract_args(config, mesh)))
    return rows


def simulate_devices(config: Run) -> None:
    """Give JAX's CPU backend as many devices as the mesh needs; other backends have their own."""
    with contextlib.suppress(RuntimeError):  # JAX has started: it keeps the devices it has
        jax.config.update("jax_num_cpu_devices", max(8, config.devices))


@contextlib.contextmanager
def metrics_file(path: Path | None, start: int) -> Iterator[Callable[[dict], None]]:
    """write(row) adds a line of JSON to the file; lines of steps that are taken again go first."""
    if path is None:
        yield lambda row: None
        return
    lines = path.read_text().splitlines() if start and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", buffering=1) as file:  # a line is on disk when its step is done
        file.writelines(f"{line}\n" for line in lines if json.loads(line)["step"] < start)
        yield lambda row: print(json.dumps(row), file=file)


@contextlib.contextmanager
def progress(config: Run, start: int) -> Iterator[Callable[[dict], None]]:
    """show(row) moves a bar in a terminal, and elsewhere prints a line every log_every steps."""
    label = "plain" if config.plain else "overlapped"
    if not console.is_terminal:
        yield lambda row: print_row(row, label, config)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(f"{label}  compiling", total=config.steps, completed=start)
        yield lambda row: bar.update(
            task, completed=row["step"] + 1, description=f"{label}  loss {row['loss']:.3f}"
        )


def print_row(row: dict[str, float], label: str, config: Run) -> None:
    taken = int(row["step"]) + 1
    if taken % config.log_every == 0 or taken == config.steps:
        known = {"step", "loss", "seconds"}
        others = [f"{k.replace('_', ' ')} {v:.3f}" for k, v in row.items() if k not in known]
        numbers = (f"loss {row['loss']:.4f}", *others, f"{row['seconds']:.3f} s")
        print(f"{label}  step {taken}/{config.steps}", *numbers, sep="  ", flush=True)


def command_line(recipe: Recipe, about: str) -> typer.Typer:
    """A command that trains; its flags are the fields of the recipe's configuration."""

    def command(**options: Any) -> None:
        try:
            main(recipe, recipe.config(**options))
        except Mistake as error:
            raise typer.BadParameter(str(error)) from error

    flag = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [
            inspect.Parameter(field.name, flag, default=field.default, annotation=field.type)
            for field in dataclasses.fields(recipe.config)
        ]
    )
    command.__doc__ = about
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(command)
    return app
