"""End the command soon after Ctrl-C, with all processes that it started.

Python runs a signal's handler between two bytecodes of the main thread, and that thread may be
inside XLA for a minute. The wakeup descriptor is written by the C handler, so a thread that reads
it hears of the signal at once. It kills the children, which a thread pool of the main thread waits
for; what has still not ended after a moment is ended as it is. Plans, results and caches are
written atomically, so nothing is left half-written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxoverlap.cli.shell.errors import INTERRUPTED

_GRACE_S = 1.5  # for the main thread to unwind; a user who presses Ctrl-C waits 3 s at most


_interrupted = threading.Event()


def interrupted() -> bool:
    """Return whether Ctrl-C was pressed: later errors come from killed child processes."""
    return _interrupted.is_set()


@contextlib.contextmanager
def ends_on_interrupt(message: str) -> Iterator[None]:
    """End the process, and its children, within seconds after SIGINT.

    Args:
        message: is printed to stderr on an interrupt.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Descriptor 2 is a filter's while XLA tries candidates, and the filter is one of the children.
    stderr = os.dup(2)
    threading.Thread(target=_watch, args=(reader, stderr, message), daemon=True).start()
    hook, sys.unraisablehook = sys.unraisablehook, _show_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(before)
        os.close(writer)
        if interrupted():  # a killed child's closed pipe has an exit code of its own in typer
            sys.exit(INTERRUPTED)


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Leave out a KeyboardInterrupt that came inside a callback of the garbage collector.

    Python drops it there; the command ends all the same, as its children are killed.
    """
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)


def _watch(reader: int, stderr: int, message: str) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            _interrupted.set()
            os.write(stderr, f"\n{message}\n".encode())
            _kill(os.getpid())
            time.sleep(_GRACE_S)
            _kill(os.getpid())
            os._exit(INTERRUPTED)
    os.close(reader)
    os.close(stderr)


def _kill(process: int) -> None:
    """Kill all descendants of a process, the deepest first. Linux only: elsewhere it does nothing.

    Children of a tuning also end by themselves when the pipe to this process closes.
    """
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the child, has ended
            for child in map(int, listed.read_text().split()):
                _kill(child)
                os.kill(child, signal.SIGKILL)
