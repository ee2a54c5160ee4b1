"""Run a function in several JAX processes at once, read what they send, and end them all.

A process that fails, dies or says nothing for too long ends the others. However this ends, no
process is left; `ended_by_signals` around it makes that true of signals too.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.lab import uninterrupted

Message = dict[str, Any]
_ROOT = Path(__file__).parents[2]  # of the checkout
_SHOWN = 2000  # characters of what a process wrote last


class FailedError(Exception):
    """A process failed; the message says which, and why."""


@dataclass(frozen=True)
class Start:
    """How processes are started.

    Attributes:
        count: of processes.
        devices: CPU devices of each; 0: one GPU, which all share.
        environment: more variables of a process, by its number.
        logs: a folder for what processes write.
        silent_s: how long they may say nothing.
        jax: whether they start JAX, and join.
        heartbeat_s: after which jax.distributed takes a process for dead.
        mourn_s: how long the others run on after one has failed, to see how they end.
    """

    count: int
    devices: int
    environment: Callable[[int], dict[str, str]]
    logs: Path
    silent_s: float = 300.0
    jax: bool = True
    heartbeat_s: float = 100.0
    mourn_s: float = 0.0


@dataclass
class _Child:
    """The parent's end of a process."""

    process: subprocess.Popen
    results: int
    log: Path
    read: bytes = b""
    pending: list[Message] = field(default_factory=list)
    ended: bool = False


def messages(
    start: Start, function: str, arguments: Message, *, until: float
) -> Iterator[list[Message]]:
    """Yield the messages of all processes, number by number: all first ones, all second ones.

    Args:
        start: how to start the processes.
        function: "module:name", which takes a `Process` and the arguments.
        arguments: what JSON can hold.
        until: the `time.monotonic()` at which all processes are ended.

    Raises:
        FailedError: if a process fails, says nothing for too long, or time is up.
    """
    start.logs.mkdir(parents=True, exist_ok=True)
    children: list[_Child] = []
    try:
        port = _free_port()
        for rank in range(start.count):
            children.append(_child(start, rank, port, function, arguments))
        yield from _read(children, start.silent_s, until)
    except FailedError as error:
        left_s = max(until - time.monotonic(), 0.0)
        ends = _mourned(children, min(start.mourn_s, left_s))
        raise FailedError(f"{error}{ends}") from error
    finally:
        _end(children)


def _read(children: list[_Child], silent_s: float, until: float) -> Iterator[list[Message]]:
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for rank, child in enumerate(children):
            selector.register(child.results, selectors.EVENT_READ, rank)
        while not all(child.ended for child in children):
            now = time.monotonic()
            if now >= until:
                raise FailedError("time is up")
            if now - heard >= silent_s:
                raise FailedError(f"no word for {silent_s:.0f} s")
            ready = selector.select(min(until - now, silent_s - (now - heard), 1.0))
            if not ready:
                _see_that_all_live(children)
            for key, _ in ready:
                heard = time.monotonic()
                _hear(children[key.data], key.data)
                if children[key.data].ended:
                    selector.unregister(key.fileobj)
            while all(child.pending for child in children):
                together = [child.pending.pop(0) for child in children]
                if len({message["kind"] for message in together}) > 1:
                    raise FailedError(f"processes are not at the same place: {together}")
                yield together
                heard = time.monotonic()  # whoever reads may have taken its time


def _hear(child: _Child, rank: int) -> None:
    """Read what a process has sent.

    Raises:
        FailedError: if it failed, or died without a word.
    """
    chunk = os.read(child.results, 1 << 16)
    if not chunk:
        code = child.process.wait()
        raise FailedError(f"process {rank} ended with code {code}: {_last_words(child.log)}")
    *lines, child.read = (child.read + chunk).split(b"\n")
    for message in map(json.loads, lines):
        if "failed" in message:
            raise FailedError(f"process {rank}: {message['failed']}")
        if message["kind"] == "end":
            child.ended = True
        else:
            child.pending.append(message)


def _see_that_all_live(children: list[_Child]) -> None:
    """Raise if a process is dead whose pipe is still open, in a process that it has started."""
    for rank, child in enumerate(children):
        if not child.ended and (code := child.process.poll()) is not None:
            raise FailedError(f"process {rank} ended with code {code}: {_last_words(child.log)}")


def _mourned(children: list[_Child], within_s: float) -> str:
    """Wait for the other processes to end; say how each did."""
    if not within_s:
        return ""
    began, ends = time.monotonic(), dict[int, str]()
    while len(ends) < len(children) and time.monotonic() < began + within_s:
        for rank, child in enumerate(children):
            if rank not in ends and (code := child.process.poll()) is not None:
                after_s = time.monotonic() - began
                ends[rank] = f"code {code} within {after_s:.0f} s ({_last_words(child.log)})"
        time.sleep(0.2)
    said = (
        f"{n}: {ends.get(n, f'still runs after {within_s:.0f} s')}" for n in range(len(children))
    )
    return f"; then process {'; process '.join(said)}"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip()[-_SHOWN:].splitlines()
    return " | ".join(lines[-4:])


def _child(start: Start, rank: int, port: int, function: str, arguments: Message) -> _Child:
    ours, theirs = os.pipe()
    log = start.logs / f"process{rank}.log"
    facts = dict(rank=rank, count=start.count, port=port, devices=start.devices, jax=start.jax)
    facts |= dict(heartbeat_s=start.heartbeat_s)
    told = json.dumps(facts | dict(parent=os.getpid()))
    command = [sys.executable, "-m", "benchmarks.gpu.child", str(theirs), function, told]
    # A wire says all that NCCL reads: what was set for other runs would be another wire.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    environment = {**inherited, "PYTHONPATH": _python_path(), **start.environment(rank)}
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, json.dumps(arguments)],
                env=environment,
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,  # what it starts ends with it
            )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return _Child(process, ours, log)


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))


def _end(children: list[_Child]) -> None:
    """Kill processes with all that they started; those that are done wait for this."""
    with uninterrupted():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in children:
            child.process.wait()
            os.close(child.results)
            if child.process.stdin:
                child.process.stdin.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
