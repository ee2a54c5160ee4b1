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
from jaxoverlap._jax.key_value_store import Store, awaited
from jaxoverlap._util.text import first_line

_HOSTS, _FAILED = "jaxoverlap/lost/hosts", "jaxoverlap/lost/failed"
_POLL_S = 0.1
_GRACE_S = 3.0  # in which a process that failed itself has said so
_RPC_S = 10.0  # of a call to the coordinator, which has no limit of its own
_SHOWN = 300  # characters of an error
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


class _Host(msgspec.Struct):
    """The host that a process runs on, and its address there, if the name has one."""

    name: str
    address: str


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
        LostError: instead of the JaxRuntimeError of a collective.
    """
    me, count = jits.started_processes()
    store: Store | None = jits.key_value_store() if count > 1 else None
    if store is None:
        yield
        return
    hosts = _introduced(store, me, count, within_s)
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        collective = collective_of(str(error))
        if not collective:
            raise
        seen = _Seen(collective, first_line(error, _SHOWN))
        raise _Survivor(store, me, hosts, seen, within_s).verdict() from error


def _introduced(store: Store, me: int, count: int, within_s: float) -> list[_Host]:
    """Record where this process runs, and read it of all others, while they can answer.

    Raises:
        LostError: if one does not say it in time.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    mine = msgspec.json.encode(_Host(name, address)).decode()
    store.key_value_set(f"{_HOSTS}/{me}", mine, allow_overwrite=True)
    end = time.monotonic() + within_s
    found = [awaited(store, f"{_HOSTS}/{r}", end - time.monotonic() + 0.1) for r in range(count)]
    missing = [str(rank) for rank, text in enumerate(found) if text is None]
    if missing:
        raise LostError(
            f"process {', '.join(missing)} did not come to train within {within_s:g} s; {name} "
            f"(process {me}) waited. See what became of it, or give it more time"
        )
    return [msgspec.json.decode(text, type=_Host) for text in found if text is not None]


def collective_of(message: str) -> str:
    """Return the collective that an error of XLA's names, as HLO calls it; "" if it is of none."""
    if not re.search(r"gloo|nccl|collective|communicator", message, re.IGNORECASE):
        return ""
    for pattern, name in _COLLECTIVES.items():
        if re.search(pattern, message, re.IGNORECASE):
            return name
    return "collective"


class _Survivor:
    """A process whose step failed, and that looks for those that do not live any more."""

    def __init__(self, store: Store, me: int, hosts: list[_Host], seen: _Seen, within_s: float):
        self._store, self._me, self._hosts, self._seen = store, me, hosts, seen
        self._within_s = within_s
        self._alive: set[int] = set()

    def verdict(self) -> LostError:
        """Say who is missing, as soon as that is clear.

        Who closed a connection, and does not say in a moment that it saw something fail itself, is
        dead: others need not be waited for. The coordinator, which all would say it to, is dead too
        if it was the one.
        """
        closed = re.search(r"\[([0-9a-f.:]+)\]:\d+", self._seen.said)
        if not re.search(r"by peer|broken pipe", self._seen.said, re.IGNORECASE):
            closed = None
        peer = next((r for r, h in enumerate(self._hosts) if closed and h.address == closed[1]), -1)
        if peer == 0:
            return self._lost([0], "closed its connection")
        trouble = _within(self._told, _RPC_S) or self._gather(peer)
        if trouble:
            return self._cut_off(trouble)
        missing = [rank for rank in range(len(self._hosts)) if rank not in self._alive]
        if peer in missing:
            return self._lost([peer], "closed its connection")
        if missing:
            return self._lost(missing, f"did not say anything within {self._within_s:g} s")
        return LostError(
            f"{self._failed}, and all processes are still there: a link was slower, or away for "
            f"longer, than collectives wait. Give them more time. ({self._seen.said})"
        )

    def _told(self) -> None:
        text = msgspec.json.encode(self._seen).decode()
        self._store.key_value_set(f"{_FAILED}/{self._me}", text, allow_overwrite=True)

    def _gather(self, peer: int) -> str:
        """Wait for the others to report that they are alive; return what prevented it."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < self._within_s:
            if trouble := _within(self._ask, _RPC_S):
                return trouble
            if len(self._alive) == len(self._hosts):
                return ""
            if peer >= 0 and peer not in self._alive and waited_s > _GRACE_S:
                return ""
            time.sleep(_POLL_S)
        return ""

    def _ask(self) -> None:
        self._alive |= {
            int(key.rpartition("/")[2]) for key, _ in self._store.key_value_dir_get(f"{_FAILED}/")
        }

    @property
    def _failed(self) -> str:
        here = self._hosts[self._me].name
        return f"{_a(self._seen.collective)} failed on {here} (process {self._me})"

    def _lost(self, ranks: list[int], what: str) -> LostError:
        who = ", ".join(f"{self._hosts[rank].name} (process {rank})" for rank in ranks)
        return LostError(
            f"{self._failed}: it waited for {who}, which {what}. See what became of it there, and "
            f"start all again from the last checkpoint. ({self._seen.said})",
            tuple(self._hosts[rank].name for rank in ranks),
        )

    def _cut_off(self, trouble: str) -> LostError:
        first, here = self._hosts[0].name, self._hosts[self._me].name
        return LostError(
            f"{self._failed}, and {first} (process 0), where jax.distributed's coordinator runs, "
            f"does not answer: {trouble}. Either it or {here} is cut off. Start all again from the "
            f"last checkpoint. ({self._seen.said})",
            (first, here),
        )


def _a(collective: str) -> str:
    return f"{'an' if collective[0] == 'a' else 'a'} {collective}"


def _within(work: Callable[[], None], seconds: float) -> str:
    """Run some work for so long at most; return why it did not end, or "" if it did."""
    trouble: list[str] = []

    def run() -> None:
        try:
            work()
        except jax.errors.JaxRuntimeError as error:
            trouble.append(first_line(error, _SHOWN))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return f"no answer within {seconds:g} s" if thread.is_alive() else "".join(trouble)
