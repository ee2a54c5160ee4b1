"""Replay a scheduled module in time: its kernels, its collectives and its waits.

Kernels run one after the other in schedule order. A collective waits for those before it on its
stream (`streams.py`), and on its link: each class of link, NVLink and the network, is a lane that
carries one collective at a time, in the order of their starts; so is each direction of the link to
the host, for copies from and to its memory. At a collective's done the kernels wait for what is
missing of it; for a synchronous one they wait from start to end. While a collective runs, a kernel
runs at the slower rate that the cost model gives for that share of the chip, for as long as both
run (Lagom's contention; a replay in time instead of its closed form).

Loops run iteration by iteration until one begins as it ended, with the same left in flight; all
that follow are its repeats, and are counted, not run. Approximations: of a conditional the slowest
branch runs, as often as its name says (`branch_shares.py`), or always; a while without a known trip
count runs once, and is named; a collective that crosses NVLink domains takes the network only;
collectives on two lanes do not slow each other, nor do the GPUs of a host that copy to and from its
memory, each over a link of its own; such copies wait for nothing on their streams; nothing but
waiting slows the device's own launch of kernels; where devices share cores, what an iteration
computed before its first collective is taken from the first iteration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxoverlap.cost.groups import ALONE, Group, Share
from jaxoverlap.cost.kernels import FREE, KernelWork
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.plan.collectives import PERMUTE
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective, collectives
from jaxoverlap.simulation.device_groups import domains
from jaxoverlap.simulation.hlo_work import work
from jaxoverlap.simulation.host_copies import KINDS, host_copies
from jaxoverlap.simulation.timeline import COMPUTE, NETWORK, NVLINK, Event, Repeat, Timeline

UNKNOWN_TRIPS = "while without a known trip count"


def replay(module: hlo.Module, cost: CostModel) -> Timeline:
    """Replay a scheduled module in time on a cluster; return its timeline.

    Raises:
        ValueError: if the module is for another number of devices than the cluster has, lacks a
            computation that it calls, or never waits for a collective.
    """
    _check(module, cost)
    device = _Replay(module, ModuleCosts(module, cost))
    device.computation(module.entry)
    events = tuple(
        Event(*head, runs, *tail)
        for (head, tail), runs in zip(device.events, device.runs, strict=True)
    )
    return Timeline(module.name, device.now, events, tuple(device.repeats))


def _check(module: hlo.Module, cost: CostModel) -> None:
    if module.num_devices != cost.cluster.num_devices:
        raise ValueError(
            f"{module.name} is compiled for {module.num_devices} devices, but cluster "
            f"{cost.cluster} has {cost.cluster.num_devices}: name the cluster that it is for"
        )


class ModuleCosts:
    """The seconds of a module's kernels and collectives, each computed once."""

    def __init__(self, module: hlo.Module, cost: CostModel):
        self._module, self._cost = module, cost
        moved = (*collectives(module), *host_copies(module))
        self.collectives = {(c.computation, c.name): c for c in moved}
        self.kernel_s = functools.cache(cost.kernel_s)
        self.link = functools.cache(self._link)
        self.group = functools.cache(self._group)
        self.works = functools.cache(self._works)
        self._asynchronous_in = functools.cache(self._inside)
        self.without_kernels = functools.cache(self._without_kernels)

    def _works(self, computation: str) -> dict[str, tuple[KernelWork, str, str]]:
        """Return a computation's kernels by instruction: work, source line, JAX operation."""
        body = self._module.body(computation)
        shapes = {i.name: i.shape for i in body}
        kernels = {}
        for i in body:
            if i.opcode not in _STEPS and (computation, i.name) not in self.collectives:
                asked = self._cost.known(work(self._module, i, shapes))
                if asked != FREE:
                    kernels[i.name] = asked, self._module.source(i), short_op(i.op_name)
        return kernels

    def stream(self, c: Collective) -> int | None:
        """Return an asynchronous collective's stream; None on CPUs and for synchronous ones."""
        return None if self._cost.on_cpus else c.stream

    def asynchronous(self, computation: str, i: hlo.Instruction) -> tuple[Collective, ...]:
        """Return the asynchronous collectives that an instruction starts, or that it runs."""
        own = self.collectives.get((computation, i.name))
        if own is not None:
            return (own,) if own.asynchronous else ()
        if i.opcode not in _STEPS:
            return ()
        return tuple(c for called in i.called for c in self._asynchronous_in(called))

    def _inside(self, computation: str) -> tuple[Collective, ...]:
        body = self._module.body(computation)
        return tuple(c for i in body for c in self.asynchronous(computation, i))

    def _without_kernels(self, computation: str) -> frozenset[str]:
        """Return the collectives that have no kernel between their start and their done.

        XLA makes them synchronous after the schedule (`passes/estimation/synchronous.py`), and what
        it left asynchronous of them it launches so (RemoveRedundantAsyncThunkPass).
        """
        found, since = set[str](), set[str]()
        works = self.works(computation)
        for i in self._module.body(computation):
            if (computation, i.name) in self.collectives:
                since.add(i.name)
            elif i.operands and i.operands[0] in since and i.opcode.endswith("-done"):
                found.add(i.operands[0])
            elif i.name in works or i.opcode in _STEPS:
                since.clear()
        return frozenset(found)

    def skew_s(self, c: Collective, computed_s: float) -> float:
        """Return the seconds that a collective waits for the slowest device."""
        if c.kind in KINDS:
            return 0.0
        return self._cost.skew_s(computed_s, c.kind, self.group(c))

    def _group(self, c: Collective) -> Group:
        return group_of(c, self._module.num_devices, self._cost.cluster)

    def _link(self, c: Collective) -> tuple[str, float, Share]:
        """Return a collective's lane, its seconds, and the chip share it takes from kernels."""
        if c.kind in KINDS:
            return c.kind, *self._cost.host_copy(c.bytes_moved)
        group = self.group(c)
        seconds = self._cost.collective_s(c.kind, c.bytes_moved, group)
        lane = NETWORK if group.domains > 1 else NVLINK
        return lane, seconds, self._cost.share(c.kind, c.bytes_moved, group)


def group_of(c: Collective, num_devices: int, cluster: Cluster) -> Group:
    """Return a collective's group, in a module for a number of devices that count from 0."""
    spread = domains(c.groups, num_devices, cluster.gpus_per_nvlink_domain)
    size = 2 if c.kind == PERMUTE else c.group_size
    in_a_process = domains(c.groups, num_devices, cluster.gpus_per_process) == 1
    # Hops and copies come with the option for one communicator a ring (flags/required.py).
    together = c.group_size if c.by_copy or (c.kind == PERMUTE and c.ring) else None
    return Group(size, spread, c.by_copy and in_a_process, together)


def short_op(op_name: str) -> str:
    """Return the last two names of an operation's path."""
    return "/".join(op_name.split("/")[-2:])


@dataclass(frozen=True)
class _Flight:
    """A collective that occupies its link, or is queued for it.

    Attributes:
        lane: the link.
        stream: the communication stream; None for that of the kernels.
        begin, end: when it is on the link.
        share: the share of the chip that it takes from concurrent kernels.
        collective: the collective.
        behind: the flight, by number, whose end it waits for before it begins; None if for none.
    """

    lane: str
    stream: int | None
    begin: float
    end: float
    share: Share
    collective: Collective
    behind: int | None


_Head = tuple[str, str, str, str, float, float, float]
_Tail = tuple[str, str, KernelWork, Collective | None]


class _Replay:
    """The state of one device while it runs a module."""

    def __init__(self, module: hlo.Module, prices: ModuleCosts):
        self.module, self.prices = module, prices
        self.now = self.met = 0.0  # met: when the devices last waited for each other
        self.flights: dict[int, _Flight] = {}  # by number, in the order of starts
        self.started = 0
        self.events: list[tuple[_Head, _Tail]] = []
        self.runs: list[int] = []
        self.repeats: list[Repeat] = []
        self.at_boundary = False  # whether conditionals take the branch that they rarely take

    def computation(self, name: str) -> None:
        due: dict[str, int] = {}  # flights by the name to wait for
        for i in self.module.body(name):
            self.instruction(name, i, due)

    def instruction(self, computation: str, i: hlo.Instruction, due: dict[str, int]) -> None:
        collective = self.prices.collectives.get((computation, i.name))
        if i.opcode in _STEPS:
            _STEPS[i.opcode](self, computation, i)
        elif collective:
            flight = self.start(collective)
            if collective.asynchronous:
                due[i.name] = flight
            else:
                self.wait(flight)
        elif i.operands and i.operands[0] in due:
            flight = due.pop(i.operands[0])
            if i.opcode.endswith("-update"):
                due[i.name] = flight
            else:
                self.wait(flight)
        elif kernel := self.prices.works(computation).get(i.name):
            self.kernel(computation, i.name, *kernel)

    # -- kernels ----------------------------------------------------------------------------------

    def kernel(self, computation: str, name: str, asked: KernelWork, source: str, op: str) -> None:
        """Run a kernel, in pieces between the starts and ends of concurrent collectives."""
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
        kind = "matmul" if asked.matmuls or asked.attention else "memory"
        head = (COMPUTE, kind, name, computation, began, self.now, alone)
        self.add(head, (source, op, asked, None))

    def beside(self) -> tuple[Share, float]:
        """Return the chip share that collectives take now, and the time at which it changes."""
        self.land()
        share, change = ALONE, math.inf
        for flight in self.flights.values():
            running = flight.begin <= self.now
            share = share + flight.share if running else share
            change = min(change, flight.end if running else flight.begin)
        return share, change

    # -- collectives ------------------------------------------------------------------------------

    def land(self) -> None:
        """Remove the flights that have ended."""
        ended = [n for n, flight in self.flights.items() if flight.end <= self.now]
        for number in ended:
            del self.flights[number]

    def start(self, c: Collective) -> int:
        """Queue a collective on its link and its stream; return its flight's number."""
        lane, seconds, share = self.prices.link(c)
        synchronous = c.name in self.prices.without_kernels(c.computation)
        stream = None if synchronous else self.prices.stream(c)
        seconds += self.prices.skew_s(c, self.now - self.met)
        self.land()
        before = {
            number: f.end
            for number, f in self.flights.items()
            if f.lane == lane or (stream is not None and f.stream == stream)
        }
        behind = max(before, key=lambda number: before[number], default=None)
        begin = self.now if behind is None else before[behind]
        self.started += 1
        end = begin + seconds
        self.flights[self.started] = _Flight(lane, stream, begin, end, share, c, behind)
        head = (lane, "collective", c.name, c.computation, begin, end, seconds)
        self.add(head, (c.source, short_op(c.op_name), FREE, c))
        return self.started

    def wait(self, number: int) -> None:
        """Wait for a flight; while it is queued, the flights before it count as exposed."""
        for f in reversed(list(self.chain(number))):
            c = f.collective
            head = (COMPUTE, "wait", c.name, c.computation, self.now, f.end, f.end - self.now)
            self.add(head, (c.source, short_op(c.op_name), FREE, c))
            self.now = self.met = f.end

    def chain(self, number: int | None) -> Iterator[_Flight]:
        """Yield a flight that has not ended, and the flights that it is queued behind."""
        self.land()
        while (flight := self.flights.get(number or 0)) is not None:
            yield flight
            number = flight.behind

    def add(self, head: _Head, tail: _Tail) -> None:
        self.events.append((head, tail))
        self.runs.append(1)

    # -- other computations -----------------------------------------------------------------------

    def loop(self, computation: str, i: hlo.Instruction) -> None:
        """Run a while loop until its state repeats; record the other iterations as repeats."""
        body, left = i.attribute("body").lstrip("%"), i.trip_count
        if left is None:
            left = 1
            head = (COMPUTE, "memory", i.name, computation, self.now, self.now, 0.0)
            unknown = KernelWork(unknown=UNKNOWN_TRIPS)
            self.add(head, (self.module.source(i), short_op(i.op_name), unknown, None))
        shares = (one.share or 0 for one in self.module.body(body))
        rare, outer = round(left * max(shares, default=0)), self.at_boundary
        for self.at_boundary, times in ((False, left - rare), (True, rare)):
            self.iterations(body, times)
        self.at_boundary = outer

    def iterations(self, body: str, left: int) -> None:
        """Run iterations of a loop that take the same branches."""
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
        """Advance the clock past the repeats of an iteration."""
        first, last = repeat.events
        for position in range(first, last):
            self.runs[position] *= repeat.times
        self.repeats.append(repeat)
        later = repeat.period_s * (repeat.times - 1)
        self.now, self.met = self.now + later, self.met + later
        self.flights = {
            number: replace(f, begin=f.begin + later, end=f.end + later)
            for number, f in self.flights.items()
        }

    def state(self) -> tuple[tuple[str, int | None, float, float], ...]:
        """Return link, stream, and remaining begin and end of each collective in flight."""
        self.land()
        now = self.now
        return tuple((f.lane, f.stream, f.begin - now, f.end - now) for f in self.flights.values())

    def call(self, computation: str, i: hlo.Instruction) -> None:
        for called in i.called:
            self.computation(called)

    def conditional(self, computation: str, i: hlo.Instruction) -> None:
        """Run the slowest branch of a conditional; the fastest one where it is known to."""
        now, met, counts = self.now, self.met, (len(self.events), len(self.repeats))
        flights = self.flights

        def seconds(branch: str) -> float:
            self.flights = dict(flights)
            self.computation(branch)
            taken, self.now, self.met = self.now - now, now, met
            del self.events[counts[0] :], self.runs[counts[0] :], self.repeats[counts[1] :]
            return taken

        by_seconds = sorted(i.called, key=seconds)
        self.flights = flights
        slowest = i.share is None or i.share == 1 or (i.share > 0 and self.at_boundary)
        self.computation(by_seconds[-1 if slowest else 0])


_STEPS = {"while": _Replay.loop, "call": _Replay.call, "conditional": _Replay.conditional}
