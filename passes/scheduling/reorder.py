"""Reorder the instructions of a scheduled module, so that more of the collectives hide.

Works on the module's text and gives names in order; `jaxoverlap/_jax/xla_schedule.py` puts them
into XLA's own module, inside the compiler. Every computation that starts a collective is a problem
for `passes/estimation/list_schedule.py`, innermost first, as a loop lasts as long as its body's new
order. Of several rules the fastest that stays under the ceiling is taken; XLA's order is one of
them. A computation may use the step's peak memory minus what its callers keep alive
(`memory_limits.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from jaxoverlap.cost.groups import ALONE
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.estimation.buffers import Buffers, buffers, leaves, root
from jaxoverlap.passes.estimation.list_schedule import (
    OrderOutcome,
    Rule,
    Turn,
    list_schedule,
    most_unarrived,
    move_start_earlier,
    order_outcome,
)
from jaxoverlap.passes.estimation.memory_limits import rooms
from jaxoverlap.passes.estimation.synchronous import ahead, as_compiled
from jaxoverlap.passes.estimation.tasks import Flight, Problem, Task
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.replay import ModuleCosts
from jaxoverlap.simulation.streams import apart

SAME = 1e-4  # relative: predictions that differ by less do not tell two orders apart
_LEADS = (1.0, 2.0, 8.0, math.inf)
_LEAN: tuple[Turn, ...] = ("path", "feed", "wait")  # turns that a lower ceiling makes need less
_LOWER = (0.85, 0.7, 0.55, 0.45)  # of the ceiling
_MEMORY = 0.01  # of its time: what an order may take longer for all the memory that is allowed


@dataclass(frozen=True)
class NewOrder:
    """A computation's new order.

    Attributes:
        names: its instructions.
        before: the outcome of XLA's order.
        after: the outcome of this one.
    """

    names: tuple[str, ...]
    before: OrderOutcome
    after: OrderOutcome


def schedule(
    module: hlo.Module,
    cost: CostModel,
    *,
    slack: float = 0.0,
    in_flight: int = 8,
    extra_bytes: int = 0,
    ahead_bytes: int = 0,
) -> dict[str, NewOrder]:
    """Find orders for the computations of a module that are faster than XLA's.

    Args:
        module: scheduled by XLA.
        cost: the cost model of its instructions.
        slack: the fraction of its peak memory in XLA's order by which the step may exceed it.
        in_flight: the most collectives on their way at a time.
        extra_bytes, ahead_bytes: as in `memory_limits.rooms`.

    Returns:
        The orders by computation; none where XLA's is as good, or nothing is started.
    """
    limits = functools.partial(rooms, slack=slack, extra_bytes=extra_bytes, ahead_bytes=ahead_bytes)
    walk = _Walk(module, ModuleCosts(module, cost), limits, in_flight)
    walk.outcome(module.entry)
    return walk.orders


class _Walk:
    """The walk through a module, innermost computations first."""

    def __init__(
        self,
        module: hlo.Module,
        prices: ModuleCosts,
        limits: Callable[[hlo.Module, Callable[[str], Buffers]], dict[str, int]],
        in_flight: int,
    ):
        self._module, self._prices, self._in_flight = module, prices, in_flight
        self._buffers = functools.cache(functools.partial(buffers, module))
        self._rooms = limits(module, self._buffers)
        self._known: dict[str, OrderOutcome] = {}
        self.orders: dict[str, NewOrder] = {}

    def outcome(self, computation: str) -> OrderOutcome:
        """Return the outcome of a computation in the better order."""
        if computation not in self._known:
            self._known[computation] = self._reorder(computation)
        return self._known[computation]

    def _reorder(self, computation: str) -> OrderOutcome:
        problem = self._problem(computation)
        before = order_outcome(problem, as_compiled(problem, range(len(problem.tasks))))
        if not any(task.flight for task in problem.tasks):
            return before
        order, after = best(problem, self._rooms[computation], self._in_flight)
        if order != range(len(problem.tasks)):
            body = self._module.body(computation)
            names = tuple(body[i].name for i in order)
            self.orders[computation] = NewOrder(names, before, after)
            return after
        return before

    def _problem(self, computation: str) -> Problem:
        body = self._module.body(computation)
        position = {i.name: n for n, i in enumerate(body)}
        own_buffers = self._buffers(computation)
        tasks: list[Task] = []
        for instruction in body:
            needs = [position[name.partition("#")[0]] for name in _needs(instruction)]
            task = replace(
                self._task(computation, instruction),
                needs=tuple(dict.fromkeys(needs)),
                holds=own_buffers.held(instruction),
            )
            if instruction.opcode.endswith("-done") and tasks[needs[0]].flight:
                task = replace(task, awaits=needs[0])
            tasks.append(task)
        kept = frozenset(leaves(own_buffers.values[root(self._module, computation).name]))
        asynchronous = [self._prices.asynchronous(computation, i) for i in body]
        separate = apart(asynchronous, self._module.num_devices)
        return Problem(tuple(tasks), tuple(own_buffers.bytes), kept, separate)

    def _task(self, computation: str, instruction: hlo.Instruction) -> Task:
        """Make the task of an instruction, but for what it needs and holds."""
        if instruction.opcode in hlo.CONTROL_FLOW:
            inner = [self.outcome(name) for name in instruction.called]
            times = instruction.trip_count or 1 if instruction.opcode == "while" else 1
            most = sum if instruction.opcode == "while" else max
            seconds = times * most(o.seconds for o in inner)
            if (share := instruction.share) is not None:
                seconds = share * seconds + (1 - share) * min(o.seconds for o in inner)
            return Task(seconds=seconds, extra_bytes=max(o.peak_bytes for o in inner))
        if collective := self._prices.collectives.get((computation, instruction.name)):
            lane, seconds, _ = self._prices.link(collective)
            if collective.asynchronous:
                return Task(flight=Flight(lane, seconds, self._prices.stream(collective)))
            return Task(seconds=seconds)
        if kernel := self._prices.works(computation).get(instruction.name):
            work, *_ = kernel
            is_matmul = bool(work.matmuls or work.attention)
            return Task(seconds=self._prices.kernel_s(work, ALONE), is_matmul=is_matmul)
        return Task()


_Ordered = tuple[Sequence[int], OrderOutcome]


def best(
    problem: Problem, ceiling_bytes: int, in_flight: int
) -> tuple[Sequence[int], OrderOutcome]:
    """Choose the fastest of XLA's order and those of some rules that stay under the ceiling.

    One that needs less memory may be slower by as much as that is worth (`_MEMORY`). Of those that
    are equally good, the one with most collectives beside a matmul; then that of least memory; then
    XLA's. In what comes out, a collective that only other kernels hide starts before a matmul
    already, where that costs no time. One that no kernel hides stands where XLA will put it, or
    before what it would wait for there (`synchronous.py`).
    """
    xla = range(len(problem.tasks))
    orders: list[_Ordered] = [(xla, order_outcome(problem, as_compiled(problem, xla)))]
    lanes = sorted({task.flight.lane for task in problem.tasks if task.flight})
    for turn in get_args(Turn):
        several = [
            Rule(dict(zip(lanes, leads, strict=True)), turn, in_flight, ceiling_bytes)
            for leads in itertools.product(_LEADS, repeat=len(lanes))
        ]
        by_rule = [list(_compiled(problem, list_schedule(problem, rule))) for rule in several]
        orders += itertools.chain(*by_rule)
        if turn in _LEAN:
            seconds = [min(outcome.seconds for _, outcome in found) for found in by_rule]
            orders += _in_less_memory(problem, several[seconds.index(min(seconds))])
    unit = orders[0][1].seconds * SAME or 1.0

    def cost(one: _Ordered) -> tuple[int, int, int]:
        outcome = one[1]
        worth = 1 + _MEMORY * outcome.peak_bytes / ceiling_bytes if ceiling_bytes else 1
        return round(outcome.seconds * worth / unit), len(outcome.unhidden), outcome.peak_bytes

    def cheapest(several: Sequence[_Ordered]) -> _Ordered:
        allowed = [
            (order, outcome)
            for order, outcome in several
            if outcome.peak_bytes <= ceiling_bytes and outcome.clashes <= orders[0][1].clashes
        ]
        return min(allowed or several[:1], key=cost)

    chosen = cheapest(orders)
    for start in chosen[1].unhidden:
        order = move_start_earlier(problem, chosen[0], start)
        if most_unarrived(problem, order) <= in_flight:
            chosen = cheapest([chosen, *_compiled(problem, order)])
    return chosen


def _in_less_memory(problem: Problem, rule: Rule) -> Iterator[_Ordered]:
    """Yield orders under lower ceilings, by a rule and by one whose starts are all due at once.

    What a ceiling holds back is mostly what could run much earlier than it is needed, as the
    recomputed values of the next layers, whose turn then comes when those before are done with.
    """
    at_once = dict.fromkeys(rule.leads, math.inf)
    for leads in (rule.leads, at_once) if rule.leads != at_once else (at_once,):
        for share in _LOWER:
            lower = replace(rule, leads=leads, ceiling_bytes=int(share * rule.ceiling_bytes))
            yield from _compiled(problem, list_schedule(problem, lower))


def _compiled(problem: Problem, order: Sequence[int]) -> Iterator[_Ordered]:
    """Yield an order as XLA compiles it, and with synchronous collectives ahead of others."""
    late, early = as_compiled(problem, order), ahead(problem, order)
    for compiled in (late,) if early == late else (late, early):
        yield compiled, order_outcome(problem, compiled)


def reordered(module: hlo.Module, orders: Mapping[str, NewOrder]) -> hlo.Module:
    """Put the computations of a module in other orders."""
    computations = dict(module.computations)
    for name, order in orders.items():
        instructions = {i.name: i for i in module.body(name)}
        computations[name] = tuple(instructions[i] for i in order.names)
    return replace(module, computations=computations)


def _needs(instruction: hlo.Instruction) -> list[str]:
    """List the names of what an instruction waits for, for its value or by control."""
    return [*instruction.operands, *instruction.control]
