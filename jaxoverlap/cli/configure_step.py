"""Rank the meshes of a user's own step: each priced by XLA's partitioner, the best compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._util.text import table
from jaxoverlap.cli.target import Target, target
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.layouts.memory import estimated_peak_bytes
from jaxoverlap.passes.scheduling.estimate import estimate


@dataclass(frozen=True)
class Ranked:
    """A mesh of a user's step.

    Attributes:
        axes: its sizes, slowest first.
        estimated_s, estimated_bytes: of the step as it is, partitioned by XLA; infinite if refused.
        simulated_s, simulated_bytes: of the overlapped step, compiled; None if it was not.
        refused: why the builder refuses the mesh; "" if it does not.
    """

    axes: dict[str, int]
    estimated_s: float
    estimated_bytes: float
    simulated_s: float | None = None
    simulated_bytes: float | None = None
    refused: str = ""


def rank(step: str, pod: str, names: list[str], *, compiled: int) -> list[Ranked]:
    """Rank all meshes of a pod over named axes, fastest first, and compile the best few.

    Args:
        step: MODULE:FUNCTION, as the other commands take it.
        pod: as `parse_cluster` takes it.
        names: the axes that the builder takes, slowest first.
        compiled: how many to compile and simulate.

    Raises:
        ValueError: if no mesh is taken by the builder; with its first reason.
    """
    cluster = parse_cluster(pod)
    ranked = [
        _estimated(step, pod, dict(zip(names, sizes, strict=True)))
        for sizes in _sizes(cluster.num_devices, len(names))
    ]
    ranked.sort(key=lambda one: one.estimated_s)
    if ranked[0].refused:
        raise ValueError(
            f"{step} takes no mesh of {', '.join(names)} on {pod}: {ranked[0].refused}"
        )
    best = [_compiled(step, pod, one) for one in ranked[:compiled] if not one.refused]
    return best + ranked[len(best) :]


def _sizes(product: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _sizes(product // first, parts - 1):
                yield (first, *rest)


def _built(step: str, pod: str, axes: dict[str, int]) -> Target:
    return target(step, pod, ",".join(f"{name}={size}" for name, size in axes.items()))


def _estimated(step: str, pod: str, axes: dict[str, int]) -> Ranked:
    try:
        of = _built(step, pod, axes)
    except ValueError as error:  # the builder says what it cannot split
        return Ranked(axes, math.inf, math.inf, refused=str(error))
    jitted: Any = of.step if hasattr(of.step, "trace") else jax.jit(of.step)
    traced = jitted.trace(*of.args)
    mesh = next(
        leaf.sharding.mesh for leaf in jax.tree.leaves(of.args) if hasattr(leaf.sharding, "mesh")
    )
    picture = partitioned(traced, traced.jaxpr, mesh, ask=False)
    seconds = estimate(picture.module, cost_model(pod)).step_s
    return Ranked(axes, seconds, estimated_peak_bytes(picture.module))


def _compiled(step: str, pod: str, one: Ranked) -> Ranked:
    compiled = _built(step, pod, one.axes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    seconds = compiled.simulate(pod).step_s
    return replace(one, simulated_s=seconds, simulated_bytes=peak_bytes(memory))


def shown(ranked: list[Ranked], pod: str) -> str:
    """Tabulate meshes, and say where estimate and compiler disagree."""
    rows = [
        (
            str(number),
            " ".join(f"{name}={size}" for name, size in one.axes.items()),
            f"{one.estimated_s * 1e3:.1f}",
            f"{one.estimated_bytes / 1e9:.1f}",
            "" if one.simulated_s is None else f"{one.simulated_s * 1e3:.1f}",
            "" if one.simulated_bytes is None else f"{one.simulated_bytes / 1e9:.1f}",
        )
        for number, one in enumerate(ranked, 1)
        if not one.refused
    ]
    columns = ("", "mesh", "estimated ms", "GB", "overlapped, simulated ms", "GB, compiled")
    text = table(f"Meshes on {pod}, fastest first by estimate", columns, rows, right=columns[2:])
    refused = [one for one in ranked if one.refused]
    lines = [text.rstrip(), *(f"refused: {one.axes}: {one.refused}" for one in refused)]
    done = [one for one in ranked if one.simulated_s is not None]
    by_simulation = sorted(done, key=lambda one: one.simulated_s or 0.0)
    if by_simulation != done:
        order = " > ".join(str(ranked.index(one) + 1) for one in by_simulation)
        lines.append(f"Estimate and compiler disagree: simulated, the order is {order}.")
    return "\n".join(lines)
