"""Compile the original and the overlapped step, and keep whichever simulates faster.

Child processes compile the candidates that the overlapped step is compared with (`trial.py`), as a
compiler that aborts must not end this process; results are cached. All seconds are simulated. The
candidates are the overlapped step; the original step in the scheduler pass's order, which is XLA's
own if no other order is faster; and the original step as XLA compiles it. If the estimates with and
without a batch split are close, the overlapped step is also compiled the other way; so it is where
those with scans unrolled and not are close. If the fastest of these exposes communication, the
original step is also compiled with published options, and a step of unrolled layers with options
that join their collectives (`joining.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import msgspec

from jaxoverlap._util.files import kept_folder
from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags.published import COMPARED
from jaxoverlap.plan.limits import CLEAR_GAIN, EXPOSED
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import CandidateName, Overlapped, Speedup, milliseconds
from jaxoverlap.search.joining import joining
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.simulation.slower_rules import lost
from jaxoverlap.step.trial import Failure, Request, attempt, schedule_of

_TIMEOUT_S = 3600.0  # of a child; what takes as long is stuck
DECIDED_WITHIN_S = 3 * _TIMEOUT_S  # three rounds of children, those of a round at a time


@dataclass(frozen=True)
class CompiledStep:
    """The figures of a compiled step that are compared.

    Attributes:
        step_s: simulated seconds.
        peak_bytes: bytes that a device needs at most.
        loops: number of loops with an unknown trip count; the simulation runs each once.
        text: returns the scheduled module.
        compute_s: simulated seconds of its kernels alone.
    """

    step_s: float
    peak_bytes: int
    loops: int
    text: Callable[[], str]
    compute_s: float

    @classmethod
    def of(cls, text: str, peak_bytes: int, cost: CostModel) -> CompiledStep | Unsimulated:
        """Simulate a step that was compiled here."""
        try:
            simulation = simulate(text, cost)
        except ValueError as error:
            return Unsimulated(str(error))
        loops = simulation.unknown.get(UNKNOWN_TRIPS, 0)
        return cls(simulation.step_s, peak_bytes, loops, lambda: text, simulation.compute_s)


@dataclass(frozen=True)
class Unsimulated:
    """A compiled step that cannot be simulated, and why."""

    why: str


@dataclass(frozen=True)
class Comparison:
    """The candidates that an overlapped step is compared with, and how each is compiled.

    Attributes:
        step: the step's name.
        plan: the plan of the overlapped step.
        cost: the cost model to simulate by.
        reorders: whether the scheduler pass may order the plain step.
        close: the candidates with another batch split that may be as fast by the estimate.
        lowered: returns the step lowered as one of the candidates, and its `program.StepProgram`.
        request: returns the request for a child to compile a candidate with further compiler
            options. Raises a ValueError for a step that no child can compile.
    """

    step: str
    plan: Plan
    cost: CostModel
    reorders: bool
    close: tuple[CandidateName, ...]
    lowered: Callable[[CandidateName], tuple[jax.stages.Lowered, Any]]
    request: Callable[[CandidateName, Mapping[str, Any] | None], Request]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of a device."""
        return self.cost.cluster.chip.memory_bytes

    @property
    def is_close(self) -> bool:
        """Return whether the original step, reordered, may be as fast as the overlapped one."""
        price = self.plan.price
        clear = price is not None and price.step_s < price.plain_s * (1 - CLEAR_GAIN)
        return self.reorders and bool(self.plan.edits) and not clear

    def decided_here(
        self,
        compiled: Callable[[CandidateName], CompiledStep | Unsimulated | Failure],
        options: Mapping[str, Any] | None,
    ) -> Speedup:
        """Choose a candidate: this process compiles the overlapped step, children the others.

        Args:
            compiled: compiles a candidate in this process.
            options: further compiler options, for all candidates.
        """
        candidates = self._others()
        children = [self._child(candidate, options) for candidate in candidates]
        with ThreadPoolExecutor(len(children)) as pool:
            results = pool.map(lambda child: child(), children)  # they run meanwhile
            rings = compiled("overlapped")
        others = dict(zip(candidates, results, strict=True))
        in_child = functools.partial(self._in_child, options)
        return choose(self, others, rings, compiled, in_child)

    def decided_in_children(self) -> Speedup:
        """Choose a candidate; children compile all of them."""
        candidates: tuple[CandidateName, ...] = (*self._others(), "overlapped")
        children = [self._child(candidate, None) for candidate in candidates]
        with ThreadPoolExecutor(len(children)) as pool:
            results = dict(zip(candidates, pool.map(lambda child: child(), children), strict=True))
        rings = results.pop("overlapped")
        in_child = functools.partial(self._in_child, None)
        return choose(self, results, rings, in_child, in_child)

    def _others(self) -> tuple[CandidateName, ...]:
        """Return the candidates that are always compared with the overlapped step."""
        reordered: tuple[CandidateName, ...] = ("reordered",) if self.is_close else ()
        return ("plain", *reordered, *self.close)

    def _in_child(
        self,
        options: Mapping[str, Any] | None,
        candidate: CandidateName,
        joined: Mapping[str, str] | None = None,
    ) -> CompiledStep | Failure:
        """Compile a candidate in a child, and wait for it; options of the user win."""
        return self._child(candidate, {**(joined or {}), **(options or {})})()

    def _child(
        self, candidate: CandidateName, options: Mapping[str, Any] | None
    ) -> Callable[[], CompiledStep | Failure]:
        """Lower a candidate, compile it in a child, and return a call that waits for the result."""
        try:
            request = self.request(candidate, options)
        except ValueError as error:
            failure = Failure(why=str(error))
            return lambda: failure
        return functools.partial(_attempt, request)


def choose(
    comparison: Comparison,
    others: Mapping[CandidateName, CompiledStep | Failure],
    rings: CompiledStep | Unsimulated | Failure,
    compiled: Callable[[CandidateName], CompiledStep | Unsimulated | Failure],
    in_child: Callable[..., CompiledStep | Failure],
) -> Speedup:
    """Choose the fastest candidate that fits the device; of equal ones the overlapped step.

    If the seconds of two candidates cannot be compared, the overlapped step is taken. If XLA fails
    on the overlapped step, another candidate is.

    Args:
        comparison: the candidates and their cost model.
        others: the compiled candidates: "plain" and, if they may be as fast, "reordered" and
            "other rows" and "other loops".
        rings: the compiled overlapped step.
        compiled: compiles another candidate.
        in_child: the same in a child process, with further options if it is given any.
    """
    plain = others["plain"]
    if isinstance(plain, Failure):
        return _unknown(rings, f"plain was not compiled: {plain.why}")
    if isinstance(rings, Unsimulated):
        return _unknown(rings, f"not compared with plain: {rings.why}")
    if isinstance(rings, CompiledStep) and plain.loops != rings.loops:
        return _unknown(
            rings, "plain was not compared: XLA says of only one of the two how often its loops run"
        )
    key = functools.partial(_key, memory_bytes=comparison.memory_bytes)
    every: dict[CandidateName, CompiledStep | Failure] = {"overlapped": rings}
    every |= {
        candidate: others[candidate] for candidate in get_args(CandidateName) if candidate in others
    }  # of equal ones the first
    fit: dict[CandidateName, CompiledStep] = {
        candidate: made
        for candidate, made in every.items()
        if isinstance(made, CompiledStep) and made.loops == plain.loops
    }
    taken: CandidateName = min(fit, key=lambda candidate: key(fit[candidate]))
    if taken == "plain" and "reordered" not in others and comparison.reorders:
        reordered = compiled("reordered")
        if isinstance(reordered, CompiledStep) and key(reordered) <= key(plain):
            fit["reordered"], taken = reordered, "reordered"
    joined: Mapping[str, str] = {}
    compute_s = min(made.compute_s for made in fit.values())
    if comparison.reorders and fit[taken].step_s > compute_s * (1 + EXPOSED):
        taken, joined = _with_options(comparison, fit, taken, in_child)
    overlapped_s = rings.step_s if isinstance(rings, CompiledStep) else None
    speedup = Speedup(
        taken=taken,
        step_s=fit[taken].step_s,
        plain_s=plain.step_s,
        overlapped_s=overlapped_s,
        joined=joined,
    )
    if taken == "overlapped":
        return speedup
    against = _against(rings, plain, comparison.memory_bytes)
    if taken in ("other rows", "other loops"):
        cut = comparison.plan.cut
        planned = "batch split" if cut else "batch not split"
        if taken == "other loops" and cut:
            planned = "scans unrolled" if cut.unroll > 1 else "scans not unrolled"
        return msgspec.structs.replace(speedup, why=against.replace("overlapped", planned, 1))
    return msgspec.structs.replace(speedup, why=against, lost=_lost(comparison, rings, plain))


def _with_options(
    comparison: Comparison,
    fit: dict[CandidateName, CompiledStep],
    taken: CandidateName,
    in_child: Callable[..., CompiledStep | Failure],
) -> tuple[CandidateName, Mapping[str, str]]:
    """Compile the original step with published options, and the fastest with joined collectives.

    Args:
        comparison: the candidates and their cost model.
        fit: those that may be taken; what is compiled here is added, if it may be.
        taken: the fastest so far.
        in_child: compiles a candidate in a child process, with further options if there are any.

    Returns:
        The fastest, and the options that join its collectives.
    """
    key = functools.partial(_key, memory_bytes=comparison.memory_bytes)
    base: CandidateName = taken if taken in get_args(Overlapped) else "reordered"
    options = joining(fit[base].text(), comparison.cost) if base in fit else []
    names: list[CandidateName] = [*COMPARED, *(base for _ in options)]
    further = [*[{}] * len(COMPARED), *options]
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(in_child, names, further))
    joined: Mapping[str, str] = {}
    for candidate, more, made in zip(names, further, results, strict=True):
        if not isinstance(made, CompiledStep) or made.loops != fit[taken].loops:
            continue
        if candidate not in fit or key(made) < key(fit[candidate]):
            fit[candidate], joined = made, more or joined
    fastest = min(fit, key=lambda candidate: key(fit[candidate]))
    return fastest, joined if fastest == base else {}


def _unknown(rings: CompiledStep | Unsimulated | Failure, why: str) -> Speedup:
    """Return the choice of the overlapped step where there is nothing to compare it with."""
    step_s = rings.step_s if isinstance(rings, CompiledStep) else None
    return Speedup(taken="overlapped", step_s=step_s, plain_s=None, overlapped_s=step_s, why=why)


def _key(made: CompiledStep, *, memory_bytes: int) -> tuple[bool, float]:
    """Return the key to minimize: whether the step exceeds the memory, then its seconds."""
    return made.peak_bytes > memory_bytes, made.step_s


def _against(rings: CompiledStep | Failure, plain: CompiledStep, memory_bytes: int) -> str:
    """Return why the overlapped step loses: it does not compile, is slower, or does not fit."""
    if isinstance(rings, Failure):
        return f"overlapped it does not compile: {rings.why}"
    rings_time = f"overlapped {milliseconds(rings.step_s)}"
    if rings.peak_bytes > memory_bytes >= plain.peak_bytes:
        need, there = human_bytes(rings.peak_bytes), human_bytes(memory_bytes)
        return f"{rings_time} and {need} of a device's {there}"
    return rings_time


def _lost(comparison: Comparison, rings: CompiledStep | Failure, plain: CompiledStep) -> str:
    """Return which rules lost how much; empty if the rings do not compile or are not slower."""
    if isinstance(rings, Failure) or rings.step_s <= plain.step_s:
        return ""
    overlapped, as_it_is = (simulate(made.text(), comparison.cost) for made in (rings, plain))
    return lost(comparison.plan, overlapped, as_it_is)


def with_joined(plan: Plan | None, speedup: Speedup) -> Plan | None:
    """Return a plan with the options that join collectives, if the step is taken with them."""
    if plan is None or not speedup.joined:
        return plan
    return msgspec.structs.replace(plan, xla_options={**plan.xla_options, **speedup.joined})


def predicted(plan: Plan | None) -> Speedup | None:
    """Return the comparison stored in a tuned plan; None if it has no prediction of plain."""
    said = plan and plan.predictions
    if plan is None or said is None or said.plain_step_s is None:
        return None
    return Speedup(
        taken="plain" if plan.plain else "overlapped",
        step_s=said.step_s,
        plain_s=said.plain_step_s,
        overlapped_s=None if plan.plain else said.step_s,
        why="as the plan says",
    )


# -- children -------------------------------------------------------------------------------------


def _attempt(request: Request) -> CompiledStep | Failure:
    """Compile a request in a child, or read the result of a child that did so before."""
    try:
        folder = _folder(kept_folder() / "trials")
        result = attempt(request, folder, _TIMEOUT_S)
    except OSError as error:  # no memory for a child, or no disk space for its result
        return Failure(why=f"{type(error).__name__}: {error}", again=True)
    if isinstance(result, Failure):
        return result
    loops = result.unknown.get(UNKNOWN_TRIPS, 0)
    text = functools.partial(schedule_of, request, folder)
    return CompiledStep(result.step_s, result.peak_bytes, loops, text, result.compute_s)


def _folder(kept: Path) -> Path:
    """Return the folder of results; if the user's cache is not writable, one for this process."""
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    return kept if os.access(kept, os.W_OK | os.X_OK) else Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="jaxoverlap-")
