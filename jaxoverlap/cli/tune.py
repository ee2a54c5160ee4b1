"""The command that searches for the fastest plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxoverlap._util.files import check_writable
from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import Axes, Json, Processes, Step, checked, parse_axes
from jaxoverlap.cli.shell.output import command, say, show_json

if TYPE_CHECKING:
    from jaxoverlap.plan.plan import Plan


@command
def tune(
    step: Step,
    *,
    pod: Annotated[
        str | None,
        typer.Option(help="The GPUs, as in h100-sxm:8x8; with --measure, what those here are."),
    ] = None,
    axes: Axes,
    processes: Processes = None,
    budget: Annotated[
        float, typer.Option(help="Seconds after which no other candidate is tried.")
    ] = 240.0,
    out: Annotated[Path, typer.Option(help="The plan's file.")] = Path("plan.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Time candidates on the devices that JAX sees here.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Where to keep what was tried.", show_default="user's cache")
    ] = None,
    json: Json = False,
) -> int:
    """Search for the fastest plan of a step, for overlap(step, plan="plan.json").

    Shows what was tried on stderr. Exit code 1 if nothing is faster than the original step; the
    plan then leaves the step as it is. Ctrl-C leaves the best plan so far; another run goes on with
    what was tried.
    """
    check_writable(out)
    if pod is not None:
        pod = checked(step, pod, axes, processes)
    elif processes is not None:
        raise ValueError("--processes-per-host describes the hosts of a --pod: give both")
    if pod is None and not measure:
        raise ValueError(
            "tune needs --pod, as in --pod h100-sxm:8x8, to simulate on; or --measure, to time the "
            "step on the devices that are here"
        )
    parse_axes(axes)
    with working("importing JAX"):
        from jaxoverlap import api
        from jaxoverlap.cli.shell.target import target, target_here
    with working(f"building {step}"):
        built = target_here(step, pod, axes) if pod is None or measure else target(step, pod, axes)
    settings = {"budget_s": budget, "measure": measure, "cache": cache, "out": out}
    plan = api.tune(built.step, built.args, cluster=built.pod, **settings)
    if json:
        fields = ("plain", "predictions", "measured", "nccl", "tried")
        show_json({"plan": str(out), **{name: getattr(plan, name) for name in fields}})
    else:
        say("\n".join([plan.summary, *conditions(plan, out), ""]))
        say(f"written to {out}: jaxoverlap.overlap(step, plan={str(out)!r})")
    return NO if plan.plain else OK


def conditions(plan: Plan, out: Path) -> Iterator[str]:
    """Yield the condition of the summary's step time, if the table shows another time."""
    taken = next((row.evaluation for row in plan.tried if row.taken), None)
    if plan.nccl.channels and plan.predictions and taken and taken.times:
        yield (
            f"  {plan.predictions.step_s * 1e3:.1f} ms needs NCCL's tuner plugin with the plan's "
            f"channels (jaxoverlap plan show {out} --as csv); without it the step takes "
            f"{taken.times.step_s * 1e3:.1f} ms, as in the table."
        )
