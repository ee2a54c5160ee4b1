"""The command that reads a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxoverlap._util.files import check_writable
from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import (
    Html,
    Json,
    Perfetto,
    Processes,
    Svg,
    with_processes,
)
from jaxoverlap.cli.shell.output import command, say, show_json, write_pictures

if TYPE_CHECKING:
    from jaxoverlap.cost.model import CostModel
    from jaxoverlap.profiling.profile import Profile


@command
def profile(
    path: Annotated[
        Path,
        typer.Argument(
            help="An xplane.pb, a Chrome trace (.trace.json.gz), or the folder that "
            "jax.profiler.trace(FOLDER) was given."
        ),
    ],
    *,
    pod: Annotated[
        str | None,
        typer.Option(help="The GPUs, as in h100-sxm:8x8: the same step is simulated too."),
    ] = None,
    processes: Processes = None,
    prices: Annotated[
        Path | None, typer.Option(help="A price file, with or without --pod.")
    ] = None,
    hlo: Annotated[
        Path | None,
        typer.Option(help="The compiled step's text, where the profile carries none."),
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="The program, as in jit_train_step; default: the busiest.")
    ] = None,
    at_least: Annotated[
        float, typer.Option(help="Share of communication that has to be hidden.", min=0, max=1)
    ] = 0.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List each collective, by start.")
    ] = False,
    html: Html = None,
    svg: Svg = None,
    perfetto: Perfetto = None,
    json: Json = False,
) -> int:
    """Read a profile of JAX or PyTorch: how much of a step's communication was hidden.

    Exit code 1 if a smaller share of the communication time than --at-least was.
    """
    check_writable(html, svg, perfetto)
    if hlo is not None and not hlo.is_file():
        raise ValueError(f"--hlo {hlo}: there is no such file")
    if not path.exists():
        raise ValueError(f"there is no profile {path}: give a file, or the trace's folder")
    with working(f"reading {path}"):
        from jaxoverlap.profiling.profile import read
        from jaxoverlap.profiling.text import listed

        cluster = _cluster(pod, processes, prices)
        found = read(path, cluster, compiled=hlo and hlo.read_text(), module=module)
    if json:
        show_json(_facts(found))
    else:
        say(str(found))
        if verbose:
            say(listed(found))
    write_pictures(found, html, svg, perfetto)
    return OK if found.sums.hidden >= at_least else NO


def _cluster(pod: str | None, processes: int | None, prices: Path | None) -> CostModel | None:
    if pod is not None:
        pod = with_processes(pod, processes)
    elif processes is not None:
        raise ValueError("--processes-per-host describes the hosts of a --pod: give both")
    from jaxoverlap.cost.find import cost_model

    return cost_model(pod, table=prices) if pod or prices else None


def _facts(found: Profile) -> dict[str, Any]:
    """Return a profile as plain data, without its events."""
    left = ("timeline", "simulation")
    facts = {name: getattr(found, name) for name in found.__dataclass_fields__ if name not in left}
    facts["hidden"] = found.sums.hidden
    if s := found.simulation:
        facts["simulated"] = {
            "cluster": str(s.cluster),
            "step_s": s.step_s,
            **s.parts,
            "communication_s": s.communication_s,
        }
    facts["ratios"] = [{**msgspec.to_builtins(r), "ratio": r.ratio} for r in found.ratios]
    return facts
