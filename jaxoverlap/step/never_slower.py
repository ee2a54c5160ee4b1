"""Compile the plain step beside the overlapped one, and take the faster by simulation.

A child process compiles it (`trial.py`), as a compiler that aborts must not end this process; the
result is kept in the cache. Both are simulated. Where the rings lose, or no longer fit the device,
the step is compiled without them: in the scheduler pass's order, which keeps XLA's where no other
is faster, or, if even that loses, as it is.
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
    """The ways to compile one overlapped step, with rings and without, to compare.

    Attributes:
        step: the step's name.
        plan: the plan with rings.
        cost: the cost model to simulate by.
        reorders: whether the scheduler pass may order the step without rings.
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

    def decided_here(
        self, compiled: Callable[[Way], CompiledStep | Unpriced], options: Mapping[str, Any] | None
    ) -> Speedup:
        """Choose, where this process compiles the step; a child, meanwhile, the plain one.

        Args:
            compiled: compiles a way here.
            options: further compiler options, for plain too.
        """
        child = self._child("plain", options)
        with ThreadPoolExecutor(1) as pool:
            plain = pool.submit(child)
            rings = compiled("overlapped")
        return choose(self, plain.result(), rings, compiled)

    def decided_in_children(self) -> Speedup:
        """Choose before this process compiles anything."""
        children = [self._child(way, None) for way in ("plain", "overlapped")]
        with ThreadPoolExecutor(len(children)) as pool:
            plain, rings = (done.result() for done in [pool.submit(c) for c in children])
        return choose(self, plain, rings, lambda way: self._child(way, None)())

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
    plain: CompiledStep | Failure,
    rings: CompiledStep | Unpriced | Failure,
    compiled: Callable[[Way], CompiledStep | Unpriced | Failure],
) -> Speedup:
    """Choose the step with rings, unless plain is faster, or plain alone fits the device.

    Where the seconds of the two do not mean the same, nothing is compared, and rings are kept. If
    XLA fails on the rings, another way is taken.

    Args:
        rival: the step.
        plain, rings: the results of compiling it without and with rings.
        compiled: compiles another way.
    """
    key = functools.partial(_key, memory_bytes=rival.memory_bytes)
    if isinstance(plain, Failure):
        return _unknown(rings, f"plain was not compiled: {plain.why}")
    if isinstance(rings, Unpriced):
        return _unknown(rings, f"not held against plain: {rings.why}")
    if isinstance(rings, CompiledStep):
        if plain.loops != rings.loops:
            return _unknown(
                rings,
                "plain was not compared: XLA says of only one of the two how often its loops run",
            )
        if key(rings) <= key(plain):
            step_s = rings.step_s
            return Speedup(
                taken="overlapped", step_s=step_s, plain_s=plain.step_s, overlapped_s=step_s
            )
    taken, best = "plain", plain
    if rival.reorders:
        other = compiled("reordered")
        if isinstance(other, CompiledStep) and key(other) <= key(plain):
            taken, best = "reordered", other
    return Speedup(
        taken=taken,
        step_s=best.step_s,
        plain_s=plain.step_s,
        overlapped_s=rings.step_s if isinstance(rings, CompiledStep) else None,
        why=_against(rings, plain, rival.memory_bytes),
        lost=_lost(rival, rings, plain),
    )


def _unknown(rings: CompiledStep | Unpriced | Failure, why: str) -> Speedup:
    """Keep the rings, as there is nothing to compare them with."""
    step_s = rings.step_s if isinstance(rings, CompiledStep) else None
    return Speedup(taken="overlapped", step_s=step_s, plain_s=None, overlapped_s=step_s, why=why)


def _key(made: CompiledStep, *, memory_bytes: int) -> tuple[bool, float]:
    """Return the key to minimize: whether the step exceeds the memory, then its seconds."""
    return made.peak_bytes > memory_bytes, made.step_s


def _against(rings: CompiledStep | Failure, plain: CompiledStep, memory_bytes: int) -> str:
    """Say why the rings lose: they do not compile, are slower, or do not fit."""
    if isinstance(rings, Failure):
        return f"with rings it does not compile: {rings.why}"
    rings_time = f"with rings {milliseconds(rings.step_s)}"
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
