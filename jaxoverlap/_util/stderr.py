"""Filter what native code writes to the terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator

_STDERR = 2
_one_at_a_time = threading.Lock()  # each restores the descriptor that it found


@contextlib.contextmanager
def lines_without(text: str) -> Iterator[None]:
    """Drop the lines with a text from what this process writes to stderr, native code included.

    XLA writes to the file descriptor, with a copy of its logger in each plugin, so that no log
    level of JAX's reaches them all. A process of grep's reads what is written: if a compiler aborts
    this process, its last words still come through. Without grep, or stderr, nothing is dropped.
    """
    with _one_at_a_time, _filtered(text):
        yield


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
