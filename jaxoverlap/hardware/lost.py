"""Say which host is missing where a collective fails: the survivors compare who is still there.

A collective that fails says what a connection did ("Connection closed by peer [10.77.0.3]:2475"),
or only that time is up. So each process leaves the name of its host in jax.distributed's store when
it starts, and, when its step fails, that it is alive and what it saw. Whoever does not say so in
time is the one that is missing.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._jax.key_value_store import Store

_NAMES, _FAILED = "jaxoverlap/lost/names", "jaxoverlap/lost/failed"
_POLL_S = 0.1
# As XLA's CPU and GPU runtimes word their errors, and as HLO calls these collectives.
_COLLECTIVES = {
    r"all-?reduce": "all-reduce",
    r"reduce-?scatter": "reduce-scatter",
    r"all-?gather": "all-gather",
    r"all-?to-?all": "all-to-all",
    r"collective[- ]?permute|send|recv": "collective-permute",
}


class LostError(RuntimeError):
    """A step failed because of other processes; the message names their hosts and the collective.

    Attributes:
        hosts: the names of the hosts that are missing; empty if all are still there.
    """

    def __init__(self, message: str, hosts: tuple[str, ...] = ()):
        super().__init__(message)
        self.hosts = hosts


class _Seen(msgspec.Struct):
    """What a process that is alive saw fail."""

    collective: str
    said: str


@contextlib.contextmanager
def lost_named(within_s: float = 30.0) -> Iterator[None]:
    """Name the hosts that are missing when a step of many processes fails in this block.

        with jaxoverlap.lost_named():
            for batch in batches:
                state, metrics = step(state, batch)

    In one process nothing is changed. Every process of the job has to be in such a block.

    Args:
        within_s: how long to wait, once a step has failed here, until the others have failed too:
            longer than their collectives wait.

    Raises:
        LostError: in the place of the JaxRuntimeError of a collective.
    """
    me, count = jits.started_processes()
    store: Store | None = jits.key_value_store() if count > 1 else None
    if store is None:
        yield
        return
    store.key_value_set(f"{_NAMES}/{me}", socket.gethostname(), allow_overwrite=True)
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        collective = collective_of(str(error))
        if not collective:
            raise
        raise _named(store, me, count, _Seen(collective, str(error)), within_s) from error


def collective_of(said: str) -> str:
    """Return the collective that an error of XLA's names, as HLO calls it; "" if it is of none."""
    if not re.search(r"gloo|nccl|collective|communicator", said, re.IGNORECASE):
        return ""
    for pattern, name in _COLLECTIVES.items():
        if re.search(pattern, said, re.IGNORECASE):
            return name
    return "collective"


def _named(store: Store, me: int, count: int, seen: _Seen, within_s: float) -> LostError:
    """Wait for what the others saw, and say who did not say anything."""
    here = socket.gethostname()
    names: dict[int, str] = {}
    alive: dict[int, _Seen] = {}

    def gather() -> None:
        text = msgspec.json.encode(seen).decode()
        store.key_value_set(f"{_FAILED}/{me}", text, allow_overwrite=True)
        end = time.monotonic() + within_s
        names.update((_rank(key), name) for key, name in store.key_value_dir_get(f"{_NAMES}/"))
        while len(alive) < count and time.monotonic() < end:
            rows = store.key_value_dir_get(f"{_FAILED}/")
            alive.update((_rank(key), msgspec.json.decode(row, type=_Seen)) for key, row in rows)
            time.sleep(_POLL_S)

    # Where the coordinator cannot be reached, a call to it takes as long as it likes.
    trouble = _within(gather, within_s + 5.0)
    failed = f"a {seen.collective} failed on {here} (process {me})"
    if trouble or me not in alive:
        what = trouble or "it does not answer"
        return LostError(
            f"{failed}, and the host of process 0, where jax.distributed's coordinator runs, "
            f"cannot be reached from here: {what}. Either that host or {here} is cut off. Start "
            f"all again from the last checkpoint. ({_short(seen.said)})",
            (names.get(0, "the host of process 0"),),
        )
    missing = [rank for rank in range(count) if rank not in alive]
    if not missing:
        return LostError(
            f"{failed}, and all processes are still there: a link was slower, or away for longer, "
            f"than collectives wait. Give them more time. ({_short(seen.said)})"
        )
    hosts = tuple(names.get(rank, f"process {rank}") for rank in missing)
    who = ", ".join(f"{host} (process {rank})" for host, rank in zip(hosts, missing, strict=True))
    return LostError(
        f"{failed}: it waited for {who}, which did not say anything within {within_s:g} s. See "
        "what became of it there, and start all again from the last checkpoint. "
        f"({_short(seen.said)})",
        hosts,
    )


def _within(work: Callable[[], None], seconds: float) -> str:
    """Run some work for so long at most; return why it did not end, or "" if it did."""
    trouble: list[str] = []

    def run() -> None:
        try:
            work()
        except jax.errors.JaxRuntimeError as error:
            trouble.append(_short(str(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return f"no answer within {seconds:g} s" if thread.is_alive() else "".join(trouble)


def _rank(key: str) -> int:
    return int(key.rpartition("/")[2])


def _short(text: str) -> str:
    return text.splitlines()[0][:300]
