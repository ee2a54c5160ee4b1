"""Define the options that several commands share. Nothing here imports JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jaxoverlap.hardware.chips import KNOWN
from jaxoverlap.hardware.cluster import parse_cluster

_STEP_HELP = (
    "MODULE:FUNCTION or FILE.py:FUNCTION, where `def build(mesh) -> (step, args)` gives a train "
    "step, jitted or not, and its arguments as jax.ShapeDtypeStructs with shardings. Without "
    "FUNCTION: its `build`, which the trainers have (models.gpt). `jaxoverlap new-target` writes "
    "one."
)
Step = Annotated[str, typer.Argument(help=_STEP_HELP)]
Pod = Annotated[str, typer.Option(help="The GPUs, as in h100-sxm:8x8: chip, hosts, GPUs per host.")]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes-per-host",
        help="JAX processes on each host, as in h100-sxm:8x8/8, where each GPU has one.",
        min=1,
    ),
]
Axes = Annotated[
    str,
    typer.Option("--mesh", help="The mesh's axes, slowest first, as in data=8,model=8."),
]
Html = Annotated[Path | None, typer.Option(help="Write a page to zoom into.")]
Svg = Annotated[Path | None, typer.Option(help="Write a picture.")]
Perfetto = Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else, errors too.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def checked(step: str, pod: str, axes: str, processes: int | None = None) -> str:
    """Check target, pod and mesh before JAX is imported; return the pod's name with its processes.

    Raises:
        ValueError: if the pod or the mesh does not parse, they do not go together, or a target's
            file is missing.
    """
    refuse_preset(pod)
    pod = with_processes(pod, processes)
    parse_cluster(pod)
    parse_axes(axes)
    file = step.rpartition(":")[0] or step
    if is_file(file):
        _check_file(file)
    return pod


def refuse_preset(pod: str) -> None:
    """Refuse the name of a preset of flags, which says no number of hosts, as a pod.

    Raises:
        ValueError: if it is one; it names the preset's chip.
    """
    name, _, size = pod.partition(":")
    if any(chip.startswith(name) for chip in KNOWN):
        return
    from jaxoverlap.flags import PRESETS  # needs JAX, which mistakes about chips do not wait for

    if name in PRESETS:
        chip = PRESETS[name].chip
        raise ValueError(
            f"--pod {pod}: {name} is a preset of flags. Its machines have {chip}: write their "
            f"chip, hosts and GPUs per host, as in --pod {chip}:{size or '8x8'}"
        )


def is_file(named: str) -> bool:
    """Return whether a target is a file's path, and not a module's name."""
    return named.endswith(".py") or "/" in named or os.sep in named


def _check_file(named: str) -> None:
    if not named.endswith(".py"):
        raise ValueError(f"{named} is no Python file: write FILE.py:FUNCTION or MODULE:FUNCTION")
    if not Path(named).is_file():
        raise ValueError(
            f"there is no file {named}: write FILE.py:FUNCTION or MODULE:FUNCTION, or make one "
            f"with `jaxoverlap new-target {named}`"
        )


def with_processes(pod: str, processes: int | None) -> str:
    """Return a pod's name with the number of processes per host that an option gives.

    Raises:
        ValueError: if the pod does not parse, its name says another number, or its hosts cannot
            have so many.
    """
    if processes is None:
        return pod
    cluster = parse_cluster(pod)
    if cluster.processes_per_host not in (1, processes):
        raise ValueError(
            f"{pod} has {cluster.processes_per_host} processes on each host, and "
            f"--processes-per-host says {processes}: give one of the two"
        )
    return str(replace(cluster, processes_per_host=processes))


def parse_axes(text: str) -> dict[str, int]:
    """Parse the axes that a text such as "data=8,model=8" names.

    Raises:
        ValueError: if it has another form, or names one twice.
    """
    parts = [part.partition("=") for part in text.split(",")]
    axes = {name.strip(): int(size) for name, _, size in parts if size.strip().isdecimal()}
    if len(axes) != len(parts) or not all(axes):
        raise ValueError(f"--mesh {text!r}: expected axes and their sizes, as in data=8,model=8")
    return axes


def named(axes: Mapping[str, int]) -> str:
    """Return a mesh's axes and their sizes as text: data=8 model=8."""
    return " ".join(f"{name}={size}" for name, size in axes.items())
