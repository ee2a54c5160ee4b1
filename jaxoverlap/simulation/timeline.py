"""A simulated step's timeline: events on lanes, and the sums over them."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxoverlap.cost.groups import NETWORK, NVLINK
from jaxoverlap.cost.kernels import FREE, KernelWork
from jaxoverlap.simulation.audit import Collective

COMPUTE = "compute"  # beside the links of `cost/groups.py`
COLLECTIVES = "collectives"  # the lane of those whose link is not known, as in a profile


def base_lane(lane: str) -> str:
    """Return a lane's name without its number: "compute" for "compute 2"."""
    return lane.rstrip("0123456789").rstrip()


@dataclass(frozen=True, slots=True)
class Event:
    """An interval on a lane: a kernel, a collective or a wait, at its first run.

    Attributes:
        lane: COMPUTE, NVLINK, NETWORK, COLLECTIVES, or a direction of the link to the host
            (`host_copies`); "compute 2" has what a profile saw concurrently with "compute".
        kind: "matmul", "memory" (a kernel bound by memory), "collective", or "wait": the compute
            lane waits for `collective`.
        name: the instruction; computation: the one that it is in.
        start_s, end_s: from the step's start.
        alone_s: seconds that it would take alone.
        runs: how often a step does this.
        source: the "folder/file.py:line" it came from; empty if the module does not say.
        op: the last names of the JAX operation that it came from.
        work: a kernel's work.
        collective: the collective on a link, or waited for.
    """

    lane: str
    kind: str
    name: str
    computation: str
    start_s: float
    end_s: float
    alone_s: float
    runs: int
    source: str = ""
    op: str = ""
    work: KernelWork = FREE
    collective: Collective | None = None

    @property
    def seconds(self) -> float:
        """Return the event's seconds over all its runs."""
        return (self.end_s - self.start_s) * self.runs


@dataclass(frozen=True)
class Repeat:
    """One iteration of a loop, which all later iterations repeat.

    Attributes:
        computation: the loop's body.
        start_s: when this iteration begins; period_s: how long one takes.
        times: how often it runs, this one included.
        events: [first, last) of the timeline's events that stand in it.
    """

    computation: str
    start_s: float
    period_s: float
    times: int
    events: tuple[int, int]


@dataclass(frozen=True)
class Spent:
    """The time of one collective of the module in a step, over all its runs.

    Attributes:
        collective: the collective.
        lane: its link.
        runs: how often it runs.
        seconds: time on the link.
        exposed_s: the part of it in which the kernels wait.
    """

    collective: Collective
    lane: str
    runs: int
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class Timeline:
    """A step's timeline on one device; all devices have the same.

    step_s = compute_s + slowdown_s + exposed_s.

    Attributes:
        module: its name.
        step_s: from start to end.
        events: in schedule order, loops as in `repeats`.
        repeats: iterations that stand for many; those of inner loops come before the outer's.
    """

    module: str
    step_s: float
    events: tuple[Event, ...]
    repeats: tuple[Repeat, ...]

    @functools.cached_property
    def compute_s(self) -> float:
        """Return the seconds of all kernels, as if nothing else ran."""
        return math.fsum(e.alone_s * e.runs for e in self._kernels)

    @functools.cached_property
    def slowdown_s(self) -> float:
        """Return the extra seconds of kernels that run while collectives do."""
        return math.fsum(e.seconds - e.alone_s * e.runs for e in self._kernels)

    @functools.cached_property
    def exposed_s(self) -> float:
        """Return the seconds in which no kernel runs, as one waits for a collective."""
        return math.fsum(e.seconds for e in self.events if e.kind == "wait")

    @functools.cached_property
    def link_s(self) -> dict[str, float]:
        """Return the seconds in which each link is busy."""
        busy = {NVLINK: 0.0, NETWORK: 0.0}
        for e in self.events:
            if e.kind == "collective":
                busy[e.lane] = busy.get(e.lane, 0.0) + e.seconds
        return busy

    @property
    def parts(self) -> dict[str, float]:
        """Return the step's seconds by part. A slowdown of 0 may round to below 0."""
        slowdown_s = abs(self.slowdown_s)
        return {
            "compute": self.compute_s,
            "slowed by collectives": slowdown_s,
            "exposed": self.exposed_s,
        }

    @property
    def communication_s(self) -> float:
        """Return the seconds of all collectives, hidden or not."""
        return math.fsum(self.link_s.values())

    @property
    def bound_s(self) -> float:
        """Return the least seconds of any order: those of the busiest of kernels and links."""
        return max((self.compute_s, *self.link_s.values()))

    @functools.cached_property
    def unknown(self) -> dict[str, int]:
        """Return the operations that the simulation does not know, with their runs per step."""
        runs: Counter[str] = Counter()
        for e in self.events:
            if e.work.unknown:
                runs[e.work.unknown] += e.runs
        return dict(runs)

    @functools.cached_property
    def spent(self) -> tuple[Spent, ...]:
        """Return every collective's seconds, longest exposed first."""
        events_of: dict[tuple[str, str], list[Event]] = {}
        for e in self.events:
            if e.collective:
                events_of.setdefault((e.collective.computation, e.collective.name), []).append(e)
        return tuple(sorted(map(_spent, events_of.values()), key=lambda s: -s.exposed_s))

    @property
    def _kernels(self) -> Iterator[Event]:
        return (e for e in self.events if e.kind in ("matmul", "memory"))


def _spent(events: list[Event]) -> Spent:
    """Add up one collective's events on its link and the waits for it."""
    runs = [e for e in events if e.kind == "collective"]
    return Spent(
        collective=runs[0].collective or _never(),
        lane=base_lane(runs[0].lane),
        runs=sum(e.runs for e in runs),
        seconds=math.fsum(e.seconds for e in runs),
        exposed_s=math.fsum(e.seconds for e in events if e.kind == "wait"),
    )


def _never() -> Collective:
    raise AssertionError("an event on a link without its collective")
