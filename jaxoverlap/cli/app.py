"""Assemble the `jaxoverlap` command from its subcommands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import jaxoverlap
from jaxoverlap.cli.advise import advise
from jaxoverlap.cli.cache import cache
from jaxoverlap.cli.configure import configure
from jaxoverlap.cli.doctor import doctor
from jaxoverlap.cli.flags import flags
from jaxoverlap.cli.new_target import new_target
from jaxoverlap.cli.plan import plan
from jaxoverlap.cli.pods import pods
from jaxoverlap.cli.profile import profile
from jaxoverlap.cli.shell.errors import MEANINGS, OK, USAGE, Report
from jaxoverlap.cli.shell.interrupt import ends_on_interrupt
from jaxoverlap.cli.shell.output import UsageError, show_error
from jaxoverlap.cli.steps import audit, explain, simulate
from jaxoverlap.cli.tune import tune

# What the list of commands shows, which cuts a longer first line.
_SHORT = {
    explain: "Show what overlap() does with each matmul; compiles nothing.",
    advise: "Print sharding constraints that save time; compiles nothing.",
    simulate: "Compile for a pod and simulate: seconds, exposed collectives.",
    audit: "Compile for a pod and list what each collective overlaps with.",
    tune: "Search for the fastest plan.",
    configure: "Rank the meshes for a model on a cluster.",
    profile: "Read a profiler's trace: what was hidden on real devices.",
    flags: "Print XLA and NCCL settings for a pod, or check yours.",
    pods: "List chips, presets, and the meshes that fit a cluster.",
    doctor: "Check versions, plugins, devices and flags of this machine.",
    new_target: "Write a file with a build(mesh) to start from.",
}
_NAMES = {new_target: "new-target"}


class _Commands(TyperGroup):
    """The root command, which prints a usage error as JSON if --json is given."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **named: Any) -> Any:
        words = [*(sys.argv[1:] if args is None else args)]
        if "--json" not in words or named.get("standalone_mode") is False:
            return super().main(args, *positional, **named)
        try:
            code = super().main(args, *positional, **{**named, "standalone_mode": False})
        except UsageError as error:
            code = show_error(Report(USAGE, "usage", _message(error), ""), json=True)
        sys.exit(code or OK)


class _Command(TyperCommand):
    """A command that names all that its line lacks, without pydantic's prefix."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [*args]  # the parser takes words off the list
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, not typer's
            values, *_ = self.make_parser(ctx).parse_args(given)
            required = [p for p in self.params if p.required]
            missing = [p for p in required if not isinstance(values.get(p.name), str)]
            if len(missing) < 2:
                raise
            named = "".join(f"\n  {p.opts[0]}: {getattr(p, 'help', '')}" for p in missing)
            raise UsageError(f"Missing:{named}", ctx) from error


class _Elapsed(logging.Formatter):
    """Puts the seconds since the command began before each stage."""

    def format(self, record: logging.LogRecord) -> str:
        return f"[{record.relativeCreated / 1e3:3.0f} s] {super().format(record)}"


def _message(error: Exception) -> str:
    return error.format_message()  # type: ignore[attr-defined]


def _version(wanted: bool) -> None:
    if wanted:
        others = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib"))
        print(f"jaxoverlap {jaxoverlap.__version__}, {others}, Python {sys.version.split()[0]}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: " + "; ".join(f"{code}: {text}" for code, text in MEANINGS.items()) + ".",
)


@app.callback(help="Hide the collectives of a sharded JAX train step behind its matmuls.")
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions."),
    ] = False,
) -> None:
    pass


for command, short in _SHORT.items():
    app.command(_NAMES.get(command), cls=_Command, short_help=short)(command)
app.add_typer(plan, name="plan", short_help="Print a plan's file, or compare two.")
app.add_typer(cache, name="cache", short_help="List, show or clear what earlier runs decided.")


def main() -> None:
    """Run the command.

    XLA's warnings stay out of its output, unless the user has set a log level: a step whose own
    shardings conflict has dozens, and `simulate` lists what these reshards cost.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when jaxlib is imported
    if not sys.stderr.isatty():  # a terminal has a line that says what is being done
        log = logging.getLogger("jaxoverlap")
        log.addHandler(handler := logging.StreamHandler())
        handler.setFormatter(_Elapsed())
        log.setLevel(logging.INFO)
    with ends_on_interrupt("interrupted; results that were complete are cached"):
        app(prog_name="jaxoverlap")
