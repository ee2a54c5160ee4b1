"""A scheduled module laid out in time: what computes, what communicates, and what waits.

Kernels run one after the other in schedule order. Each class of link, NVLink and the network, is a
lane that carries one collective at a time, in the order of their starts. At a collective's done the
kernels wait for what is missing of it; a synchronous one they wait for whole. While a collective
runs, a kernel beside it runs at the slower rate that the cost model gives for that share of the
chip, for as long as both run (Lagom's contention; a replay in time instead of its closed form).

Loops run iteration by iteration until one begins as it ended, with the same left in flight; all
that follow are its repeats, and are counted, not run. Approximations: of a conditional the slowest
branch runs; a while without a known trip count runs once, and is named; a collective that crosses
NVLink domains takes the network only; collectives on two lanes do not slow each other; nothing but
waiting slows the device's own launch of kernels.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxoverlap.cost import ALONE, CostModel, Group, Share
from jaxoverlap.passes import hlo
from jaxoverlap.passes.audit import Collective, collectives
from jaxoverlap.passes.groups import domains
from jaxoverlap.passes.work import FREE, Work, work

COMPUTE, NVLINK, NETWORK = "compute", "NVLink", "network"
UNKNOWN_TRIPS = "while without a known trip count"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time on a lane, where it happens first.

    Attributes:
        lane: COMPUTE, NVLINK or NETWORK.
        kind: "matmul", "memory" (a kernel bound by memory), "collective", or "wait": the compute
            lane waits for `collective`.
        name: the instruction; computation: where it stands.
        start_s, end_s: from the step's start.
        alone_s: seconds that it would take with nothing beside it.
        runs: how often a step does this.
        source: the "folder/file.py:line" it came from; empty if the module does not say.
        op: the last names of the JAX operation that it came from.
        work: of a kernel.
        collective: on a link, or waited for.
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
    work: Work = FREE
    collective: Collective | None = None

    @property
    def seconds(self) -> float:
        """Of all its runs."""
        return (self.end_s - self.start_s) * self.runs


@dataclass(frozen=True)
class Repeat:
    """One iteration of a loop, of which all that follow are copies.

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
    """What one collective of the module costs in a step, all runs together.

    Attributes:
        collective: which.
        lane: its link.
        runs: how often it runs.
        seconds: on the link.
        exposed_s: of these, while the kernels wait.
    """

    collective: Collective
    lane: str
    runs: int
    seconds: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds beside kernels, or beside nothing that anyone waits for."""
        return self.seconds - self.exposed_s


@dataclass(frozen=True)
class Timeline:
    """A step in time, as one device sees it; all devices are alike.

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
        """Seconds of all kernels, each alone on the chip."""
        return math.fsum(e.alone_s * e.runs for e in self._kernels)

    @functools.cached_property
    def slowdown_s(self) -> float:
        """Seconds that kernels take longer because collectives run beside them."""
        return math.fsum(e.seconds - e.alone_s * e.runs for e in self._kernels)

    @functools.cached_property
    def exposed_s(self) -> float:
        """Seconds that no kernel runs because one waits for a collective."""
        return math.fsum(e.seconds for e in self.events if e.kind == "wait")

    @functools.cached_property
    def link_s(self) -> dict[str, float]:
        """Seconds that each link is busy."""
        busy = {NVLINK: 0.0, NETWORK: 0.0}
        for e in self.events:
            if e.kind == "collective":
                busy[e.lane] += e.seconds
        return busy

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, hidden or not."""
        return math.fsum(self.link_s.values())

    @property
    def bound_s(self) -> float:
        """What no order of the schedule can beat: the busiest of kernels and links."""
        return max(self.compute_s, *self.link_s.values())

    @functools.cached_property
    def unknown(self) -> dict[str, int]:
        """What the simulation does not know, and how often a step runs it."""
        found: Counter[str] = Counter()
        for e in self.events:
            if e.work.unknown:
                found[e.work.unknown] += e.runs
        return dict(found)

    @functools.cached_property
    def spent(self) -> tuple[Spent, ...]:
        """Every collective's seconds, longest exposed first."""
        found: dict[tuple[str, str], list[Event]] = {}
        for e in self.events:
            if e.collective:
                found.setdefault((e.collective.computation, e.collective.name), []).append(e)
        return tuple(sorted(map(_spent, found.values()), key=lambda s: -s.exposed_s))

    @property
    def _kernels(self) -> Iterator[Event]:
        return (e for e in self.events if e.kind in ("matmul", "memory"))


def _spent(events: list[Event]) -> Spent:
    """Of one collective: its events on the link, and the waits for it."""
    runs = [e for e in events if e.kind == "collective"]
    return Spent(
        collective=runs[0].collective or _never(),
        lane=runs[0].lane,
        runs=sum(e.runs for e in runs),
        seconds=math.fsum(e.seconds for e in runs),
        exposed_s=math.fsum(e.seconds for e in events if e.kind == "wait"),
    )


def _never() -> Collective:
    raise AssertionError("an event on a link without its collective")


def timeline(module: hlo.Module, cost: CostModel) -> Timeline:
    """Lay a scheduled module out in time on a cluster.

    Raises:
        ValueError: if the module is for another number of devices than the cluster has, lacks a
            computation that it calls, or never waits for a collective.
    """
    _check(module, cost)
    replay = _Replay(module, Prices(module, cost))
    replay.computation(module.entry)
    events = tuple(
        Event(*head, runs, *tail)
        for (head, tail), runs in zip(replay.events, replay.runs, strict=True)
    )
    return Timeline(module.name, replay.now, events, tuple(replay.repeats))


def alone_s(module: hlo.Module, computation: str, cost: CostModel) -> dict[str, float]:
    """Seconds of each instruction of a computation, nothing beside it, for who orders them.

    A collective's stand at its start; of a loop, call or conditional they are those of all that it
    runs, in the order that it has; what no kernel runs for has zero.

    Raises:
        ValueError: as `timeline`.
    """
    _check(module, cost)
    prices = Prices(module, cost)
    seconds = {}
    for i in module.body(computation):
        replay = _Replay(module, prices)
        replay.instruction(computation, i, {})
        replay.finish()
        seconds[i.name] = replay.now
    return seconds


def _check(module: hlo.Module, cost: CostModel) -> None:
    if module.num_devices != cost.cluster.num_devices:
        raise ValueError(
            f"{module.name} is compiled for {module.num_devices} devices, but cluster "
            f"{cost.cluster} has {cost.cluster.num_devices}: name the cluster that it is for"
        )


class Prices:
    """Seconds of a module's kernels and collectives, each worked out once."""

    def __init__(self, module: hlo.Module, cost: CostModel):
        self._module, self._cost = module, cost
        self.collectives = {(c.computation, c.name): c for c in collectives(module)}
        self.kernel_s = functools.cache(self._kernel_s)
        self.link = functools.cache(self._link)
        self.works = functools.cache(self._works)

    def _works(self, computation: str) -> dict[str, tuple[Work, str, str]]:
        """The kernels of a computation by instruction: work, source, the JAX operation's name."""
        body = self._module.body(computation)
        shapes = {i.name: i.shape for i in body}
        found = {}
        for i in body:
            if i.opcode not in _STEPS and (computation, i.name) not in self.collectives:
                asked = work(self._module, i, shapes)
                if asked != FREE:
                    found[i.name] = asked, self._module.source(i), short_op(i.op_name)
        return found

    def _kernel_s(self, asked: Work, beside: Share) -> float:
        """A kernel is bound by its matmuls or by its bytes, whichever takes longer."""
        cost = self._cost
        matmuls = sum(
            cost.matmul_s(m.m, m.n, m.k, batch=m.batch, dtype=m.dtype, beside=beside)
            for m in asked.matmuls
        )
        memory = cost.memory_s(asked.memory_bytes, beside=beside) if asked.memory_bytes else 0.0
        return max(matmuls, memory)

    def _link(self, c: Collective) -> tuple[str, float, Share]:
        """The lane of a collective, its seconds, and what it takes from kernels beside it."""
        per_domain = self._cost.cluster.gpus_per_nvlink_domain
        spread = domains(c.groups, self._module.num_devices, per_domain)
        size = 2 if c.kind == "collective-permute" else c.group_size
        group = Group(size, spread)
        seconds = self._cost.collective_s(c.kind, c.bytes_moved, group)
        lane = NETWORK if spread > 1 else NVLINK
        return lane, seconds, self._cost.share(c.kind, c.bytes_moved, group)


def short_op(op_name: str) -> str:
    """The last two names of an operation's path."""
    return "/".join(op_name.split("/")[-2:])


@dataclass(frozen=True)
class _Flight:
    """A collective on its link."""

    begin: float
    end: float
    share: Share
    collective: Collective


@dataclass
class _Lane:
    """One class of link: what is on it or waits for it, in order."""

    flights: deque[_Flight] = field(default_factory=deque)

    def land(self, now: float) -> None:
        """Forget what has ended."""
        while self.flights and self.flights[0].end <= now:
            self.flights.popleft()


_Head = tuple[str, str, str, str, float, float, float]
_Tail = tuple[str, str, Work, Collective | None]
_Due = dict[str, tuple[_Lane, float]]  # by who to wait for: on which link, until when


class _Replay:
    """A device on its way through a module."""

    def __init__(self, module: hlo.Module, prices: Prices):
        self.module, self.prices = module, prices
        self.now = 0.0
        self.lanes = {NVLINK: _Lane(), NETWORK: _Lane()}
        self.events: list[tuple[_Head, _Tail]] = []
        self.runs: list[int] = []
        self.repeats: list[Repeat] = []

    def computation(self, name: str) -> None:
        due: _Due = {}
        for i in self.module.body(name):
            self.instruction(name, i, due)

    def instruction(self, computation: str, i: hlo.Instruction, due: _Due) -> None:
        found = self.prices.collectives.get((computation, i.name))
        if i.opcode in _STEPS:
            _STEPS[i.opcode](self, computation, i)
        elif found:
            due[i.name] = self.start(found)
            if not found.asynchronous:
                self.wait(*due[i.name])
        elif i.operands and i.operands[0] in due:
            until = due.pop(i.operands[0])
            if i.opcode.endswith("-update"):
                due[i.name] = until
            else:
                self.wait(*until)
        elif kernel := self.prices.works(computation).get(i.name):
            self.kernel(computation, i.name, *kernel)

    # -- kernels ----------------------------------------------------------------------------------

    def kernel(self, computation: str, name: str, asked: Work, source: str, op: str) -> None:
        """Run a kernel: piece by piece, as collectives beside it come and go."""
        began, left = self.now, 1.0
        while left > 0:
            beside, change = self.beside()
            seconds = self.prices.kernel_s(asked, beside)
            if self.now + left * seconds <= change:
                self.now, left = self.now + left * seconds, 0.0
            else:
                left -= (change - self.now) / seconds
                self.now = change
        alone = self.prices.kernel_s(asked, ALONE)
        kind = "matmul" if asked.matmuls else "memory"
        head = (COMPUTE, kind, name, computation, began, self.now, alone)
        self.add(head, (source, op, asked, None))

    def beside(self) -> tuple[Share, float]:
        """What collectives take from a kernel now, and until when that stays."""
        share, change = ALONE, math.inf
        for lane in self.lanes.values():
            lane.land(self.now)
            if lane.flights:
                first = lane.flights[0]
                running = first.begin <= self.now
                share = share + first.share if running else share
                change = min(change, first.end if running else first.begin)
        return share, change

    # -- collectives ------------------------------------------------------------------------------

    def start(self, c: Collective) -> tuple[_Lane, float]:
        """Put a collective on its link; when it ends there."""
        name, seconds, share = self.prices.link(c)
        lane = self.lanes[name]
        lane.land(self.now)
        begin = lane.flights[-1].end if lane.flights else self.now
        lane.flights.append(_Flight(begin, begin + seconds, share, c))
        head = (name, "collective", c.name, c.computation, begin, begin + seconds, seconds)
        self.add(head, (c.source, c.ring or "", FREE, c))
        return lane, begin + seconds

    def wait(self, lane: _Lane, until: float) -> None:
        """Wait on a link; each collective that runs there meanwhile is exposed while it does."""
        lane.land(self.now)
        for f in tuple(lane.flights):
            if f.begin >= until:
                break
            c, end = f.collective, min(f.end, until)
            head = (COMPUTE, "wait", c.name, c.computation, self.now, end, end - self.now)
            self.add(head, (c.source, c.ring or "", FREE, c))
            self.now = end

    def finish(self) -> None:
        """Wait for all that is in flight."""
        for lane in self.lanes.values():
            if lane.flights:
                self.wait(lane, lane.flights[-1].end)

    def add(self, head: _Head, tail: _Tail) -> None:
        self.events.append((head, tail))
        self.runs.append(1)

    # -- other computations -----------------------------------------------------------------------

    def loop(self, computation: str, i: hlo.Instruction) -> None:
        """Run a while until an iteration begins as it ended; the rest are repeats of that one."""
        body, left = i.attribute("body").lstrip("%"), i.trip_count
        if left is None:
            left = 1
            head = (COMPUTE, "memory", i.name, computation, self.now, self.now, 0.0)
            unknown = Work(unknown=UNKNOWN_TRIPS)
            self.add(head, (self.module.source(i), short_op(i.op_name), unknown, None))
        while left:
            before, began, first = self.state(), self.now, len(self.events)
            self.computation(body)
            left -= 1
            if left and self.state() == before:
                self.repeat(
                    Repeat(body, began, self.now - began, left + 1, (first, len(self.events)))
                )
                left = 0

    def repeat(self, repeat: Repeat) -> None:
        """Jump over the copies of an iteration."""
        first, last = repeat.events
        for place in range(first, last):
            self.runs[place] *= repeat.times
        self.repeats.append(repeat)
        later = repeat.period_s * (repeat.times - 1)
        self.now += later
        for lane in self.lanes.values():
            lane.flights = deque(
                replace(f, begin=f.begin + later, end=f.end + later) for f in lane.flights
            )

    def state(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """What is in flight, and for how long from now."""
        for lane in self.lanes.values():
            lane.land(self.now)
        return tuple(
            tuple((f.begin - self.now, f.end - self.now) for f in lane.flights)
            for lane in self.lanes.values()
        )

    def call(self, computation: str, i: hlo.Instruction) -> None:
        for called in i.called:
            self.computation(called)

    def conditional(self, computation: str, i: hlo.Instruction) -> None:
        """Run the slowest branch."""
        now, counts = self.now, (len(self.events), len(self.repeats))
        flights = {name: tuple(lane.flights) for name, lane in self.lanes.items()}

        def seconds(branch: str) -> float:
            self.computation(branch)
            taken, self.now = self.now - now, now
            del self.events[counts[0] :], self.runs[counts[0] :], self.repeats[counts[1] :]
            for name, lane in self.lanes.items():
                lane.flights = deque(flights[name])
            return taken

        self.computation(max(i.called, key=seconds))


_STEPS = {"while": _Replay.loop, "call": _Replay.call, "conditional": _Replay.conditional}
