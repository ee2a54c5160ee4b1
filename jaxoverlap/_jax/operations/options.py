"""Read the compiler options of the compilation that is partitioning an operation.

An operation is partitioned inside XLA's compiler, in the thread that compiles. The options are only
in the local variables of JAX's functions further down that thread's stack.

Written against jax 0.11.2 and 0.12.0; `tests/ops/test_prices.py` pins what is used.
"""

from __future__ import annotations

import os
import sys


def compiler_option(name: str) -> str | None:
    """Return an option of the compilation that is going on, or of XLA_FLAGS; None if not set."""
    frame = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            overrides = getattr(value, "env_option_overrides", None)
            if isinstance(overrides, list):
                given = dict(overrides)
                return str(given[name]) if name in given else _flag(name)
        frame = frame.f_back
    return _flag(name)


def _flag(name: str) -> str | None:
    said = None
    for flag in os.environ.get("XLA_FLAGS", "").split():
        key, _, value = flag.removeprefix("--").partition("=")
        said = value if key == name else said
    return said
