"""The command that ranks the ways to split a model over a cluster."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from jaxoverlap.cli.configure_model import Simulated, simulate_best
from jaxoverlap.cli.configure_model import shown as simulated_table
from jaxoverlap.cli.configure_step import rank, shown
from jaxoverlap.cli.output import OK, Json, command, say, show_json
from jaxoverlap.cli.target import Pod, parse_axes
from jaxoverlap.parallelism.configure import Configurations
from jaxoverlap.parallelism.configure import configure as configured
from jaxoverlap.parallelism.model import Transformer
from jaxoverlap.parallelism.stack import STACKS

_TRAINER = "models.configured:build"


class StackName(StrEnum):
    """The training software that the form can count."""

    JAX = "jax"
    MEGATRON = "megatron"


@command
def configure(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's name, as in gpt-175b, or a JSON file of its sizes; with --over your "
            "own step, MODULE:FUNCTION."
        ),
    ],
    *,
    pod: Pod,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step.", min=1)] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=1)] = None,
    fix: Annotated[
        str | None, typer.Option("--axes", help="Sizes of some axes, as in model=8,pipeline=1.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Count collectives as nothing hides them.")
    ] = False,
    keep: Annotated[int | None, typer.Option(help="How many to rank; default: 10.", min=1)] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture: time by term, time against memory.")
    ] = None,
    stack: Annotated[
        StackName, typer.Option(help="The training software: this project's trainers, or Megatron.")
    ] = StackName.JAX,
    trainer: Annotated[
        str, typer.Option(help="With --compile: the function that builds a model's step.")
    ] = _TRAINER,
    over: Annotated[
        str | None, typer.Option(help="Axes of your own step's mesh, as in data,model.")
    ] = None,
    compiled: Annotated[
        int, typer.Option("--compile", help="Compile the best so many and simulate them.", min=0)
    ] = 0,
    json: Json = False,
) -> int:
    """Which mesh a model should have on a cluster, by an analytical form.

    With `--compile 3` a trainer's step is compiled for the pod on the best three, and simulated;
    the answer is the fastest.

    With `--over` your own step is priced on each mesh by XLA's partitioner, and the best compiled.

    `--json` writes what the trainers take: python -m models.train_gpt --configuration FILE.
    """
    if over is not None:
        given = {"--global-batch": global_batch, "--sequence": sequence, "--axes": fix}
        given |= {"--plain": plain, "--keep": keep, "--picture": picture}
        given |= {"--stack": stack is not StackName.JAX, "--trainer": trainer != _TRAINER}
        if ignored := [name for name, value in given.items() if value]:
            raise ValueError(
                f"{', '.join(ignored)}: of a model, and --over is of your own step, which has its "
                "sizes; leave one of them out"
            )
        ranked = rank(model, pod, [name.strip() for name in over.split(",")], compiled=compiled)
        if json:
            show_json(ranked)
        else:
            say(shown(ranked, pod))
        return OK
    if global_batch is None:
        raise ValueError("a model wants --global-batch; your own step wants --over and its axes")
    if trainer != _TRAINER and not compiled:
        raise ValueError("--trainer builds what --compile compiles: give --compile 3 with it")
    if compiled and stack is not StackName.JAX:
        raise ValueError(f"--compile with --stack {stack}: JAX steps alone can be compiled here")
    axes = {name: [size] for name, size in parse_axes(fix).items()} if fix else None
    found = configured(
        _model(model),
        pod,
        global_batch=global_batch,
        sequence=sequence,
        axes=axes,
        overlap=not plain,
        keep=max(keep or 10, compiled),
        stack=STACKS[stack],
    )
    if picture:
        from jaxoverlap.parallelism.picture import draw

        draw(found, picture)
    simulated = simulate_best(found, compiled, trainer, _progress) if compiled else []
    if json:
        show_json(_builtins(found, simulated))
        return OK
    say(str(found))
    if simulated:
        say("\n" + simulated_table(simulated))
    return OK


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _builtins(found: Configurations, simulated: list[Simulated]) -> dict[str, Any]:
    """Return all of it as plain data, the answer first."""
    data = found.to_builtins()
    if simulated:
        rows = {id(s): row for s, row in zip(found, data["configurations"], strict=True)}
        data["configurations"] = [
            {
                **rows[id(one.scored)],
                "simulated_s": one.simulated_s,
                "simulated_bytes": one.simulated_bytes,
                "failed": one.failed,
            }
            for one in simulated
        ]
    return data


def _model(named: str) -> Transformer | str:
    path = Path(named)
    if path.suffix != ".json":
        return named
    try:
        return Transformer.from_fields(msgspec.json.decode(path.read_bytes(), type=dict))
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(
            f"{named}: {error}. Expected the fields of a jaxoverlap.Transformer as JSON"
        ) from error
