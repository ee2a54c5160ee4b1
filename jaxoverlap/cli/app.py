"""Put the parts of the command together."""

from __future__ import annotations

import typer

from jaxoverlap.cli.advise import advise
from jaxoverlap.cli.configure import configure
from jaxoverlap.cli.flags import flags
from jaxoverlap.cli.plan import plan
from jaxoverlap.cli.pods import pods
from jaxoverlap.cli.profile import profile
from jaxoverlap.cli.steps import audit, explain, simulate
from jaxoverlap.cli.tune import tune

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Hide the collectives of a sharded JAX train step behind its matmuls, and see it.",
    epilog="Exit codes: 0, all is well; 1, the answer is no; 2, a mistake in what was asked; 3, "
    "something failed on the way.",
)
for command in (explain, advise, configure, audit, simulate, profile, tune, flags, pods):
    app.command()(command)
app.add_typer(plan, name="plan")


def main() -> None:
    """Run the command."""
    app(prog_name="jaxoverlap")
