"""Show what is being done: one line on a terminal, one line of the log for each stage elsewhere.

The log is Python's, named "jaxoverlap", at level INFO:

    logging.basicConfig(level=logging.INFO)
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_STDERR = 2
_LOG = logging.getLogger("jaxoverlap")
# A thread has its own line, shown by a function, and its own count of the last stage's candidates.
_line: ContextVar[Callable[[str], None] | None] = ContextVar("progress line", default=None)
_count: ContextVar[_Count | None] = ContextVar("candidates being compiled", default=None)
_last: ContextVar[tuple[str, int]] = ContextVar("last stage", default=("", 0))


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show a task, its stage and its elapsed time on stderr, if that is a terminal.

    Inside another task of the same thread it is a stage of that one.
    """
    if _line.get() is not None or not (_is_terminal(sys.stderr) and os.isatty(_STDERR)):
        stage(what)
        yield
        return
    # A descriptor of its own: stderr itself is filtered while XLA tries candidates.
    with os.fdopen(os.dup(_STDERR), "w") as terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(
            *columns,
            console=Console(file=terminal),
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),  # or what is printed would not reach its file
        ) as shown:
            task = shown.add_task(what, total=None)
            token = _line.set(lambda text: shown.update(task, description=f"{what}: {text}"))
            try:
                yield
            finally:
                _line.reset(token)


def _is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; Python may have none, and notebooks have their own."""
    return getattr(stream, "isatty", bool)()


def stage(text: str) -> None:
    """Say which stage of a task has begun."""
    _last.set(("", 0))
    if (show := _line.get()) is not None:
        show(text)
    else:
        _LOG.info(text)


def compiling(count: int) -> None:
    """Say that so many candidates are being compiled; `counting` counts those that are."""
    stage(f"compiling {count} candidate{'s' * (count > 1)}")
    _count.set(_Count(count, _line.get()))


def counting() -> Callable[[str], None]:
    """Return what counts a candidate as compiled, by its name; any thread may call it."""
    count = _count.get()
    return (lambda _: None) if count is None else count.add


class _Count:
    """Counts the candidates of a batch that are compiled."""

    def __init__(self, most: int, show: Callable[[str], None] | None):
        self._done, self._most, self._show = 0, most, show
        self._began, self._lock = time.monotonic(), threading.Lock()

    def add(self, name: str) -> None:
        with self._lock:
            self._done += 1
            text = f"compiled {self._done} of {self._most} candidates"
        if self._show is not None:
            self._show(text)
        else:
            _LOG.info("%s: %s, after %.1f s", text, name, time.monotonic() - self._began)


def tried(name: str, left: int | None) -> None:
    """Count a candidate of a stage of deciding; the log has one line for the stage.

    Args:
        name: the stage.
        left: how many more it may try; None if it does not say.
    """
    last, count = _last.get()
    count = count + 1 if last == name else 1
    _last.set((name, count))
    if (show := _line.get()) is not None:
        most = "" if left is None else f" of at most {count + max(left, 0)}"
        show(f"{name} ({count}{most})")
    elif count == 1:
        _LOG.info("deciding: %s", name)
