"""Compare the programs that many processes are about to compile, before they compile.

Processes that run different programs wait for each other's collectives for ever. Here they meet in
the key-value store of `jax.distributed`, which runs over the network and needs no device: each
leaves a hash of what it is about to compile, and all go on, or none does.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax.key_value_store import DisagreementError, Store, awaited, store_of_processes
from jaxoverlap._util.expect import expect, expect_seconds
from jaxoverlap.hardware.pods import is_pod
from jaxoverlap.plan.plan import Plan

_SHOWN = 8  # processes of a hash, and differences


@dataclass(frozen=True)
class Agreement:
    """The program that this process is about to compile, in facts that processes compare.

    Attributes:
        step: the step's name.
        processes: the processes that run it, this one among them.
        facts: the facts that identify the program, by name.
        failed: why this process has no program; empty if it has one.
        plain: whether this process may run the step as it is, if another has no program.
    """

    step: str
    processes: tuple[int, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    plain: bool = False


class _Head(msgspec.Struct):
    """The part of a stand that every process reads of every other."""

    process: int
    host: str
    digest: str
    failed: str
    plain: bool

    def __str__(self) -> str:
        return f"process {self.process} ({self.host})"


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """List the processes that have to agree on a step on a mesh; none where there is but one."""
    if jax.process_count() == 1 or is_pod(mesh):
        return ()
    processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    return processes if len(processes) > 1 and jax.process_index() in processes else ()


def meet(agreement: Agreement, within_s: float) -> bool:
    """Wait for the other processes, and see whether all are about to compile the same.

    Args:
        agreement: what this one is about to compile.
        within_s: how long the first that comes waits for the last.

    Returns:
        True if all go on; False if all run the step as it is, as one could not rewrite it.

    Raises:
        DisagreementError: in every process: if one does not come, two are not about to compile the
            same, or one has failed and not all may run the step as it is.
    """
    store, where = store_of_processes(), next_meeting("agree", agreement.processes)
    me = jax.process_index()
    digest = hashlib.sha256(msgspec.json.encode(sorted(agreement.facts.items()))).hexdigest()
    head = _Head(me, socket.gethostname(), digest, agreement.failed, agreement.plain)
    store.key_value_set(f"{where}/facts/{me}", msgspec.json.encode(agreement.facts).decode())
    store.key_value_set(f"{where}/heads/{me}", msgspec.json.encode(head).decode())
    try:
        store.wait_at_barrier(where, round(within_s * 1e3), list(agreement.processes))
    except jax.errors.JaxRuntimeError as error:
        raise DisagreementError(
            _absent(agreement, _heads(store, where), within_s, error)
        ) from error
    heads = _heads(store, where)
    if failed := [h for h in heads if h.failed]:
        if all(h.plain for h in heads):
            return False
        raise DisagreementError(_failure(agreement.step, failed))
    if len({h.digest for h in heads}) > 1:
        raise DisagreementError(_difference(agreement, heads, store, where))
    return True


def _heads(store: Store, where: str) -> list[_Head]:
    heads = [
        msgspec.json.decode(v, type=_Head) for _, v in store.key_value_dir_get(f"{where}/heads/")
    ]
    return sorted(heads, key=lambda h: h.process)


# -- what to say ----------------------------------------------------------------------------------


def _listed(heads: Sequence[_Head]) -> str:
    more = f" and {len(heads) - _SHOWN} more" if len(heads) > _SHOWN else ""
    return ", ".join(map(str, heads[:_SHOWN])) + more


def _absent(agreement: Agreement, heads: Sequence[_Head], within_s: float, error: Exception) -> str:
    missing = sorted({*agreement.processes} - {h.process for h in heads})
    if not missing:
        return (
            f"process {jax.process_index()} came to {agreement.step} after the others had "
            f"given up: they waited {within_s:g} s. If it may take longer, say so in "
            "overlap(agree_within_s=)"
        )
    shown = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
    reason = str(error).splitlines()[0]
    return (
        f"process {shown} did not come to {agreement.step} within {within_s:g} s, so it was not "
        f"compiled; here are {_listed(heads)}. See what became of it there; every process has to "
        "call the step. If it may take longer, say so in overlap(agree_within_s=). "
        f"({reason})"
    )


def _failure(step: str, failed: Sequence[_Head]) -> str:
    lines = "".join(f"\n  {head}: {head.failed}" for head in failed[:_SHOWN])
    return f"{step} was not compiled, as it failed elsewhere:{lines}"


def _difference(agreement: Agreement, heads: Sequence[_Head], store: Store, where: str) -> str:
    """Say which processes would compile which program, and what differs between the programs."""
    by_digest: dict[str, list[_Head]] = defaultdict(list)
    for head in heads:
        by_digest[head.digest].append(head)
    lines = [f"  {digest[:12]}: {_listed(who)}" for digest, who in by_digest.items()]
    first, *others = (who[0] for who in by_digest.values())
    for other in others[:_SHOWN]:
        lines.append(f"process {other.process}, where process {first.process} has the other:")
        lines += [f"  {line}" for line in _facts(store, where, first, other)]
    return (
        f"{agreement.step} is not the same program in all processes, and was not compiled:\n"
        + "\n".join(lines)
        + "\nGive all the same plan, code and versions: jaxoverlap.agreed() hands process 0's plan "
        "to the others"
    )


def _facts(store: Store, where: str, first: _Head, other: _Head) -> Iterator[str]:
    read = {
        head.process: msgspec.json.decode(
            store.blocking_key_value_get(f"{where}/facts/{head.process}", 1000),
            type=dict[str, str],
        )
        for head in (first, other)
    }
    mine, theirs = read[other.process], read[first.process]
    names = [n for n in dict.fromkeys((*theirs, *mine)) if mine.get(n) != theirs.get(n)]
    for name in names[:_SHOWN]:
        yield f"{name}: {mine.get(name, 'none')}, and not {theirs.get(name, 'none')}"
    if len(names) > _SHOWN:
        yield f"and {len(names) - _SHOWN} more"


# -- one plan for all -----------------------------------------------------------------------------


class _Given(msgspec.Struct):
    """The text, or the failure, that one process leaves for the others."""

    text: str = ""
    failed: str = ""


def agreed(make: Callable[[], Plan], *, within_s: float = 3600.0) -> Plan:
    """Return process 0's plan, in every process.

        plan = jaxoverlap.agreed(lambda: Plan.read("plan.json"))

    Args:
        make: returns the plan; called in process 0 alone, while the others wait.
        within_s: how long they wait.

    Raises:
        DisagreementError: in the others, at once if process 0 failed, or if it gave none in time.
        Exception: in process 0, what `make` raises.
    """
    expect(callable(make), "make", make, "a function of no arguments that returns a plan")
    expect_seconds("within_s", within_s)
    if jax.process_count() == 1:
        return make()
    everyone = tuple(range(jax.process_count()))
    text = handed(lambda: make().to_json(), "plan", everyone, within_s=within_s)
    return Plan.from_json(text)


def handed(
    make: Callable[[], str], what: str, processes: tuple[int, ...], *, within_s: float
) -> str:
    """Return in all of some processes a text that the first of them makes.

    Args:
        make: called in the first alone, while the others wait.
        what: a name for the text, for errors.
        processes: the processes, this one among them; none, if there is but one.
        within_s: how long they wait.

    Raises:
        DisagreementError, Exception: as `agreed`.
    """
    if not processes:
        return make()
    store, where, first = store_of_processes(), next_meeting(what, processes), processes[0]
    if jax.process_index() == first:
        try:
            text = make()
        except BaseException as error:
            _give(store, where, _Given(failed=f"{type(error).__name__}: {error}"))
            raise
        _give(store, where, _Given(text=text))
        return text
    left = awaited(store, where, within_s)
    if left is None:
        raise DisagreementError(
            f"process {first} gave no {what} within {within_s:g} s; process {jax.process_index()} "
            "waited. Give it longer, in agreed(within_s=), or see what became of it"
        )
    given = msgspec.json.decode(left, type=_Given)
    if given.failed:
        raise DisagreementError(f"process {first} made no {what}, as it failed: {given.failed}")
    return given.text


def _give(store: Store, where: str, given: _Given) -> None:
    store.key_value_set(where, msgspec.json.encode(given).decode())


# -- where they meet ------------------------------------------------------------------------------

_lock = threading.Lock()
_turns: dict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


def next_meeting(what: str, processes: tuple[int, ...]) -> str:
    """Return a key of the store for the next meeting of these processes.

    They find each other by counting: all of them run the same steps in the same order.
    """
    with _lock:
        turn = next(_turns[what, processes])
    group = hashlib.sha256(repr(processes).encode()).hexdigest()[:8]
    return f"jaxoverlap/{what}/{group}/{turn}"
