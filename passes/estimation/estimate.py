"""Estimate how long a step takes, from its partitioned module, before anything is compiled.

XLA has partitioned the step and neither fused nor scheduled it. So three things are estimated that
a compiled schedule would show: what is fused (element-wise operations are one kernel with what
reads them, up to a matmul, a collective or the end of a loop's body), in which order it runs (by
the rules of the scheduler pass, `list_schedule.py`), and what overlapping collectives take
from a kernel (their share of the SMs, for as long as they hide). Two candidates of one step are
compared so, and systematic errors cancel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jaxoverlap.cost.groups import legs_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.analysis.partitioner_collectives import joined, moved
from jaxoverlap.passes.estimation.kernels import Kernels, transposed_bytes
from jaxoverlap.passes.estimation.list_schedule import (
    Rule,
    Turn,
    list_schedule,
    order_outcome,
    waits_by_start,
)
from jaxoverlap.passes.estimation.tasks import Flight, Problem, Task
from jaxoverlap.plan.collectives import OPCODES, PERMUTE
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective, collectives
from jaxoverlap.simulation.host_copies import KINDS
from jaxoverlap.simulation.host_memory import copied
from jaxoverlap.simulation.replay import group_of
from jaxoverlap.simulation.streams import stream
from jaxoverlap.simulation.timeline import NETWORK, NVLINK

_LEADS: tuple[tuple[float, Turn], ...] = (
    *((2.0, "path"), (math.inf, "path"), (2.0, "first")),
    *((2.0, "feed"), (math.inf, "feed")),
)
# A gather that needs one of these is not ready when its computation begins.
_LATE = (*hlo.CONTROL_FLOW, *OPCODES, "dot", "convolution", "custom-call", "sort", "scatter")
_HOST_LEADS = dict.fromkeys(KINDS, math.inf)  # a copy takes no other link's turn
_RULES = tuple(Rule({NVLINK: a, NETWORK: a, **_HOST_LEADS}, turn, 8, 1 << 62) for a, turn in _LEADS)


@dataclass(frozen=True)
class Estimate:
    """A step, estimated; of one device.

    Attributes:
        step_s: seconds.
        compute_s: seconds of these in kernels, slowed by the collectives that overlap with them.
        communication_s: seconds of all collectives, by link.
        bytes_moved: bytes that a device sends, by link.
        waited_s: seconds in which the kernels wait for a collective, by computation and name.
    """

    step_s: float
    compute_s: float
    communication_s: Mapping[str, float]
    bytes_moved: Mapping[str, float]
    waited_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the kernels wait."""
        return self.step_s - self.compute_s


def estimate(
    module: hlo.Module, cost: CostModel, *, nvlink_stream: bool = False, joined_bytes: int = 0
) -> Estimate:
    """Estimate how long a partitioned module takes on a cluster, in a good order.

    Args:
        module: from `partitioned.Picture`.
        cost: the cost model of the cluster.
        nvlink_stream: whether NVLink's collectives get a stream of their own (`flags/required.py`);
            else all collectives share one.
        joined_bytes: bytes that XLA may gather with one all-gather: those that need nothing but
            what their computation was given are then one; so are the scatters of a loop's body that
            nothing in it waits for, under the next iteration. 0 for each by itself.
    """
    return _Estimator(module, cost, nvlink_stream, joined_bytes).computation(module.entry)


_NOTHING = Estimate(0.0, 0.0, {}, {})


def _added(one: Estimate, other: Estimate, times: float = 1) -> Estimate:
    def both(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
        return {key: a.get(key, 0) + times * b.get(key, 0) for key in {*a, *b}}

    return Estimate(
        one.step_s + times * other.step_s,
        one.compute_s + times * other.compute_s,
        both(one.communication_s, other.communication_s),
        both(one.bytes_moved, other.bytes_moved),
        both(one.waited_s, other.waited_s),
    )


class _Estimator:
    """The estimator of one module on one cluster."""

    def __init__(self, module: hlo.Module, cost: CostModel, nvlink_stream: bool, joined_bytes: int):
        self._module, self._cost, self._nvlink_stream = module, cost, nvlink_stream
        self._joined_bytes = joined_bytes
        sums = not cost.on_cpus
        found = moved(module) if sums else collectives(module)
        sent = {(c.computation, c.name): c for c in found}
        left = sent.keys() - joined(module) if sums else sent.keys()
        self._collectives = {position: sent[position] for position in left}
        self.computation = functools.cache(self._computation)
        self._kernel_s = functools.cache(lambda kernel: cost.kernel_s(cost.known(kernel)))

    def _computation(self, name: str) -> Estimate:
        """Estimate a computation, with those that it runs."""
        body = self._module.body(name)
        kernels = Kernels(self._module, body)
        tasks: list[Task] = []
        positions: dict[str, int] = {}
        flights: dict[int, str] = {}
        total, slowed_s = _NOTHING, 0.0
        later = self._later_scatters(name, body)
        body, groups = self._with_joined(name, body)
        groups |= later
        for i in body:
            if i.name in positions:
                continue  # it came with another
            group = groups.get(i.name, (i,))
            operands = (o.partition("#")[0] for one in group for o in one.operands)
            # One that is left for the next iteration flies from the start of that.
            needs = () if i.name in later else tuple(dict.fromkeys(positions[o] for o in operands))
            if (c := self._collectives.get((name, i.name))) is not None:
                sent = (self._collectives[name, one.name].bytes_moved for one in group)
                c = replace(c, bytes_moved=sum(sent))
                for flight, sent_bytes, sms in self._flights(c):
                    flights[len(tasks)] = i.name
                    tasks.append(Task(needs, flight=flight))
                    tasks.append(Task((len(tasks) - 1,), awaits=len(tasks) - 1))
                    needs = (len(tasks) - 1,)
                    own = {flight.lane: flight.seconds}, {flight.lane: sent_bytes}
                    total = _added(total, Estimate(0.0, 0.0, *own))
                    slowed_s += flight.seconds * sms / self._cost.cluster.chip.num_sms
                if transposed := sum(transposed_bytes(one, kernels) for one in group):
                    tasks.append(Task((len(tasks) - 1,), seconds=self._cost.memory_s(transposed)))
            elif (lane := copied(i)) is not None:
                flights[len(tasks)] = i.name
                size = hlo.shape_bytes(i.shape)
                copy_s, _ = self._cost.host_copy(size)
                slowed_s += self._cost.memory_s(size)
                tasks.append(Task(needs, flight=Flight(lane, copy_s)))
                tasks.append(Task((len(tasks) - 1,), awaits=len(tasks) - 1))
            elif i.opcode in hlo.CONTROL_FLOW:
                inner = self._called(i)
                total = _added(total, replace(inner, step_s=0.0, compute_s=0.0))
                tasks.append(Task(needs, seconds=inner.step_s))
                slowed_s -= inner.exposed_s
            else:
                seconds = self._kernel_s(kernels.work(i))
                tasks.append(Task(needs, seconds=seconds, is_matmul=i.opcode == "dot"))
            positions |= dict.fromkeys((one.name for one in group), len(tasks) - 1)
        return self._ordered(name, tasks, flights, total, slowed_s)

    def _with_joined(
        self, name: str, body: Sequence[hlo.Instruction]
    ) -> tuple[Sequence[hlo.Instruction], dict[str, tuple[hlo.Instruction, ...]]]:
        """Return a computation with its joined gathers, and all that these read, first.

        Returns:
            Its instructions, and each group of joined gathers by the name of its first one.
        """
        if not self._joined_bytes:
            return body, {}
        early = set[str]()  # those that need only what the computation was given
        gathers: dict[str, list[hlo.Instruction]] = {}
        for i in body:
            if not early.issuperset(o.partition("#")[0] for o in i.operands):
                continue
            c = self._collectives.get((name, i.name))
            if c is None and i.opcode not in _LATE:
                early.add(i.name)
            elif c is not None and i.opcode == "all-gather":
                gathers.setdefault(i.attribute("replica_groups"), []).append(i)
        groups = [
            tuple(some) for every in gathers.values() for some in _up_to(every, self._joined_bytes)
        ]
        joined = {one.name for group in groups for one in group}
        first = _needed(body, joined) | joined
        order = sorted(body, key=lambda i: (i.name not in first, i.name in joined))
        return order, {group[0].name: group for group in groups}

    def _later_scatters(
        self, name: str, body: Sequence[hlo.Instruction]
    ) -> dict[str, tuple[hlo.Instruction, ...]]:
        """Return the scatters of a loop's body that nothing in it waits for, as they are joined.

        XLA joins those of a layer's gradients, and in a double-buffered loop they run under the
        next iteration. Each group is by the name of its first one.
        """
        if not self._joined_bytes or name not in self._loops:
            return {}
        leaves, scatters = set[str](), dict[str, list[hlo.Instruction]]()
        users = hlo.users(body)
        for i in reversed(body):
            c = self._collectives.get((name, i.name))
            light = i.opcode not in _LATE or (c is not None and c.kind == "reduce-scatter")
            if not light or not all(user.name in leaves for user in users[i.name]):
                continue
            leaves.add(i.name)
            if c is not None:
                scatters.setdefault(i.attribute("replica_groups"), []).insert(0, i)
        groups = (g for some in scatters.values() for g in _up_to(some, self._joined_bytes))
        return {group[0].name: tuple(group) for group in groups}

    @functools.cached_property
    def _loops(self) -> set[str]:
        """The computations that are bodies of loops."""
        every = (i for body in self._module.computations.values() for i in body)
        return {i.attribute("body").lstrip("%") for i in every if i.opcode == "while"}

    def _ordered(
        self,
        name: str,
        tasks: Sequence[Task],
        flights: Mapping[int, str],
        total: Estimate,
        slowed_s: float,
    ) -> Estimate:
        """Estimate the tasks of a computation in the best order that the rules find.

        Args:
            name: the computation's name.
            tasks: its tasks.
            flights: the names of the collectives among them, by their index.
            total: what it moves, and the waits of the computations that it runs.
            slowed_s: seconds of compute that its collectives take, if they all hide.
        """
        problem = Problem(tuple(tasks))
        compute_s = sum(task.seconds for task in tasks)
        if not any(task.flight for task in tasks):
            return replace(total, step_s=compute_s, compute_s=compute_s + min(slowed_s, 0.0))
        orders = [list_schedule(problem, rule) for rule in _RULES]
        timed = ((order_outcome(problem, order).seconds, order) for order in orders)
        step_s, order = min(timed, key=lambda one: one[0])
        wire_s = sum(task.flight.seconds for task in tasks if task.flight)
        hidden = 1 - min((step_s - compute_s) / wire_s, 1.0) if wire_s else 0.0
        waited_s = dict[tuple[str, str], float](total.waited_s)
        for index, seconds in waits_by_start(problem, order).items():
            position = name, flights[index]
            waited_s[position] = waited_s.get(position, 0.0) + seconds
        return replace(
            total,
            step_s=step_s + hidden * max(slowed_s, 0.0),
            compute_s=compute_s + hidden * max(slowed_s, 0.0) + min(slowed_s, 0.0),
            waited_s=waited_s,
        )

    def _called(self, i: hlo.Instruction) -> Estimate:
        """Estimate the computations that an instruction runs.

        Of a conditional the slowest branch, as often as it runs, if that is known.
        """
        if i.opcode == "conditional":
            by_seconds = sorted(map(self.computation, i.called), key=lambda e: e.step_s)
            if (share := i.share) is None:
                return by_seconds[-1]
            return _added(_added(_NOTHING, by_seconds[-1], share), by_seconds[0], 1 - share)
        called = [i.attribute("body").lstrip("%")] if i.opcode == "while" else i.called
        times = (i.trip_count or 1) if i.opcode == "while" else 1
        return functools.reduce(
            lambda so_far, name: _added(so_far, self.computation(name), times), called, _NOTHING
        )

    def _flights(self, c: Collective) -> Iterator[tuple[Flight, int, float]]:
        """Yield the flights of a collective in order, with the bytes and the SMs of each."""
        cluster = self._cost.cluster
        group = group_of(replace(c, by_copy=c.kind == PERMUTE), self._module.num_devices, cluster)
        for leg in legs_of(c.kind, c.bytes_moved, group):
            lane = NETWORK if leg[2].domains > 1 else NVLINK
            own = stream(scale_up=self._nvlink_stream and lane == NVLINK)
            flight = Flight(
                lane, self._cost.collective_s(*leg), None if self._cost.on_cpus else own
            )
            yield flight, leg[1], self._cost.share(*leg).sms


def _up_to(gathers: Sequence[hlo.Instruction], most_bytes: int) -> Iterator[list[hlo.Instruction]]:
    """Yield gathers in groups of at most so many bytes, as XLA's combiner does, in their order."""
    group: list[hlo.Instruction] = []
    size = 0
    for i in gathers:
        own = hlo.shape_bytes(i.shape)
        if group and size + own > most_bytes:
            yield group
            group, size = [], 0
        group.append(i)
        size += own
    if group:
        yield group


def _needed(body: Sequence[hlo.Instruction], names: Set[str]) -> set[str]:
    """Return the names of what instructions read, and of what that was made from."""
    needed = set[str]()
    for i in reversed(body):
        if i.name in names or i.name in needed:
            needed.update(o.partition("#")[0] for o in i.operands)
    return needed
