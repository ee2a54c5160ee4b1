"""Run the scheduler pass in a compilation, and report what it found.

`passes/scheduling/reorder.py` finds new orders for computations of a scheduled module. All are
simulated together, then without one after the other, and those that make the step faster are used.
If XLA's own order is faster than these, it stays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jaxoverlap._jax import xla_schedule
from jaxoverlap._util.expect import expect, is_integer, is_number
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.cost.model import CostModel
from jaxoverlap.passes.scheduling.reorder import SAME, NewOrder, reordered, schedule
from jaxoverlap.passes.scheduling.source_lines import SourceLines
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.replay import replay
from jaxoverlap.simulation.streams import scheduled_module
from jaxoverlap.simulation.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The limits within which the scheduler pass orders a step.

    Attributes:
        slack: by how much the step may exceed its peak memory in XLA's order, as a fraction. The
            peak is that of a model of XLA's buffers, arguments not counted; the default is less
            than the model's error.
        in_flight: the most collectives in flight at a time.
        extra_bytes: bytes by which the step may exceed that peak, on top of the slack: values that
            the user wants alive, as an average that is in flight while a loop runs.
        ahead_bytes: bytes by which it may exceed that peak anywhere, as inside a loop. `overlap`
            sets them to those of a layer, where the weights of a layer are gathered ahead.
    """

    slack: float = 0.02
    in_flight: int = 8
    extra_bytes: int = 0
    ahead_bytes: int = 0

    def __post_init__(self) -> None:
        slack = self.slack
        expect(is_number(slack) and slack >= 0, "slack", slack, "a fraction of zero or more")
        expect(
            is_integer(self.in_flight, 1), "in_flight", self.in_flight, "a whole number, 1 or more"
        )
        for name in ("extra_bytes", "ahead_bytes"):
            value = getattr(self, name)
            expect(is_integer(value), name, value, "a whole number of bytes, zero or more")


@dataclass(frozen=True)
class Scheduled:
    """The report of the pass on a module.

    Attributes:
        cluster: the cluster for which it was simulated.
        orders: the orders of the computations that were reordered, by name.
        xla: the step in XLA's order; None if nothing was simulated.
        step: the step as it was compiled; None if nothing was simulated.
        reason: why XLA's order is used; empty if it is not.
        seconds: the seconds that the pass took.
        frames: the source lines of the module; None if XLA's order is used.
    """

    cluster: str
    orders: Mapping[str, NewOrder]
    xla: Timeline | None
    step: Timeline | None
    reason: str
    seconds: float
    frames: SourceLines | None = field(default=None, repr=False)

    def __str__(self) -> str:
        if self.xla is None or self.step is None:
            return f"XLA's order kept: {self.reason}"
        used = (
            f"XLA's order kept: {self.reason}" if self.reason else f"this order: {_of(self.step)}"
        )
        rows = [_row(name, order) for name, order in self.orders.items()]
        unknown = ", ".join(f"{name} ({runs})" for name, runs in self.xla.unknown.items())
        lines = [
            f"{self.xla.module} on {self.cluster}, simulated",
            f"XLA's order: {_of(self.xla)}",
            used,
            *([table("reordered", _COLUMNS, rows, right=_COLUMNS[1:])] if self.orders else ()),
            *([f"of unknown cost: {unknown}"] if unknown else ()),
        ]
        return "\n".join(lines)


_COLUMNS = (
    "computation", "instructions", "XLA ms", "ms", "bare collectives", "XLA peak", "peak"
)  # fmt: skip


def _row(name: str, order: NewOrder) -> tuple[str, ...]:
    before, after = order.before, order.after
    return (
        name,
        str(len(order.names)),
        _ms(before.seconds),
        _ms(after.seconds),
        f"{len(before.unhidden)} → {len(after.unhidden)}",
        human_bytes(before.peak_bytes),
        human_bytes(after.peak_bytes),
    )


def _of(step: Timeline) -> str:
    return f"{_ms(step.step_s)} ms, of which {_ms(step.exposed_s)} exposed"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


class SchedulerCallback:
    """The pass for one compilation: XLA calls it for orders, and `report` holds the outcome."""

    def __init__(self, options: Scheduler, cost: CostModel):
        self._options, self._cost = options, cost
        self.report = self._unordered("XLA did not ask: the step came from a cache")

    def orders(self, text: str) -> Mapping[str, Sequence[str]]:
        """Return the orders that make a module's step faster; none if XLA's is as fast."""
        began = time.perf_counter()
        options, cost = self._options, self._cost
        module = replace(scheduled_module(text), num_devices=cost.cluster.num_devices)
        new_orders = schedule(module, cost, **dataclasses.asdict(options))
        xla = replay(module, cost)
        used, step, reason = _faster(module, new_orders, xla, cost)
        taken = time.perf_counter() - began
        frames = SourceLines.of(text) if used else None
        self.report = Scheduled(str(cost.cluster), used, xla, step, reason, taken, frames)
        return {name: order.names for name, order in used.items()}

    def failed(self, reason: str) -> None:
        """Report and warn that XLA keeps its order."""
        self.report = self._unordered(reason)
        warnings.warn(f"XLA's order kept: {reason}", stacklevel=2)

    def _unordered(self, reason: str) -> Scheduled:
        return Scheduled(str(self._cost.cluster), {}, None, None, reason, 0.0)


def _faster(
    module: hlo.Module, new_orders: Mapping[str, NewOrder], xla: Timeline, cost: CostModel
) -> tuple[dict[str, NewOrder], Timeline, str]:
    """Drop each order whose removal makes the step faster; return the others, the step, why none.

    An order is found for one computation alone, and without contention: what hides more of its
    collectives may slow the matmuls that overlap with them by as much.
    """

    def replayed(orders: Mapping[str, NewOrder]) -> Timeline:
        return replay(reordered(module, orders), cost) if orders else xla

    if not new_orders:
        return {}, xla, "no order is faster"
    used = dict(new_orders)
    step = together = replayed(used)
    for name in new_orders:
        others = {other: order for other, order in used.items() if other != name}
        without = replayed(others)
        if without.step_s < step.step_s * (1 - SAME):
            used, step = others, without
    if used and step.step_s <= xla.step_s * (1 + SAME):
        return used, step, ""
    against = f"{_ms(xla.step_s)} against {_ms(together.step_s)} ms"
    return {}, xla, f"it is faster by simulation: {against}"


@dataclass(frozen=True)
class SchedulerPass:
    """The scheduler pass of a step, for as many compilations as there are.

    Attributes:
        name: the step's name, with a hash of all that its order depends on. XLA's modules, and the
            keys of JAX's persistent cache, carry it.
        options: the limits of the order.
        cost: the cost model of instructions.
    """

    name: str
    options: Scheduler
    cost: CostModel

    def named(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Give a jit equation's parameters this name."""
        return {**params, "name": self.name}

    @contextmanager
    def compiling(self) -> Iterator[SchedulerCallback]:
        """Make XLA ask for the order of modules of this name while this lasts."""
        scheduling = SchedulerCallback(self.options, self.cost)
        with xla_schedule.reordering(re.sub(r"[^\w.-]", "_", self.name), scheduling):
            yield scheduling


def scheduler_pass_for(name: str, cost: CostModel, options: Scheduler) -> SchedulerPass:
    """Make the scheduler pass for a step."""
    depends = hashlib.sha256(f"{options} {cost}".encode() + source_hash())
    return SchedulerPass(f"{name}_{depends.hexdigest()[:8]}", options, cost)
