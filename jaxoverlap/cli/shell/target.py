"""Build the step of a command with a function that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxoverlap._jax.jit_wrappers import arguments_reach, find_jit, jitted_alone
from jaxoverlap.api import Overlapped, overlap
from jaxoverlap.cli.shell.options import is_file, parse_axes
from jaxoverlap.hardware.pods import compiler_options, pod_mesh
from jaxoverlap.step.stages import Compiled


@dataclass(frozen=True)
class Target:
    """A step, its arguments, and its pod; None: the devices that JAX sees."""

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

    def lower_plain(self) -> jax.stages.Lowered:
        """Lower the step as it is.

        Raises:
            ValueError: if it was overlapped already.
        """
        if isinstance(self.step, Overlapped):
            raise ValueError(
                "the target returns an overlapped step; let it return the step as it was before "
                "overlap(), so that both can be compiled (--plain, --without)"
            )
        wrapped = find_jit(self.step) or jitted_alone(self.step)
        return arguments_reach(wrapped, wrapped.jitted.lower, self.args, {})

    def compile_plain(self) -> jax.stages.Compiled:
        """Compile the step as it is for the pod; raises as `lower_plain`."""
        return self.lower_plain().compile(compiler_options=compiler_options())


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
            f"--mesh {axes} has {math.prod(sizes.values())} devices, and JAX sees {len(devices)} "
            f"({devices[0].device_kind}): give axes whose sizes multiply to {len(devices)}"
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


def function(named: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION or FILE.py:FUNCTION names; without one, its `build`.

    Raises:
        ValueError: if there is none.
    """
    module, _, name = named.rpartition(":") if ":" in named else (named, "", "")
    loaded_module = _file(Path(module)) if is_file(module) else _module(module, named)
    function = getattr(loaded_module, name or "build", None)
    if not callable(function):
        raise ValueError(
            f"{module} has no function {name or 'build'!r}: expected one that takes a mesh and "
            "gives (step, args)"
        )
    return function


def _file(path: Path) -> ModuleType:
    """Import a file as `python FILE` would: modules in its folder are found too."""
    folder, name = str(path.resolve().parent), path.stem
    if name in sys.modules:
        name = f"target_{name}"  # a file that is called as something else: json.py
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses and pickle expect of a module
    spec.loader.exec_module(module)
    return module


def _module(module: str, named: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it: the user's modules are there
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it needs is not
        raise ValueError(
            f"no module {error.name!r} for target {named!r}: run the command where Python finds "
            "it and write MODULE:FUNCTION with dots, as in models.gpt:build, or FILE.py:FUNCTION"
        ) from error
