"""Lay a scheduled module out in time: its kernels, its collectives, and its waits.

Kernels run one after the other in schedule order. Each class of link, NVLink and the network, is a
lane that carries one collective at a time, in the order of their starts; so is each direction of
the link to the host, for copies from and to its memory. At a collective's done the
kernels wait for what is missing of it; a synchronous one they wait for whole. While a collective
runs, a kernel beside it runs at the slower rate that the cost model gives for that share of the
chip, for as long as both run (Lagom's contention; a replay in time instead of its closed form).

Loops run iteration by iteration until one begins as it ended, with the same left in flight; all
that follow are its repeats, and are counted, not run. Approximations: of a conditional the slowest
branch runs; a while without a known trip count runs once, and is named; a collective that crosses
NVLink domains takes the network only; collectives on two lanes do not slow each other, nor do the
GPUs of a host that copy to and from its memory, each over a link of its own; nothing but
waiting slows the device's own launch of kernels; where devices share cores, what an iteration
computed before its first collective is taken from the first iteration.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass, field, replace

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
    """Lay a scheduled module out in time on a cluster.

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
    """Seconds of a module's kernels and collectives, each worked out once."""

    def __init__(self, module: hlo.Module, cost: CostModel):
        self._module, self._cost = module, cost
        moved = (*collectives(module), *host_copies(module))
        self.collectives = {(c.computation, c.name): c for c in moved}
        self.kernel_s = functools.cache(cost.kernel_s)
        self.link = functools.cache(self._link)
        self.group = functools.cache(self._group)
        self.works = functools.cache(self._works)

    def _works(self, computation: str) -> dict[str, tuple[KernelWork, str, str]]:
        """The kernels of a computation by instruction: work, source, the JAX operation's name."""
        body = self._module.body(computation)
        shapes = {i.name: i.shape for i in body}
        kernels = {}
        for i in body:
            if i.opcode not in _STEPS and (computation, i.name) not in self.collectives:
                asked = self._cost.known(work(self._module, i, shapes))
                if asked != FREE:
                    kernels[i.name] = asked, self._module.source(i), short_op(i.op_name)
        return kernels

    def skew_s(self, c: Collective, computed_s: float) -> float:
        """Return the seconds that a collective waits for the last device."""
        if c.kind in KINDS:
            return 0.0
        return self._cost.skew_s(computed_s, c.kind, self.group(c))

    def _group(self, c: Collective) -> Group:
        return group_of(c, self._module.num_devices, self._cost.cluster)

    def _link(self, c: Collective) -> tuple[str, float, Share]:
        """The lane of a collective, its seconds, and what it takes from kernels beside it."""
        if c.kind in KINDS:
            return c.kind, *self._cost.host_copy(c.bytes_moved)
        group = self.group(c)
        seconds = self._cost.collective_s(c.kind, c.bytes_moved, group)
        lane = NETWORK if group.domains > 1 else NVLINK
        return lane, seconds, self._cost.share(c.kind, c.bytes_moved, group)


def group_of(c: Collective, num_devices: int, cluster: Cluster) -> Group:
    """Return the group of a collective of a module for so many devices, counted up from 0."""
    spread = domains(c.groups, num_devices, cluster.gpus_per_nvlink_domain)
    size = 2 if c.kind == PERMUTE else c.group_size
    in_a_process = domains(c.groups, num_devices, cluster.gpus_per_process) == 1
    # Hops and copies come with the option for one communicator a ring (flags/required.py).
    together = c.group_size if c.by_copy or (c.kind == PERMUTE and c.ring) else None
    return Group(size, spread, c.by_copy and in_a_process, together)


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
_Tail = tuple[str, str, KernelWork, Collective | None]
_Due = dict[str, tuple[_Lane, float]]  # by the name to wait for: the lane, and until when


class _Replay:
    """A device on its way through a module."""

    def __init__(self, module: hlo.Module, prices: ModuleCosts):
        self.module, self.prices = module, prices
        self.now = self.met = 0.0  # met: when the devices last waited for each other
        self.lanes = {lane: _Lane() for lane in (NVLINK, NETWORK, *KINDS)}
        self.events: list[tuple[_Head, _Tail]] = []
        self.runs: list[int] = []
        self.repeats: list[Repeat] = []

    def computation(self, name: str) -> None:
        due: _Due = {}
        for i in self.module.body(name):
            self.instruction(name, i, due)

    def instruction(self, computation: str, i: hlo.Instruction, due: _Due) -> None:
        collective = self.prices.collectives.get((computation, i.name))
        if i.opcode in _STEPS:
            _STEPS[i.opcode](self, computation, i)
        elif collective:
            flight = self.start(collective)
            if collective.asynchronous:
                due[i.name] = flight
            else:
                self.wait(*flight)
        elif i.operands and i.operands[0] in due:
            until = due.pop(i.operands[0])
            if i.opcode.endswith("-update"):
                due[i.name] = until
            else:
                self.wait(*until)
        elif kernel := self.prices.works(computation).get(i.name):
            self.kernel(computation, i.name, *kernel)

    # -- kernels ----------------------------------------------------------------------------------

    def kernel(self, computation: str, name: str, asked: KernelWork, source: str, op: str) -> None:
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
        kind = "matmul" if asked.matmuls or asked.attention else "memory"
        head = (COMPUTE, kind, name, computation, began, self.now, alone)
        self.add(head, (source, op, asked, None))

    def beside(self) -> tuple[Share, float]:
        """Return the share that collectives take from a kernel now, and until when it stays."""
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
        """Put a collective on its link; return the lane, and when it ends there."""
        name, seconds, share = self.prices.link(c)
        seconds += self.prices.skew_s(c, self.now - self.met)
        lane = self.lanes[name]
        lane.land(self.now)
        begin = lane.flights[-1].end if lane.flights else self.now
        lane.flights.append(_Flight(begin, begin + seconds, share, c))
        head = (name, "collective", c.name, c.computation, begin, begin + seconds, seconds)
        self.add(head, (c.source, short_op(c.op_name), FREE, c))
        return lane, begin + seconds

    def wait(self, lane: _Lane, until: float) -> None:
        """Wait on a link; each collective that runs there meanwhile is exposed while it does."""
        lane.land(self.now)
        for f in tuple(lane.flights):
            if f.begin >= until:
                break
            c, end = f.collective, min(f.end, until)
            head = (COMPUTE, "wait", c.name, c.computation, self.now, end, end - self.now)
            self.add(head, (c.source, short_op(c.op_name), FREE, c))
            self.now = self.met = end

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
            unknown = KernelWork(unknown=UNKNOWN_TRIPS)
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
        self.now, self.met = self.now + later, self.met + later
        for lane in self.lanes.values():
            lane.flights = deque(
                replace(f, begin=f.begin + later, end=f.end + later) for f in lane.flights
            )

    def state(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Return the begin and end of each collective in flight, counted from now."""
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
        now, met, counts = self.now, self.met, (len(self.events), len(self.repeats))
        flights = {name: tuple(lane.flights) for name, lane in self.lanes.items()}

        def seconds(branch: str) -> float:
            self.computation(branch)
            taken, self.now, self.met = self.now - now, now, met
            del self.events[counts[0] :], self.runs[counts[0] :], self.repeats[counts[1] :]
            for name, lane in self.lanes.items():
                lane.flights = deque(flights[name])
            return taken

        self.computation(max(i.called, key=seconds))


_STEPS = {"while": _Replay.loop, "call": _Replay.call, "conditional": _Replay.conditional}
