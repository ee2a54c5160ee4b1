"""A train step for a pod, and what it takes to lower it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh


@dataclass(frozen=True)
class Built:
    """A jitted step with its arguments.

    Attributes:
        function: the jitted step.
        args: what it is lowered for: shapes with shardings.
        context: what its trainer lowers it in.
    """

    function: Any
    args: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def lower(function: Any, args: tuple[Any, ...]) -> Any:
    """Lower a step; a partial or bound method has no `lower` that knows its arguments."""
    kwargs: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), function.keywords
    if isinstance(function, types.MethodType):
        function, args = function.__func__, (function.__self__, *args)
    return function.lower(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """A train step for a pod.

    Attributes:
        name: shown in the table.
        pod: as `jaxoverlap.parse_cluster` takes it.
        axes: sizes of the mesh's axes, slowest first.
        build: makes the step for a mesh of such axes.
        about: what a reader should know of it, in a line.
        stranger: the case of benchmarks/strangers whose environment it needs; None: this one.
    """

    name: str
    pod: str
    axes: Mapping[str, int]
    build: Callable[[Mesh], Built]
    about: str = ""
    stranger: str | None = None
