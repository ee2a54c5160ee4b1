"""Build the step that a command is about, by a function that the user names."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import typer
from jax.sharding import AxisType, Mesh

from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.hardware.cluster import parse_cluster
from jaxoverlap.hardware.pods import compiler_options, pod_mesh
from jaxoverlap.step.stages import Compiled

_STEP_HELP = (
    "MODULE:FUNCTION, where `def build(mesh) -> (step, args)` gives a train step, jitted or not, "
    "and its arguments as jax.ShapeDtypeStructs with shardings. MODULE alone: its `build`, which "
    "the trainers have (models.gpt)."
)
Step = Annotated[str, typer.Argument(help=_STEP_HELP)]
Pod = Annotated[str, typer.Option(help="The GPUs, as in h100-sxm:8x8: chip, hosts, GPUs a host.")]
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
    typer.Option("--mesh", help="Its axes, slowest first, as in data=8,model=8."),
]


@dataclass(frozen=True)
class Target:
    """A step, its arguments, and the pod that it is for; None: the devices that are here."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    pod: str | None

    @property
    def overlapped(self) -> Overlapped:
        """The step, overlapped."""
        return overlap(self.step, cluster=self.pod)

    def compile(self, *, keep_rings: bool = False) -> Compiled:
        """Compile the overlapped step for the pod; `keep_rings` keeps rings even if they lose."""
        step = overlap(self.step, cluster=self.pod, never_slower=not keep_rings)
        return step.lower(*self.args).compile()

    def compile_plain(self) -> jax.stages.Compiled:
        """Compile the step as it is for the pod.

        Raises:
            ValueError: if it was overlapped already.
        """
        if isinstance(self.step, Overlapped):
            raise ValueError(
                "--plain: the function gives an overlapped step, of which there is no plain one "
                "to compare with; let it give the step as it was before overlap()"
            )
        step: Any = self.step if hasattr(self.step, "lower") else jax.jit(self.step)
        return step.lower(*self.args).compile(compiler_options=compiler_options())


def with_processes(pod: str, processes: int | None) -> str:
    """Return a pod's name with the processes of a host that an option says.

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


def target(step: str, pod: str, axes: str) -> Target:
    """Build the step that a command line names, on a mesh of GPUs that need not be there.

    Raises:
        ValueError: if a part of it names nothing; it says which.
    """
    return _built(step, pod, pod_mesh(pod, parse_axes(axes)))


def target_here(step: str, pod: str | None, axes: str) -> Target:
    """Build the step that a command line names, on a mesh of the devices that JAX sees.

    Args:
        pod: the cluster that these devices are, for its links and cost model; None if not given.

    Raises:
        ValueError: as `target`; or if the mesh has another number of devices.
    """
    sizes, devices = parse_axes(axes), jax.devices()
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"--mesh {axes} has {math.prod(sizes.values())} devices, and here are {len(devices)} "
            f"({devices[0].device_kind}): give axes whose sizes multiply to that"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    return _built(step, pod, mesh)


def _built(step: str, pod: str | None, mesh: Mesh) -> Target:
    built = function(step)(mesh)
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[1], tuple | list):
        raise ValueError(
            f"{step} gave {type(built).__name__}: expected (step, args), args being the tuple of "
            "arguments that the step is called with"
        )
    return Target(built[0], tuple(built[1]), pod)


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


def function(named: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION names; MODULE alone: its `build`.

    Raises:
        ValueError: if there is none.
    """
    module, _, name = named.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it: the user's modules lie here
    try:
        loaded_module = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it needs is not
        raise ValueError(
            f"no module {error.name!r}, as {named!r} asks for: run the command where Python finds "
            "it, and write MODULE:FUNCTION with dots, as in models.gpt:build"
        ) from error
    function = getattr(loaded_module, name or "build", None)
    if not callable(function):
        raise ValueError(
            f"{module} has no function {name or 'build'!r}: expected one that takes a mesh and "
            "gives (step, args)"
        )
    return function
