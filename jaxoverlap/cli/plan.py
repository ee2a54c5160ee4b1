"""The commands about a plan's file: show, diff."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxoverlap._util.text import human_bytes, table_width
from jaxoverlap.cli.forms import ENVIRONMENT_HELP, exports, written, xla_flags
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import Json
from jaxoverlap.cli.shell.output import command, say, show_json, show_table

if TYPE_CHECKING:
    from jaxoverlap.plan.channel_row import ChannelRow
    from jaxoverlap.plan.plan import MadeFor, Plan

plan = typer.Typer(no_args_is_help=True, help="Show a plan's file, or compare two.")
_File = Annotated[
    Path,
    typer.Argument(
        exists=True, dir_okay=False, help="As `jaxoverlap tune` or Plan.write() wrote it."
    ),
]


class PlanForm(StrEnum):
    """A part of a plan, in the format of the program that reads it."""

    OPTIONS = "options"
    XLA_FLAGS = "xla-flags"
    ENV = "env"
    CSV = "csv"
    SLURM = "slurm"
    K8S = "k8s"
    DOCKERFILE = "dockerfile"


@plan.command()
@command
def show(
    file: _File,
    *,
    form: Annotated[
        PlanForm | None,
        typer.Option(
            "--as",
            help="options: XLA's, as JSON. xla-flags: these as a line for XLA_FLAGS. csv: the "
            "channels, as a file for NCCL's example tuner plugin. Others: NCCL's variables, and "
            f"XLA_FLAGS too but for env. {ENVIRONMENT_HELP}",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Print a plan: matmuls, XLA options, NCCL settings, predictions, what it was made for."""
    from jaxoverlap.plan.plan import Plan

    saved_plan = Plan.read(file)
    if form is PlanForm.OPTIONS:
        show_json(saved_plan.xla_options)
    elif form is PlanForm.XLA_FLAGS:
        say(xla_flags(saved_plan.xla_options))
    elif form is PlanForm.ENV:
        say(_env(saved_plan, file))
    elif form is PlanForm.CSV:
        say(_csv(saved_plan, file).rstrip("\n"))
    elif form is not None:
        say(_environment(saved_plan, form).rstrip("\n"))
    elif json:
        say(saved_plan.to_json())
    else:
        _tables(saved_plan)
    return OK


@plan.command()
@command
def diff(a: _File, b: _File, *, json: Json = False) -> int:
    """List what differs between two plans; exit code 1 if anything does.

    Source lines, reasons and what a tuning tried are not compared, nor matmuls of different steps.
    """
    from jaxoverlap.cli.differences import differences, other_step
    from jaxoverlap.plan.plan import Plan

    plans = Plan.read(a), Plan.read(b)
    mismatches = differences(*plans)
    if json:
        show_json(mismatches)
    elif mismatches:
        if why := other_step(*plans):
            say(f"{why}. Their matmuls and edits are not compared.\n")
        rows = [(d.part, d.name, _text(d.a), _text(d.b)) for d in mismatches]
        show_table("differences", ("", "", str(a), str(b)), rows)
    else:
        say(f"{a} and {b} have the same decisions, predictions and origin")
    return NO if mismatches else OK


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _environment(saved_plan: Plan, form: PlanForm) -> str:
    """Write XLA_FLAGS and NCCL's variables for a cluster's software, or an image's."""
    values = _nccl_variables(saved_plan)
    if flags := xla_flags(saved_plan.xla_options):
        values = {"XLA_FLAGS": flags, **values}
    return written(values, form, saved_plan.made_for and saved_plan.made_for.cluster)


def _nccl_variables(saved_plan: Plan) -> dict[str, str]:
    from jaxoverlap.flags.nccl_tuner import variables

    return {**saved_plan.nccl.env, **variables(saved_plan.nccl.channels)}


def _env(saved_plan: Plan, file: Path) -> str:
    """Write NCCL's variables; where channels need a tuner plugin, a comment says how to load it."""
    lines = exports(_nccl_variables(saved_plan))
    if saved_plan.nccl.channels:
        lines += (
            f"# jaxoverlap plan show {file} --as csv > tuner.csv\n"
            "# export NCCL_TUNER_CONFIG_FILE=$PWD/tuner.csv\n"
            "# export NCCL_TUNER_PLUGIN=/path/to/libnccl-tuner-example.so\n"
        )
    return (lines or "# NCCL has no settings in this plan").rstrip("\n")


def _csv(saved_plan: Plan, file: Path) -> str:
    from jaxoverlap.flags.nccl_tuner import tuner_csv

    if not saved_plan.nccl.channels:
        raise ValueError(f"{file}: the plan leaves all channels to NCCL; run without a tuner file")
    return tuner_csv(saved_plan.nccl.channels)


def _tables(saved_plan: Plan) -> None:
    say(f"{saved_plan}\n")
    if saved_plan.xla_options:
        show_table("XLA's options", ("name", "value"), saved_plan.xla_options.items())
    if saved_plan.nccl.env:
        show_table("NCCL's variables", ("name", "value"), saved_plan.nccl.env.items())
    if saved_plan.nccl.channels:
        numbers = ("from", "to", "channels", "hosts", "GPUs")
        columns = ("collective", *numbers, "by")
        rows = map(_channels, saved_plan.nccl.channels)
        show_table("channels of NCCL's collectives", columns, rows, right=numbers)
    if saved_plan.made_for:
        show_table("made for", ("", ""), _made_for(saved_plan.made_for))
    if saved_plan.tried:
        from jaxoverlap.tuning.table import tried_table

        say(tried_table("tried", saved_plan.tried, width=table_width()))


def _channels(row: ChannelRow) -> tuple[str, ...]:
    sizes = (human_bytes(row.min_bytes), human_bytes(row.max_bytes))
    counts = ("any" if n is None else str(n) for n in (row.nodes, row.ranks))
    channels = "NCCL's own" if row.channels is None else str(row.channels)
    return (row.kind, *sizes, channels, *counts, f"{row.algorithm}, {row.protocol}")


def _made_for(origin: MadeFor) -> list[tuple[str, str]]:
    spread = {axis: f" over {n} NVLink domains" for axis, n in origin.domains.items() if n > 1}
    axes = [f"{axis}: {kind}{spread.get(axis, '')}" for axis, kind in origin.axis_types.items()]
    return [
        ("step", origin.step[:12]),
        ("arguments", str(len(origin.arguments))),
        ("results", str(len(origin.results))),
        ("axes", "; ".join(axes)),
        ("devices", origin.devices),
        ("cluster", origin.cluster or "not known"),
        *origin.versions.items(),
    ]
