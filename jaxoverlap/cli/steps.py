"""The commands about a train step: explain, audit, simulate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from jaxoverlap._util.files import check_writable
from jaxoverlap._util.progress import working
from jaxoverlap.cli.shell.errors import NO, OK
from jaxoverlap.cli.shell.options import (
    Axes,
    Html,
    Json,
    Perfetto,
    Pod,
    Processes,
    Step,
    Svg,
    checked,
    named,
    parse_axes,
)
from jaxoverlap.cli.shell.output import command, say, show_json, write_pictures
from jaxoverlap.plan.speedup import milliseconds

if TYPE_CHECKING:
    from jaxoverlap.cli.configure_step import Ranked
    from jaxoverlap.cli.shell.target import Target
    from jaxoverlap.cli.without import Without
    from jaxoverlap.simulation.audit import Audit
    from jaxoverlap.simulation.simulation import Simulation

_Plain = Annotated[bool, typer.Option("--plain", help="Show the original step too.")]
_AtLeast = Annotated[
    float,
    typer.Option(
        help="Share of the communication time that has to be hidden, by simulation.", min=0, max=1
    ),
]
_FASTER_MESHES = 2  # that are named
_Meshes = Annotated[
    bool,
    typer.Option(
        "--meshes", help="Estimate the pod's other meshes too, and name the two best if faster."
    ),
]
_Without = Annotated[
    bool,
    typer.Option(
        "--without",
        help="Compile what there is without jaxoverlap: XLA's defaults and published options, on "
        "the fastest mesh by estimate.",
    ),
]
_KeepRings = Annotated[
    bool,
    typer.Option(
        "--keep-rings",
        help="Keep the overlapped step even if the original one is faster by simulation.",
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
    out: Annotated[
        Path | None, typer.Option("--plan", help="Write the plan, for overlap(step, plan=FILE).")
    ] = None,
    json: Json = False,
) -> int:
    """Show what overlap() does with each matmul of a step, and why; compiles nothing.

    Exit code 1 if nothing changes: no ring, no batch split, no pinned layout.
    """
    check_writable(out)
    built = _built(step, checked(step, pod, axes, processes), axes)
    with working(f"tracing and partitioning {step}"):
        plan = built.overlapped.explain(*built.args)
    say(plan.to_json() if json else plan.text(verbose=verbose))
    if not json and plan.price is not None:
        say(
            "Times are estimated from XLA's partitioned program, those before the arrow on the "
            "same mesh by XLA's defaults; `jaxoverlap simulate --without` compiles, and compares "
            "with the best mesh and options without jaxoverlap."
        )
    if out is not None:
        plan.write(out)
        if not json:
            say(f"written to {out}: jaxoverlap.overlap(step, plan={str(out)!r})")
    return OK if plan.edits else NO


@command
def audit(
    step: Step,
    *,
    pod: Pod,
    axes: Axes,
    processes: Processes = None,
    plain: _Plain = False,
    keep_rings: _KeepRings = False,
    at_least: _AtLeast = 0.0,
    json: Json = False,
) -> int:
    """List which matmuls each collective overlaps with, in the schedule compiled for a pod.

    Exit code 1 if a smaller share of the communication time than --at-least is hidden.
    """
    pod = checked(step, pod, axes, processes)
    built = _built(step, pod, axes)
    with working(f"compiling {step} for {pod}, overlapped"):
        compiled = built.compile(keep_rings=keep_rings)
        audits = {"overlapped": compiled.audit()}
        simulation = compiled.simulate(pod)
    if plain:
        from jaxoverlap.simulation.audit import audit as audited

        with working(f"compiling {step} for {pod} as it is"):
            audits["plain"] = audited(built.compile_plain())
    if json:
        shares = {name: _coverage(a) for name, a in audits.items()}
        shares["overlapped"]["hidden"] = _hidden(simulation)
        show_json(shares)
    else:
        say(str(audits["overlapped"]))
        if plain:
            say(f"the plain step's:  {audits['plain'].total}")
        say(_hidden_line(simulation))
    return OK if _hidden(simulation) >= at_least else NO


def _built(step: str, pod: str, axes: str) -> Target:
    with working("importing JAX"):
        from jaxoverlap.cli.shell.target import target
    with working(f"building {step}"):
        return target(step, pod, axes)


def _hidden(step: Simulation) -> float:
    """Return the share of a step's communication time that kernels hide; 1 if it has none."""
    return 1 - step.exposed_s / step.communication_s if step.communication_s else 1.0


def _hidden_line(step: Simulation) -> str:
    if not step.communication_s:
        return "hidden: the step has no communication"
    return (
        f"hidden: {_hidden(step):.1%} of {step.communication_s * 1e3:.3g} ms of communication, "
        "by simulation"
    )


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
    html: Html = None,
    svg: Svg = None,
    perfetto: Perfetto = None,
    at_least: _AtLeast = 0.0,
    meshes: _Meshes = False,
    without: _Without = False,
    json: Json = False,
) -> int:
    """Simulate a step on a pod: its seconds, and what of its communication is exposed.

    Exit code 1 if a smaller share of the communication time than --at-least is hidden.
    """
    check_writable(html, svg, perfetto)
    pod = checked(step, pod, axes, processes)
    built = _built(step, pod, axes)
    from jaxoverlap.simulation.channels import fewer_channels  # imports JAX: not before mistakes

    with working(f"compiling {step} for {pod}, overlapped"):
        compiled = built.compile(keep_rings=keep_rings)
        steps = {"overlapped": compiled.simulate(pod)}
    fewer = fewer_channels(compiled.as_text() or "", pod)
    if plain:
        from jaxoverlap.simulation.simulation import simulate as simulated

        with working(f"compiling {step} for {pod} as it is"):
            steps["plain"] = simulated(built.compile_plain(), pod)
    overlapped, other = steps["overlapped"], steps.get("plain")
    ranked = _ranked(step, pod, axes) if meshes or without else []
    best = _fastest_without(step, parse_axes(axes), built, overlapped, ranked) if without else None
    if json:
        facts: dict[str, Any] = {name: _seconds(s) for name, s in steps.items()}
        said = fewer and {"max_ctas": fewer.max_ctas, "step_s": fewer.step.step_s}
        facts["overlapped"]["fewer_channels"] = said
        facts |= {"meshes": ranked} if meshes else {}
        facts |= {"without": best} if best else {}
        show_json(facts)
    else:
        say(str(overlapped))
        if other is not None:
            say(f"\nplain: {str(other).splitlines()[0]}")
        say(_hidden_line(overlapped))
        if fewer:
            say(str(fewer))
        if meshes:
            say(_meshes_line(ranked, axes))
        if best is not None:
            say(best.compared(named(parse_axes(axes)), overlapped.step_s))
    write_pictures(overlapped, html, svg, perfetto, plain=other)
    return OK if _hidden(overlapped) >= at_least else NO


def _ranked(step: str, pod: str, axes: str) -> list[Ranked]:
    """Rank all meshes of a step's axes, by the estimate of the step as it is."""
    from jaxoverlap.cli.configure_step import rank

    return rank(step, pod, [*parse_axes(axes)], compiled=0)


def _fastest_without(
    step: str, own: dict[str, int], built: Target, overlapped: Simulation, ranked: list[Ranked]
) -> Without:
    """Compile the step as it is on the fastest mesh by estimate, and on its own if that is faster.

    Args:
        step: as the commands take it.
        own, built, overlapped: the given mesh, the step on it, and the overlapped one's simulation.
        ranked: the pod's meshes, by estimate.
    """
    from jaxoverlap.cli.configure_step import target_on
    from jaxoverlap.cli.without import without

    fastest = ranked[0].axes
    if fastest == own:
        return without(built, named(own))
    assert built.pod is not None
    best = without(target_on(step, built.pod, fastest), named(fastest))
    plain_s = overlapped.speedup and overlapped.speedup.plain_s
    if plain_s is None or (best.step_s is not None and best.step_s < plain_s):
        return best
    return min(without(built, named(own)), best, key=lambda one: one.step_s or math.inf)


def _meshes_line(ranked: list[Ranked], axes: str) -> str:
    """Name the two fastest of the meshes that are faster than the given one."""
    own = next(one for one in ranked if one.axes == parse_axes(axes))
    faster = [one for one in ranked if one.estimated_s < own.estimated_s][:_FASTER_MESHES]
    shown = (f"{one.named} {milliseconds(one.estimated_s)}" for one in (*faster, own))
    if not faster:
        return f"no other mesh is faster for the step as it is (estimated): {next(shown)}"
    return f"faster meshes for the step as it is (estimated): {'; '.join(shown)} as given"


def _seconds(step: Simulation) -> dict[str, Any]:
    names = ("step_s", "compute_s", "slowdown_s", "exposed_s", "communication_s", "bound_s")
    return {
        "module": step.module,
        "hidden": _hidden(step),
        **{name: getattr(step, name) for name in names},
        "link_s": step.link_s,
        "unknown": step.unknown,
        "spent": msgspec.to_builtins(step.spent),
        "speedup": step.speedup,
    }
