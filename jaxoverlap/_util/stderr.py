"""Filter what native code writes to the terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator

_STDERR = 2
_lock = threading.Lock()
_users: dict[str, int] = {}  # at work, by the text that is dropped; one text at a time
_filters = contextlib.ExitStack()
_unused = threading.Condition(_lock)


@contextlib.contextmanager
def lines_without(text: str) -> Iterator[None]:
    """Drop the lines with a text from what this process writes to stderr, native code included.

    XLA writes to the file descriptor, with a copy of its logger in each plugin, so that no log
    level of JAX's reaches them all. A process of grep's reads what is written: if a compiler aborts
    this process, its last words still come through. Without grep, or stderr, nothing is dropped.
    Threads that drop the same text share one; with another text they wait for each other.
    """
    with _lock:
        _unused.wait_for(lambda: not _users or text in _users)
        if not _users:
            _filters.enter_context(_filtered(text))
        _users[text] = _users.get(text, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _users[text] -= 1
            if not _users[text]:
                del _users[text]
                _filters.close()
                _unused.notify_all()


@contextlib.contextmanager
def _filtered(text: str) -> Iterator[None]:
    grep = shutil.which("grep")
    try:
        own = os.dup(_STDERR)
    except OSError:  # closed, as in some daemons
        own = None
    if grep is None or own is None:
        yield
        return
    command = [grep, "-a", "-v", "--line-buffered", "-F", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=own, stderr=own) as reader:
        assert reader.stdin is not None
        os.dup2(reader.stdin.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(own, _STDERR)
            os.close(own)
            reader.stdin.close()  # grep ends with its input; leaving the block waits for that
