"""The training loop that all models share, and its command line."""

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import typer

import jaxoverlap
from models.checkpoint import Checkpoints
from models.config import Mistake, Run
from models.configured import chosen
from models.feed import Feed
from models.processes import console, start, within_s
from models.recipe import Recipe
from models.report import Report

PROFILE = Path("out/profile")


class Trained(NamedTuple):
    """The results of training: metrics of each step taken here, the step, the last state."""

    rows: list[dict[str, float]]
    step: Any
    state: Any


def train(recipe: Recipe, config: Run) -> Trained:
    """Train to `config.steps` steps, from the newest checkpoint if there is one.

    Raises:
        Mistake: if options cannot be, before anything is started.
    """
    check_workers_options(config)
    start(config)
    if config.local_updates:
        from models import local_updates  # which imports this module

        return local_updates.train(recipe, config)
    if config.compress:
        from models import compressed  # which imports this module

        return compressed.train(recipe, config)
    if getattr(config, "varlen", False):
        from models import varlen  # which imports this module

        return varlen.train(recipe, config)
    mesh = recipe.make_mesh(config)
    step = overlapped(recipe.make_step(config, mesh), config)

    with Checkpoints(config) as checkpoints, jaxoverlap.lost_named(within_s(config)):
        state, begin = checkpoints.restore(recipe.abstract_args(config, mesh)[0])
        if state is None:
            state = recipe.init_state(config, mesh, config.seed)
        else:
            console.print(f"resuming after step {begin} of {config.steps}")
        feed = Feed(recipe, config, mesh, begin)

        with Report(recipe, config, mesh, begin) as report:
            for index, batch in zip(range(begin, config.steps), feed, strict=False):
                with profiled(index - begin, config):
                    state, metrics = step(state, batch)
                report.add(index, metrics)  # fetches those of the step before
                checkpoints.save(index + 1, state, feed.state())
    return Trained(report.rows, step, state)


def check_workers_options(config: Run) -> None:
    """Check the values of --local-updates and --compress, and their combination.

    Raises:
        Mistake: if there is no such algorithm or compressor, or not of these settings.
    """
    from models import compressed, local_updates  # which import this module

    found = list[str]()
    for wanted, make in (
        (config.local_updates, local_updates.outer_of),
        (config.compress, compressed.sync_of),
    ):
        try:
            if wanted is not None:
                make(config)
        except Mistake as error:
            found.append(str(error))
    if found:
        raise Mistake("; and ".join(found))


def overlapped(step: Any, config: Run) -> Any:
    """Overlap a step with the configuration's options; every process follows process 0's plan."""
    if config.plain or config.ops:
        return step
    if config.plan:
        path = config.plan
        try:
            plan = jaxoverlap.agreed(lambda: jaxoverlap.Plan.read(path))
        except (OSError, ValueError) as error:
            raise Mistake(f"--plan {path}: {error}") from error
        return jaxoverlap.overlap(step, plan=plan)
    return jaxoverlap.overlap(step, halves=config.halves or "auto")


def main(recipe: Recipe, config: Run) -> list[dict[str, float]]:
    """Train, then print the losses and what was done with the step's collectives."""
    rows, step, state = train(recipe, config)
    mesh = recipe.make_mesh(config)
    if recipe.report and jax.process_count() == 1:
        console.print(recipe.report(config, mesh, state["params"]))
    varlen = getattr(config, "varlen", False)
    if config.plain or config.has_workers or varlen or jax.process_index() != 0:
        return rows
    if config.ops:
        print(jaxoverlap.audit(step.lower(*recipe.abstract_args(config, mesh)).compile()))
    else:
        print(step.explain(*recipe.abstract_args(config, mesh)))
    return rows


@contextlib.contextmanager
def profiled(index: int, config: Run) -> Iterator[None]:
    """Profile the number of steps in `config.profile`, from the second step on."""
    if not 1 <= index <= config.profile:
        yield
        return
    with contextlib.ExitStack() as stack:
        if index == 1:
            jax.profiler.start_trace(str(PROFILE))
        stack.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=index))
        yield
    if index == config.profile:
        jax.effects_barrier()
        jax.profiler.stop_trace()
        console.print(f"traced {index} steps: {PROFILE}")


def command_line(recipe: Recipe, about: str) -> typer.Typer:
    """Return a command that trains; its flags are the fields of the recipe's configuration."""

    def command(**options: Any) -> None:
        try:
            main(*chosen(recipe, recipe.config(**options)))
        except Mistake as error:
            raise typer.BadParameter(str(error)) from error
        except jaxoverlap.LostError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # to leave in order would wait for the processes that are gone

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
