"""Compile a candidate while the step trains, and see whether it may run in that step's stead."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec

from jaxoverlap._jax import jits
from jaxoverlap._jax.jobs import peak_bytes
from jaxoverlap._jax.thread_config import inheriting
from jaxoverlap._util.text import first_line, human_bytes
from jaxoverlap.hardware.topology import cluster_of
from jaxoverlap.plan.plan import Plan
from jaxoverlap.search.found import found
from jaxoverlap.search.kept import most_bytes
from jaxoverlap.start.candidates import Offer
from jaxoverlap.step.context import mesh_of
from jaxoverlap.step.options import Options
from jaxoverlap.step.program import StepProgram, lowered_as, step_program

COMPILE_WITHIN_S = 1800.0  # seconds, after which a compilation is taken to hang
MEMORY_SHARE = 0.95  # of a device's memory: an allocator finds no room for the last of it


@dataclass(frozen=True)
class Results:
    """Records how a program types and shards its results, and which arguments it takes.

    Attributes:
        types: of each result: shape, dtype and whether it is weakly typed.
        shardings: of each result.
        donated: the numbers of the arguments whose memory it takes. Whether a call has deleted an
            array says less: on CPU devices one that NumPy reads at that time stays.
    """

    types: tuple[Any, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    donated: frozenset[int]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Results:
        """Return those of a compiled program."""
        results = jits.results_of(compiled)
        types, shardings = (tuple(one[part] for one in results) for part in (0, 1))
        return cls(types, shardings, jits.donated(compiled))

    @classmethod
    def of_original(cls, call: jits.Call) -> Results:
        """Return those of the original step."""
        return cls.of(_original(call))

    def differ(self, original: Results) -> str:
        """Return in what they differ from the original step's; empty if in nothing."""
        pairs = zip(self.types, self.shardings, original.types, original.shardings, strict=True)
        for position, (made, sharding, wanted, wanted_sharding) in enumerate(pairs):
            if made != wanted:
                return f"result {position} is of type {made}, and not {wanted}"
            same = sharding.is_equivalent_to(wanted_sharding, len(wanted[0]))
            if not same or sharding.memory_kind != wanted_sharding.memory_kind:
                return f"result {position} is sharded as {sharding}, and not {wanted_sharding}"
        if apart := self.donated ^ original.donated:
            donates = "donates" if min(apart) in self.donated else "does not donate"
            return f"it {donates} argument {min(apart)}, unlike the original step"
        return ""


def is_taken(flat: Sequence[Any]) -> bool:
    """Return whether a call has taken one of its arguments."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in flat)


@dataclass(frozen=True)
class Contender:
    """A candidate that is compiled, or why it cannot run.

    Attributes:
        run: takes the flat arguments, and returns the flat results; None if it cannot run.
        plan: its plan as it was followed; None for the original step, or where it was not.
        digest: a hash of what was compiled, the same in all processes.
        peak_bytes: bytes that a device needs at most.
        why_not: why it cannot run; empty if it can.
    """

    run: Callable[[Sequence[Any]], list[Any]] | None = None
    plan: Plan | None = None
    digest: str = ""
    peak_bytes: int = 0
    why_not: str = ""


def contender(call: jits.Call, options: Options, offer: Offer, room_bytes: float) -> Contender:
    """Compile a program that is worth a trial.

    Args:
        call: the step's call.
        options: the user's options.
        offer: the program, by its plan.
        room_bytes: bytes of a device that the step may have; infinity where not known.
    """
    try:
        program = step_program(call, replace(options, plan=offer.plan, on_error="raise"), found)
        compiled = within(lambda: _compiled(call, program), COMPILE_WITHIN_S)
        run = jits.flat_call(compiled)
        why_not = Results.of(compiled).differ(Results.of_original(call))
    except TimeoutError:
        return Contender(why_not=f"XLA did not compile it within {COMPILE_WITHIN_S:g} s")
    except Exception as error:  # whatever it is, training goes on without this candidate
        return Contender(why_not=f"{type(error).__name__}: {first_line(error)}")
    facts = program.agreement.facts if program.agreement else {}
    digest = hashlib.sha256(msgspec.json.encode(sorted(facts.items()))).hexdigest()
    needs = peak_bytes(compiled.memory_analysis())
    if needs > room_bytes:
        why_not = f"it needs {human_bytes(needs)} of a device, where {human_bytes(room_bytes)} are"
    return Contender(None if why_not else run, program.plan, digest, needs, why_not)


def original(call: jits.Call) -> Contender:
    """Return the original step, compiled as `jax.jit` does, as one that trials compare with."""
    return Contender(jits.flat_call(_original(call)))


def _original(call: jits.Call) -> jax.stages.Compiled:
    """Return the original step compiled; JAX finds it so once it has run."""
    return call.traced().lower().compile()


def _compiled(call: jits.Call, program: StepProgram) -> jax.stages.Compiled:
    with program.compiling():
        return lowered_as(call, program).compile()


def within[T](work: Callable[[], T], seconds: float) -> T:
    """Return the result of work that may hang, in a thread of its own.

    The caller's thread is not a daemon, so an interpreter that ends waits for the work as it does
    for a compilation of `jax.jit`, and no longer than this.

    Raises:
        TimeoutError: if it takes longer; the thread is left to itself.
        Exception: what the work raises.
    """
    result, inherited = Future[T](), inheriting(work)

    def run() -> None:
        try:
            result.set_result(inherited())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="jaxoverlap compiles", daemon=True).start()
    return result.result(timeout=seconds)


def fits_as_written(call: jits.Call, options: Options) -> bool:
    """Return whether the original step needs no more memory than `memory=` states.

    It is compiled for that, as `jax.jit` would, which finds it compiled.
    """
    cluster = options.cluster or cluster_of(mesh_of(call), options.agree_within_s)
    if options.memory is None or cluster is None:
        return True
    return peak_bytes(_original(call).memory_analysis()) <= most_bytes(options, cluster)


def room_bytes(flat: Sequence[Any]) -> float:
    """Return the bytes that the step may have on each device of its arguments.

    That is what is not allocated now, and what the arguments have; the least of all devices.
    Infinity where devices do not count them.
    """
    jax.block_until_ready([x for x in flat if isinstance(x, jax.Array)])
    owned = dict[Any, int]()
    for x in flat:
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            owned[shard.device] = owned.get(shard.device, 0) + shard.data.nbytes
    rooms = [_room(device.memory_stats(), own) for device, own in owned.items()]
    return min(rooms, default=float("inf"))


def _room(stats: dict[str, int] | None, owned: int) -> float:
    """Return the bytes of a device that a step may have; infinity where it does not count them.

    Args:
        stats: of its allocator.
        owned: bytes of the step's arguments.
    """
    if not stats or "bytes_limit" not in stats:
        return float("inf")
    return stats["bytes_limit"] * MEMORY_SHARE - stats["bytes_in_use"] + owned


def timed(run: Callable[[], Any], flat: Sequence[Any]) -> tuple[Any, float]:
    """Run a step; return its results, and the seconds from its arguments' readiness to theirs."""
    jax.block_until_ready([x for x in flat if isinstance(x, jax.Array) and not x.is_deleted()])
    began = time.perf_counter()
    results = jax.block_until_ready(run())
    return results, time.perf_counter() - began
