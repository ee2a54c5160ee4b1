"""Rank the meshes of a user's step: each estimated after partitioning, the best compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxoverlap._jax.jit_wrappers import arguments_reach, find_jit, jitted_alone
from jaxoverlap._util.progress import working
from jaxoverlap._util.text import first_line, table
from jaxoverlap.api import Overlapped
from jaxoverlap.cli.configure_model import shown_if, simulated_costs
from jaxoverlap.cli.shell.options import named
from jaxoverlap.cli.shell.target import Target, target
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import mesh_among
from jaxoverlap.parallelism.search import factorizations
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.estimation.estimate import estimate
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes

_MOST_SHOWN = 1000  # characters of an error


@dataclass(frozen=True)
class Ranked:
    """A mesh for a user's step, with the step's estimated and simulated time and memory.

    Attributes:
        axes: its sizes, slowest first.
        estimated_s, estimated_bytes: of the step as it is, partitioned by XLA; infinite if refused.
        simulated_s, simulated_bytes: of the overlapped step, compiled; None if it was not.
        refused: why this mesh has no estimate: the builder or XLA raised an error; "" if it has.
        failed: why it was not compiled though requested; "" if it was, or was not requested.
    """

    axes: dict[str, int]
    estimated_s: float
    estimated_bytes: float
    simulated_s: float | None = None
    simulated_bytes: float | None = None
    refused: str = ""
    failed: str = ""

    @property
    def named(self) -> str:
        """The mesh as text."""
        return named(self.axes)


def rank(step: str, pod: str, names: list[str], *, compiled: int) -> list[Ranked]:
    """Rank all meshes of a pod over named axes, fastest first, and compile the best few.

    Args:
        step: MODULE:FUNCTION, as the other commands take it.
        pod: as `parse_cluster` takes it.
        names: the axes that the builder takes, slowest first.
        compiled: how many to compile and simulate.

    Raises:
        ValueError: if an axis has no name or the name of another, or no mesh gets an estimate; with
            the first reason.
    """
    if not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"--over {','.join(names)}: expected the names of axes, each once, as in data,model"
        )
    meshes = [
        Ranked(dict(zip(names, sizes, strict=True)), math.inf, math.inf)
        for sizes in factorizations(parse_cluster(pod).num_devices, len(names))
    ]
    ranked = list(_evaluated("estimating", _estimated, step, pod, meshes))
    ranked.sort(key=lambda one: one.estimated_s)
    if ranked[0].refused:
        raise ValueError(
            f"{step} takes no mesh of {', '.join(names)} on {pod}: {ranked[0].refused}"
        )
    possible = [one for one in ranked if not one.refused]
    best = list(_evaluated("compiling for", _compiled, step, pod, possible[:compiled]))
    return best + ranked[len(best) :]


def _evaluated(
    verb: str, evaluate: Callable[..., Ranked], step: str, pod: str, meshes: list[Ranked]
) -> Iterator[Ranked]:
    """Evaluate meshes one after the other, each with a line of progress."""
    for number, mesh in enumerate(meshes, 1):
        with working(f"{verb} mesh {number} of {len(meshes)}: {mesh.named}"):
            done = _recorded(mesh, evaluate, step, pod, mesh)
        yield done


def target_on(step: str, pod: str, axes: dict[str, int]) -> Target:
    """Build a user's step on a mesh of a pod."""
    return target(step, pod, ",".join(f"{name}={size}" for name, size in axes.items()))


def _recorded(one: Ranked, evaluate: Callable[..., Ranked], *arguments: Any) -> Ranked:
    """Return a mesh's evaluation; an error of the user's builder or of XLA is recorded in it.

    One mesh that cannot be built, traced or compiled is no reason to lose the others. A ValueError
    is recorded by its message alone: builders raise one for what they cannot split.
    """
    try:
        return evaluate(*arguments)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = kind + first_line(error, _MOST_SHOWN)
        field = "failed" if one.estimated_s < math.inf else "refused"
        return replace(one, **{field: reason})


def _estimated(step: str, pod: str, one: Ranked) -> Ranked:
    built = target_on(step, pod, one.axes)
    traced = _traced(built)
    mesh = mesh_among(jax.tree.leaves(built.args))
    if mesh is None:
        raise ValueError("no argument has a sharding: give jax.ShapeDtypeStructs with shardings")
    partitioned_step = partitioned(traced, traced.jaxpr, mesh, ask=False)
    seconds = estimate(partitioned_step.module, cost_model(pod)).step_s
    return replace(
        one, estimated_s=seconds, estimated_bytes=estimated_peak_bytes(partitioned_step.module)
    )


def _traced(built: Target) -> jax.stages.Traced:
    """Trace the step as it is; of one that holds its jit inside, as `nnx.jit` does, that jit."""
    if isinstance(built.step, Overlapped):
        return built.step.trace(*built.args)
    wrapped = find_jit(built.step) or jitted_alone(built.step)
    return arguments_reach(wrapped, wrapped.jitted.trace, built.args, {})


def _compiled(step: str, pod: str, one: Ranked) -> Ranked:
    compiled = target_on(step, pod, one.axes).compile()
    seconds, num_bytes = simulated_costs(compiled, pod)
    return replace(one, simulated_s=seconds, simulated_bytes=num_bytes)


def shown(ranked: list[Ranked], pod: str) -> str:
    """Format the ranked meshes as a table, and note where estimate and simulation disagree."""
    rows = [
        (
            str(number),
            one.named,
            f"{one.estimated_s * 1e3:.1f}",
            f"{one.estimated_bytes / 1e9:.1f}",
            shown_if(one.simulated_s, ".1f", 1e3),
            shown_if(one.simulated_bytes, ".1f", 1e-9),
        )
        for number, one in enumerate(ranked, 1)
        if not one.refused
    ]
    columns = ("", "mesh", "estimated ms", "GB", "overlapped, simulated ms", "GB, compiled")
    text = table(f"Meshes on {pod}, fastest first by estimate", columns, rows, right=columns[2:])
    refused = [one for one in ranked if one.refused]
    lines = [text.rstrip(), *(f"refused: {one.named}: {one.refused}" for one in refused)]
    lines += [f"not compiled: {one.named}: {one.failed}" for one in ranked if one.failed]
    done = [one for one in ranked if one.simulated_s is not None]
    by_simulation = sorted(done, key=lambda one: one.simulated_s or 0.0)
    if by_simulation != done:
        order = " > ".join(str(ranked.index(one) + 1) for one in by_simulation)
        lines.append(f"Estimate and compiler disagree: simulated, the order is {order}.")
    return "\n".join(lines)
