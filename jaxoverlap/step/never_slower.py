"""Compile the plain step beside the overlapped one, and take the faster by simulation.

Child processes compile what is compared with the overlapped step (`trial.py`), as a compiler that
aborts must not end this process; results are cached. Everything is simulated. There are three
candidates: the overlapped step; the plain step in the order of the scheduler pass, which keeps
XLA's order where no other is faster; and the plain step as XLA compiles it.
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
from typing import Any

import jax

from jaxoverlap._util.files import kept_folder
from jaxoverlap._util.text import human_bytes
from jaxoverlap.cost.model import CostModel
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.speedup import Speedup, Way, milliseconds
from jaxoverlap.simulation.replay import UNKNOWN_TRIPS
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.simulation.slower_rules import lost
from jaxoverlap.step.trial import Failure, Request, attempt, schedule_of

# Where the estimate says that the overlapped step gains more than this over the plain step in a
# good order, that order is not compiled. A choice, no measurement: a contrastive step lost 14% to
# that order where the estimate said a gain of 1.5%.
_CLEAR_GAIN = 0.15
_TIMEOUT_S = 3600.0  # of a child; what takes as long is stuck
DECIDED_WITHIN_S = 3 * _TIMEOUT_S  # the way of three: two at a time, and then the third


@dataclass(frozen=True)
class CompiledStep:
    """The facts of a compiled step that are compared.

    Attributes:
        step_s: simulated seconds.
        peak_bytes: bytes that a device needs at most.
        loops: number of loops with an unknown trip count; the simulation runs each once.
        text: returns the scheduled module.
    """

    step_s: float
    peak_bytes: int
    loops: int
    text: Callable[[], str]

    @classmethod
    def of(cls, text: str, peak_bytes: int, cost: CostModel) -> CompiledStep | Unpriced:
        """Simulate a step that was compiled here."""
        try:
            simulation = simulate(text, cost)
        except ValueError as error:
            return Unpriced(str(error))
        loops = simulation.unknown.get(UNKNOWN_TRIPS, 0)
        return cls(simulation.step_s, peak_bytes, loops, lambda: text)


@dataclass(frozen=True)
class Unpriced:
    """A compiled step that the simulation does not understand, and why."""

    why: str


@dataclass(frozen=True)
class Rival:
    """The candidates to compare an overlapped step with, and how they are compiled.

    Attributes:
        step: the step's name.
        plan: the plan of the overlapped step.
        cost: the cost model to simulate by.
        reorders: whether the scheduler pass may order the plain step.
        lowered: returns the step lowered in one of the ways, and its `program.StepProgram`.
        request: returns the request for a child to compile one of the ways with further compiler
            options. Raises a ValueError for a step that no child can compile.
    """

    step: str
    plan: Plan
    cost: CostModel
    reorders: bool
    lowered: Callable[[Way], tuple[jax.stages.Lowered, Any]]
    request: Callable[[Way, Mapping[str, Any] | None], Request]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of a device."""
        return self.cost.cluster.chip.memory_bytes

    @property
    def is_close(self) -> bool:
        """Return whether the plain step in another order might be as fast as the overlapped one."""
        price = self.plan.price
        clear = price is not None and price.step_s < price.plain_s * (1 - _CLEAR_GAIN)
        return self.reorders and any(self.plan.changes) and not clear

    def decided_here(
        self,
        compiled: Callable[[Way], CompiledStep | Unpriced | Failure],
        options: Mapping[str, Any] | None,
    ) -> Speedup:
        """Choose, where this process compiles the step; children, meanwhile, the plain ones.

        Args:
            compiled: compiles a way here.
            options: further compiler options, for plain too.
        """
        ways = self._others()
        children = [self._child(way, options) for way in ways]
        with ThreadPoolExecutor(len(children)) as pool:
            results = pool.map(lambda child: child(), children)  # they run meanwhile
            rings = compiled("overlapped")
        return choose(self, dict(zip(ways, results, strict=True)), rings, compiled)

    def decided_in_children(self) -> Speedup:
        """Choose before this process compiles anything."""
        ways: tuple[Way, ...] = (*self._others(), "overlapped")
        children = [self._child(way, None) for way in ways]
        with ThreadPoolExecutor(len(children)) as pool:
            results = dict(zip(ways, pool.map(lambda child: child(), children), strict=True))
        rings = results.pop("overlapped")
        return choose(self, results, rings, lambda way: self._child(way, None)())

    def _others(self) -> tuple[Way, ...]:
        """Return the candidates that are compiled beside the overlapped step in any case."""
        return ("plain", "reordered") if self.is_close else ("plain",)

    def _child(
        self, way: Way, options: Mapping[str, Any] | None
    ) -> Callable[[], CompiledStep | Failure]:
        """Lower a way here, start a child that compiles it, and return a call that waits for it."""
        try:
            request = self.request(way, options)
        except ValueError as error:
            failure = Failure(why=str(error))
            return lambda: failure
        return functools.partial(_attempt, request)


def choose(
    rival: Rival,
    others: Mapping[Way, CompiledStep | Failure],
    rings: CompiledStep | Unpriced | Failure,
    compiled: Callable[[Way], CompiledStep | Unpriced | Failure],
) -> Speedup:
    """Choose the fastest candidate that fits the device; of equal ones the overlapped step.

    Where the seconds of two candidates do not mean the same, nothing is compared, and the
    overlapped step is kept. If XLA fails on that, another one is taken.

    Args:
        rival: the step.
        others: the results of compiling it "plain" and, where that may be as fast, "reordered".
        rings: the result of compiling it overlapped.
        compiled: compiles another way.
    """
    plain = others["plain"]
    if isinstance(plain, Failure):
        return _unknown(rings, f"plain was not compiled: {plain.why}")
    if isinstance(rings, Unpriced):
        return _unknown(rings, f"not held against plain: {rings.why}")
    if isinstance(rings, CompiledStep) and plain.loops != rings.loops:
        return _unknown(
            rings, "plain was not compared: XLA says of only one of the two how often its loops run"
        )
    key = functools.partial(_key, memory_bytes=rival.memory_bytes)
    loses = isinstance(rings, Failure) or key(rings) > key(plain)
    reordered = others.get("reordered")
    if reordered is None and loses and rival.reorders:
        reordered = compiled("reordered")
    by_way: dict[Way, Any] = {"overlapped": rings, "reordered": reordered, "plain": plain}
    fit: dict[Way, CompiledStep] = {
        way: made for way, made in by_way.items() if isinstance(made, CompiledStep)
    }
    taken: Way = min(fit, key=lambda way: key(fit[way]))
    overlapped_s = rings.step_s if isinstance(rings, CompiledStep) else None
    kept = taken == "overlapped"
    return Speedup(
        taken=taken,
        step_s=fit[taken].step_s,
        plain_s=plain.step_s,
        overlapped_s=overlapped_s,
        why="" if kept else _against(rings, plain, rival.memory_bytes),
        lost="" if kept else _lost(rival, rings, plain),
    )


def _unknown(rings: CompiledStep | Unpriced | Failure, why: str) -> Speedup:
    """Keep the rings, as there is nothing to compare them with."""
    step_s = rings.step_s if isinstance(rings, CompiledStep) else None
    return Speedup(taken="overlapped", step_s=step_s, plain_s=None, overlapped_s=step_s, why=why)


def _key(made: CompiledStep, *, memory_bytes: int) -> tuple[bool, float]:
    """Return the key to minimize: whether the step exceeds the memory, then its seconds."""
    return made.peak_bytes > memory_bytes, made.step_s


def _against(rings: CompiledStep | Failure, plain: CompiledStep, memory_bytes: int) -> str:
    """Say why the overlapped step loses: it does not compile, is slower, or does not fit."""
    if isinstance(rings, Failure):
        return f"overlapped it does not compile: {rings.why}"
    rings_time = f"overlapped {milliseconds(rings.step_s)}"
    if rings.peak_bytes > memory_bytes >= plain.peak_bytes:
        need, there = human_bytes(rings.peak_bytes), human_bytes(memory_bytes)
        return f"{rings_time} and {need} of a device's {there}"
    return rings_time


def _lost(rival: Rival, rings: CompiledStep | Failure, plain: CompiledStep) -> str:
    """Say which rules lost how much; empty if the rings do not compile, or are not slower."""
    if isinstance(rings, Failure) or rings.step_s <= plain.step_s:
        return ""
    overlapped, as_it_is = (simulate(made.text(), rival.cost) for made in (rings, plain))
    return lost(rival.plan, overlapped, as_it_is)


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
    except OSError as error:  # no room for a child, or for what it found
        return Failure(why=f"{type(error).__name__}: {error}", again=True)
    if isinstance(result, Failure):
        return result
    loops = result.unknown.get(UNKNOWN_TRIPS, 0)
    text = functools.partial(schedule_of, request, folder)
    return CompiledStep(result.step_s, result.peak_bytes, loops, text)


def _folder(kept: Path) -> Path:
    """Return the folder of results; if the user's cache is not writable, one for this process."""
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    return kept if os.access(kept, os.W_OK | os.X_OK) else Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="jaxoverlap-")
