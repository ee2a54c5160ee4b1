"""Child processes that answer requests, one after the other, and end when they are idle.

A child that imports JAX and compiles its first program is busy for seconds before it begins; the
next request finds it ready. A child that aborts is an answer like any other, and is replaced. It
ends when its parent does, also in the middle of a request.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxoverlap._util.ending import at_end, check_running

_IDLE_S = 20.0  # a child keeps hundreds of MB, which are the training's once all is compiled
_SIZE = 8  # bytes, before each message
# The child may have to look for this package where the parent found it, on a path of its own.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from jaxoverlap._util.workers import main; "
    "main(sys.argv[2])"
)


class WorkerEndedError(Exception):
    """A child ended before it answered.

    Attributes:
        code: its exit code; the negative number of the signal that ended it.
        stopped: whether it was stopped as its time was up.
        said: what it wrote to stderr.
    """

    def __init__(self, code: int, said: str, *, stopped: bool):
        super().__init__(code, said)
        self.code, self.said, self.stopped = code, said, stopped


class _Worker:
    """A child process that waits for requests."""

    def __init__(self, function: str, environment: Mapping[str, str]):
        self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - it lives as long as the child
        self._child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2]), function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
        )
        assert self._child.stdin and self._child.stdout
        self._requests, self._answers = self._child.stdin, self._child.stdout

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for the answer.

        Raises:
            WorkerEndedError: if the child ends before it has answered, or its time is up.
        """
        check_running()
        self._said.truncate(0)
        _busy.add(self)
        stop = threading.Timer(timeout_s, self._child.kill)
        stop.start()
        try:
            self._requests.write(len(request).to_bytes(_SIZE, "big") + request)
            self._requests.flush()
            size = self._answers.read(_SIZE)
            answer = self._answers.read(int.from_bytes(size, "big"))
            if size and len(answer) == int.from_bytes(size, "big"):
                return answer
        except BrokenPipeError:
            pass
        finally:
            _busy.discard(self)
            stopped = stop.finished.is_set()
            stop.cancel()
        code = self.close()
        self._said.seek(0)
        raise WorkerEndedError(code, self._said.read().decode(errors="replace"), stopped=stopped)

    def kill(self) -> None:
        """Stop the child."""
        self._child.kill()

    def close(self) -> int:
        """Let the child end, wait for it, and return its exit code."""
        with contextlib.suppress(BrokenPipeError):  # of what it did not read
            self._requests.close()
        code = self._child.wait()
        self._answers.close()
        return code


_idle: dict[tuple[str, frozenset[tuple[str, str]]], list[_Worker]] = defaultdict(list)
_lock = threading.Lock()
_busy = set[_Worker]()


def _stop_busy() -> None:
    """Stop the children whose answers nobody will read, as the interpreter ends."""
    for worker in list(_busy):
        worker.kill()


at_end(_stop_busy)


def ask(
    function: Callable[[bytes], bytes],
    request: bytes,
    environment: Mapping[str, str],
    timeout_s: float,
) -> bytes:
    """Let a child answer a request: one that is idle, or else a new one.

    Args:
        function: answers a request in the child; a function of a module.
        request: the request.
        environment: the child's environment.
        timeout_s: the seconds after which the child is stopped.

    Raises:
        WorkerEndedError: if the child ends before it has answered, or its time is up.
        OSError: if no child can be started.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    key = name, frozenset(environment.items())
    with _lock:
        worker = _idle[key].pop() if _idle[key] else None
    if worker is not None:
        try:
            return _asked(worker, key, request, timeout_s)
        except WorkerEndedError as ended:
            if ended.code != 0:
                raise  # else it had been idle for too long
    return _asked(_Worker(name, environment), key, request, timeout_s)


def _asked(
    worker: _Worker,
    key: tuple[str, frozenset[tuple[str, str]]],
    request: bytes,
    timeout_s: float,
) -> bytes:
    answer = worker.ask(request, timeout_s)
    with _lock:
        _idle[key] = [*(one for one in _idle[key] if one.is_alive), worker]
    return answer


@atexit.register
def _end_idle() -> None:
    with _lock:
        for worker in (one for some in _idle.values() for one in some):
            worker.close()
        _idle.clear()


# -- in the child ---------------------------------------------------------------------------------


def main(function: str) -> None:
    """Answer requests from stdin until none comes for a while, or the parent ends."""
    module, _, name = function.partition(":")
    answers = os.dup(1)
    os.dup2(2, 1)  # what compilers print is no answer
    threading.Thread(target=end_with_parent, daemon=True).start()
    answer = getattr(importlib.import_module(module), name)
    while select.select([0], [], [], _IDLE_S)[0]:
        if not (size := _read(_SIZE)):
            return
        said = answer(_read(int.from_bytes(size, "big")))
        message = len(said).to_bytes(_SIZE, "big") + said
        while message:
            message = message[os.write(answers, message) :]


def _read(size: int) -> bytes:
    """Read so many bytes from stdin, or what there is when it ends; nothing is read ahead."""
    parts = list[bytes]()
    while size and (part := os.read(0, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def end_with_parent() -> None:
    """End this process when the other end of stdin is closed."""
    closed = select.poll()
    closed.register(0, 0)
    closed.poll()  # no lock, which Python would want when it ends
    os._exit(1)
