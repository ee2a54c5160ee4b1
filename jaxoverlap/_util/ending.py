"""Learn in other threads that the interpreter ends, so that what they compute does not delay it."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what is registered last is called first
import threading
from collections.abc import Callable

_ends = threading.Event()


class EndingError(BaseException):
    """Raised in a thread whose work nobody waits for any more; not to be caught as an Exception."""


def at_end(work: Callable[[], object]) -> None:
    """Call a function when the interpreter ends, before it waits for threads.

    `atexit` calls its functions after that.
    """
    threading._register_atexit(work)  # type: ignore[attr-defined]


def check_running() -> None:
    """Return if the interpreter goes on.

    Raises:
        EndingError: if it ends.
    """
    if _ends.is_set():
        raise EndingError


at_end(_ends.set)
