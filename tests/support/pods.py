"""The marks of tests that compile for GPUs that are not there."""

from __future__ import annotations

import functools
import importlib.util

import pytest


def _has_plugin() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))


needs_plugin = pytest.mark.skipif(
    not _has_plugin(), reason="JAX's CUDA plugin is not installed (the pods extra)"
)
pytestmark = [pytest.mark.pods, needs_plugin]


def marked(marks: list[pytest.MarkDecorator]):
    """Return a decorator that gives a test these marks."""
    return lambda test: functools.reduce(lambda f, mark: mark(f), marks, test)
