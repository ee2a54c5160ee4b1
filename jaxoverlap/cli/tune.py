"""The command that finds a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxoverlap import api
from jaxoverlap.cli.output import NO, OK, Json, command, say, show_json
from jaxoverlap.cli.target import Axes, Processes, Step, target, target_here, with_processes
from jaxoverlap.tuning.tune import Tuning

_DEFAULT = Tuning()


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
    ] = _DEFAULT.budget_s,
    out: Annotated[Path, typer.Option(help="The plan's file.")] = Path("plan.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Time candidates on the devices that JAX sees here.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Where to keep what was tried.", show_default="user's cache")
    ] = None,
    json: Json = False,
) -> int:
    """Find the plan under which a step is fastest, for overlap(step, plan="plan.json").

    Shows what was tried on stderr. Exit code 1 if nothing beats the step as it is; the plan is
    then to leave it so.
    """
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    if pod is not None:
        pod = with_processes(pod, processes)
    elif processes is not None:
        raise ValueError("--processes-per-host is of a --pod, which is not given: name both")
    if measure:
        of = target_here(step, pod, axes)
    elif pod is not None:
        of = target(step, pod, axes)
    else:
        raise ValueError(
            "tune needs --pod, as in --pod h100-sxm:8x8, to simulate on; or --measure, to time the "
            "step on the devices that are here"
        )
    plan = api.tune(of.step, of.args, cluster=of.pod, budget_s=budget, measure=measure, cache=cache)
    plan.write(out)
    if json:
        fields = ("plain", "predictions", "measured", "nccl", "tried")
        show_json({"plan": str(out), **{name: getattr(plan, name) for name in fields}})
    else:
        say(f"{plan.summary}\n\nwritten to {out}: jaxoverlap.overlap(step, plan={str(out)!r})")
    return NO if plan.plain else OK
