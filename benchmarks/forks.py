"""Run work in child processes with Python's modules imported: forks of a server that has them.

Importing JAX and what goes with it takes a process two seconds and more. The server does that once,
and nothing else: no compiler, no devices and no flags of XLA's, which each fork reads for itself.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from jaxoverlap.step.trial import how_it_ended

_FORKS = multiprocessing.get_context("forkserver")

Row = dict[str, Any]


def import_first(modules: Iterable[str]) -> None:
    """Choose the modules that the server imports; call this before the first fork."""
    _FORKS.set_forkserver_preload(list(modules))


def in_fork(work: Callable[..., Row], *arguments: Any, timeout_s: float, xla_flags: str) -> Row:
    """Return what `work` returns for these arguments in a fork; {"error"} if it failed.

    Args:
        work: a function of a module, and not of a main one.
        xla_flags: flags to put in front of those of the environment.
    """
    mine, theirs = _FORKS.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as stderr, mine:
        request = theirs, stderr.name, xla_flags, work, arguments
        fork = _FORKS.Process(target=_run, args=request)
        fork.start()
        theirs.close()
        try:
            row = mine.recv() if mine.poll(timeout_s) else None
        except EOFError:  # it ended without a word
            fork.join()
            return {"error": how_it_ended(fork.exitcode or 0, stderr.read())}
        if row is None:
            fork.kill()
        fork.join()
        return {"error": f"stopped after {timeout_s:.0f} s"} if row is None else row


def _run(
    answer: Connection,
    stderr: str,
    xla_flags: str,
    work: Callable[..., Row],
    arguments: tuple[Any, ...],
) -> None:
    """Run the work in the fork; code that aborts writes to the file, not to Python's stderr."""
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    os.environ["XLA_FLAGS"] = f"{xla_flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    answer.send(work(*arguments))
