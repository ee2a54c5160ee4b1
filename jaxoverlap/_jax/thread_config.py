"""The configuration of JAX that a thread has: compared, and carried into another thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from jax._src import config, mesh


def inheriting[T](work: Callable[[], T]) -> Callable[[], T]:
    """Return work for a new thread, in which JAX's contexts of this thread hold too.

    `jax.default_matmul_precision`, `jax.enable_x64`, `jax.set_mesh` and their like hold in one
    thread; what another one traces would differ from what the caller's traces.
    """
    named = (config.config_states, vars(config), vars(mesh))
    every = {id(option): option for names in named for option in names.values()}.values()
    options = [option for option in every if isinstance(option, config.config_ext.Config)]
    given = [(option, option.get_local()) for option in options]
    resources = mesh.thread_resources.env

    @functools.wraps(work)
    def run() -> T:
        mesh.thread_resources.env = resources
        for option, value in given:
            if value is not config.config_ext.unset:
                _set(option, value)
        return work()

    return run


def trace_context() -> Hashable:
    """Return what a traced program depends on besides its arguments.

    `jax.jit` finds its programs by this too: matmul precision, x64, the mesh and their like.
    """
    return config.trace_context()


def _set(option: Any, value: Any) -> None:
    option.set_local(value)
    if hook := getattr(option, "_update_thread_local_hook", None):
        hook(value)
