"""The commands about a train step: explain, audit, simulate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from jaxoverlap.cli.output import NO, OK, Json, command, say, show_json
from jaxoverlap.cli.target import Axes, Pod, Processes, Step, target, with_processes
from jaxoverlap.simulation.audit import Audit
from jaxoverlap.simulation.audit import audit as audited
from jaxoverlap.simulation.simulation import Simulation
from jaxoverlap.simulation.simulation import simulate as simulated

_Plain = Annotated[bool, typer.Option("--plain", help="Do the same with the step as it is.")]
_KeepRings = Annotated[
    bool,
    typer.Option(
        "--keep-rings",
        help="Compile the overlapped step alone, and not what is faster by simulation, that or the "
        "step without rings.",
    ),
]


@command
def explain(
    step: Step,
    *,
    pod: Pod,
    axes: Axes,
    processes: Processes = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Give each matmul and collective a row of its own.")
    ] = False,
    json: Json = False,
) -> int:
    """What becomes of each matmul of a step, and why; compiles nothing.

    Exit code 1 if nothing changes: no ring, no parts of the rows, no pinned layout.
    """
    of = target(step, with_processes(pod, processes), axes)
    plan = of.overlapped.explain(*of.args)
    say(plan.to_json() if json else plan.text(verbose=verbose))
    return OK if any(plan.changes) else NO


@command
def audit(
    step: Step,
    *,
    pod: Pod,
    axes: Axes,
    processes: Processes = None,
    plain: _Plain = False,
    keep_rings: _KeepRings = False,
    at_least: Annotated[
        float, typer.Option(help="Share of the rings' hops that has to be covered.", min=0, max=1)
    ] = 0.0,
    json: Json = False,
) -> int:
    """What hides behind what, in the schedule of a step compiled for a pod.

    Exit code 1 if a smaller share of the hops than --at-least is covered.
    """
    of = target(step, with_processes(pod, processes), axes)
    audits = {"overlapped": of.compile(keep_rings=keep_rings).audit()}
    if plain:
        audits["plain"] = audited(of.compile_plain())
    if json:
        show_json({name: _coverage(a) for name, a in audits.items()})
    else:
        say(str(audits["overlapped"]))
        if plain:
            say(f"the plain step's:  {audits['plain'].total}")
    hops = audits["overlapped"].hops
    return OK if hops.covered >= at_least * hops.count else NO


def _coverage(audit: Audit) -> dict[str, Any]:
    sums = {"all": audit.total, "hops": audit.hops, "rest": audit.rest}
    return {**sums, "collectives": audit.collectives, "speedup": audit.speedup}


@command
def simulate(
    step: Step,
    *,
    pod: Pod,
    axes: Axes,
    processes: Processes = None,
    plain: _Plain = False,
    keep_rings: _KeepRings = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to zoom into.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    json: Json = False,
) -> int:
    """What a step takes in seconds on a pod, by simulation, and what of it is exposed."""
    for path in (html, svg, perfetto):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}; make it first")
    pod = with_processes(pod, processes)
    of = target(step, pod, axes)
    steps = {"overlapped": of.compile(keep_rings=keep_rings).simulate(pod)}
    if plain:
        steps["plain"] = simulated(of.compile_plain(), pod)
    overlapped, other = steps["overlapped"], steps.get("plain")
    if html:
        overlapped.to_html(html, plain=other)
    if svg:
        overlapped.to_svg(svg, plain=other)
    if perfetto:
        overlapped.to_perfetto(perfetto)
    if json:
        show_json({name: _seconds(s) for name, s in steps.items()})
    else:
        say(str(overlapped))
        if other is not None:
            say(f"\nplain: {str(other).splitlines()[0]}")
    return OK


def _seconds(step: Simulation) -> dict[str, Any]:
    names = ("step_s", "compute_s", "slowdown_s", "exposed_s", "communication_s", "bound_s")
    return {
        "module": step.module,
        **{name: getattr(step, name) for name in names},
        "link_s": step.link_s,
        "unknown": step.unknown,
        "spent": msgspec.to_builtins(step.spent),
        "speedup": step.speedup,
    }
