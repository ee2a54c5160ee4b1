"""Train a model as its configuration says: the kinds of training, and their command line."""

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, get_type_hints

import jax
import typer

import jaxoverlap
from models.compressed import CompressedTrainer, sync_of
from models.config import Mistake, Run
from models.configured import chosen
from models.local_updates import RoundsTrainer, outer_of
from models.loop import Trained, Trainer
from models.processes import console, start
from models.recipe import Recipe
from models.varlen import DocumentsTrainer


def train(recipe: Recipe, config: Run) -> Trained:
    """Train to `config.steps` steps, from the newest checkpoint if there is one.

    Raises:
        Mistake: if options cannot be, before anything is started.
    """
    check_workers_options(config)
    start(config)
    return kind_of(config)(recipe, config).train()


def kind_of(config: Run) -> type[Trainer]:
    """Return the kind of training that a configuration selects."""
    if config.local_updates:
        return RoundsTrainer
    if config.compress:
        return CompressedTrainer
    return DocumentsTrainer if getattr(config, "varlen", False) else Trainer


def check_workers_options(config: Run) -> None:
    """Check the values of --local-updates and --compress, and their combination.

    Raises:
        Mistake: if there is no such algorithm or compressor, or not of these settings.
    """
    found = list[str]()
    for wanted, make in ((config.local_updates, outer_of), (config.compress, sync_of)):
        try:
            if wanted is not None:
                make(config)
        except Mistake as error:
            found.append(str(error))
    if found:
        raise Mistake("; and ".join(found))


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


def command_line(recipe: Recipe, about: str) -> typer.Typer:
    """Return a command that trains; its flags are the fields of the recipe's configuration."""

    def command(config: Run, given: Collection[str]) -> None:
        try:
            main(*chosen(recipe, config, given))
        except jaxoverlap.LostError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # to leave in order would wait for the processes that are gone

    return command_of(recipe.config, command, about)


def command_of[Options](
    options: type[Options], run: Callable[[Options, Collection[str]], None], about: str
) -> typer.Typer:
    """Return a command whose flags are the fields of a dataclass; a `Mistake` is a usage error.

    Args:
        run: called with the options, and the names of those that the command line gives.
    """

    def command(typer_context: typer.Context, **values: Any) -> None:
        sources = {name: typer_context.get_parameter_source(name) for name in values}
        given = {
            name for name, source in sources.items() if source and source.name == "COMMANDLINE"
        }
        try:
            run(options(**values), given)
        except Mistake as error:
            raise typer.BadParameter(str(error)) from error

    types, flag = get_type_hints(options, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("typer_context", flag, annotation=typer.Context)]
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        needed = field.default is dataclasses.MISSING
        default = inspect.Parameter.empty if needed else field.default
        name = field.name
        parameters.append(inspect.Parameter(name, flag, default=default, annotation=types[name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = about
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(command)
    return app
