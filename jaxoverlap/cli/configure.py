"""The command that ranks the configurations of a model on a cluster."""

from __future__ import annotations

import functools
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxoverlap._util.files import check_writable
from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import OK
from jaxoverlap.cli.shell.options import Json, Pod, parse_axes, refuse_preset
from jaxoverlap.cli.shell.output import command, say, show_json
from jaxoverlap.hardware.cluster import parse_cluster

if TYPE_CHECKING:
    from jaxoverlap.cli.configure_model import Simulated
    from jaxoverlap.cli.without import Without
    from jaxoverlap.parallelism.configure import Configurations
    from jaxoverlap.parallelism.model import Transformer

_TRAINER = "models.configured:build"


class StackName(StrEnum):
    """A training stack that the analytical cost model describes."""

    JAX = "jax"
    MAXTEXT = "maxtext"
    JAX_LHS = "jax-lhs"
    MEGATRON = "megatron"
    MEGATRON_CORE = "megatron-core"
    MEGATRON_CORE_2026 = "megatron-core-2026"
    TORCH = "torch"


class Dtype(StrEnum):
    """A dtype of a layer's matmuls."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


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
        bool,
        typer.Option(
            "--plain", help="Rank without jaxoverlap.overlap: by XLA's best published options."
        ),
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option(help="Of a layer's matmuls, as far as the chip has it.")
    ] = Dtype.BF16,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="The one choice of recompute: a published policy, as minimal_flash, or what is "
            "saved, as 'saves qkv+out'; default: the fastest that fits."
        ),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory for the step, as XLA_PYTHON_CLIENT_MEM_FRACTION; "
            "default: the largest that leaves room for the rest."
        ),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="How many to rank; default: 10.", min=1)] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture: time by term, time against memory.")
    ] = None,
    stack: Annotated[
        StackName,
        typer.Option(
            help="The training software: this project's trainers; MaxText with XLA's best "
            "published options; XLA's own scheduler; Megatron of 2022, or of 2025; PyTorch's FSDP2."
        ),
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
    """Rank the meshes for a model on a cluster, by an analytical cost model.

    `--compile 3` compiles a trainer's step on the three best meshes and simulates it; the answer is
    the fastest of them.

    `--over data,model` estimates your own step on each mesh, from XLA's partitioned program.

    `--json` writes what the trainers take: python -m models.train_gpt --configuration FILE.
    """
    refuse_preset(pod)
    parse_cluster(pod)
    check_writable(picture)
    if over is not None:
        options = {"--global-batch": global_batch, "--sequence": sequence, "--axes": fix}
        options |= {"--plain": plain, "--keep": keep, "--picture": picture}
        options |= {"--dtype": dtype is not Dtype.BF16, "--recompute": recompute}
        options |= {"--memory-fraction": memory_fraction}
        options |= {"--stack": stack is not StackName.JAX, "--trainer": trainer != _TRAINER}
        if ignored := [name for name, value in options.items() if value]:
            raise ValueError(
                f"{', '.join(ignored)}: for a model by name; --over ranks the meshes of your own "
                "step, which has its sizes. Leave one of them out"
            )
        with working("importing JAX"):
            from jaxoverlap.cli.configure_step import rank, shown, target_on
        ranked = rank(model, pod, [name.strip() for name in over.split(",")], compiled=compiled)
        if json:
            show_json(ranked)
        else:
            say(shown(ranked, pod))
            done = [one for one in ranked if one.simulated_s is not None]
            if done:
                from jaxoverlap.cli.without import without

                fastest = min(done, key=lambda one: one.simulated_s or 0.0)
                least = without(target_on(model, pod, ranked[0].axes), ranked[0].named)
                say(least.compared(fastest.named, fastest.simulated_s or 0.0))
        return OK
    if global_batch is None:
        raise ValueError(
            "configure needs --global-batch for a model, or --over and axes for your own step"
        )
    if trainer != _TRAINER and not compiled:
        raise ValueError("--trainer names the step that --compile compiles: give --compile 3 too")
    if compiled and stack is not StackName.JAX:
        raise ValueError(f"--compile with --stack {stack}: only JAX steps can be compiled here")
    if compiled and dtype is not Dtype.BF16:
        raise ValueError(f"--compile with --dtype {dtype}: these trainers' matmuls are in bf16")
    axes = {name: [size] for name, size in parse_axes(fix).items()} if fix else None
    with working(f"ranking the meshes of {model} on {pod}"):
        from jaxoverlap.parallelism.configure import configure as configured
        from jaxoverlap.parallelism.stack import STACKS

        found = configured(
            _model(model),
            pod,
            global_batch=global_batch,
            sequence=sequence,
            axes=axes,
            overlap=not plain,
            keep=max(keep or 10, compiled),
            stack=STACKS[stack],
            dtype=str(dtype),
            recompute=recompute,
            memory_fraction=memory_fraction,
        )
    simulated: list[Simulated] = []
    least: Without | None = None
    if compiled:
        from jaxoverlap.cli.configure_model import simulate_best, simulated_without

        progress = functools.partial(print, file=sys.stderr, flush=True)
        simulated = simulate_best(found, compiled, trainer, progress)
        if simulated[0].simulated_s is not None:
            least = simulated_without(found, trainer, simulated)
    if json:
        show_json(_builtins(found, simulated, least))
    else:
        say(str(found))
        if simulated:
            from jaxoverlap.cli.configure_model import shown as simulated_table

            say("\n" + simulated_table(simulated))
        if least is not None:
            say(least.compared(simulated[0].scored.shown, simulated[0].simulated_s or 0.0))
    if picture:
        from jaxoverlap.parallelism.picture import draw

        draw(found, picture)
    return OK


def _builtins(
    found: Configurations, simulated: list[Simulated], without: Without | None
) -> dict[str, Any]:
    """Return the ranking as plain data, the best configuration first."""
    data = found.to_builtins()
    if simulated:
        rows = {id(s): row for s, row in zip(found, data["configurations"], strict=True)}
        data["configurations"] = [{**rows[id(one.scored)], **one.facts} for one in simulated]
    if without is not None:
        data["without"] |= {"simulated_s": without.step_s, "options": without.seconds}
    return data


def _model(named: str) -> Transformer | str:
    from jaxoverlap.parallelism.model import Transformer

    path = Path(named)
    if path.suffix != ".json":
        return named
    try:
        return Transformer.from_fields(msgspec.json.decode(path.read_bytes(), type=dict))
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(
            f"{named}: {error}. Expected the fields of a jaxoverlap.Transformer as JSON"
        ) from error
