"""Limit the memory of each computation of a step, so that the step's peak is no higher.

A step peaks at one point, mostly in the backward loop. Elsewhere memory is free: while the
loop over layers runs forward there are no gradients yet. So what bounds a computation is not its
own peak, but the step's, less what is live around it where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxoverlap.passes.estimation.buffers import Buffers, leaves, root
from jaxoverlap.passes.estimation.list_schedule import Problem, Task, live_bytes
from jaxoverlap.simulation import hlo


def rooms(
    module: hlo.Module,
    buffers_of: Callable[[str], Buffers],
    slack: float = 0.0,
    extra_bytes: int = 0,
    ahead_bytes: int = 0,
) -> dict[str, int]:
    """Return the peak live bytes allowed in each computation, callees included.

    Args:
        module: scheduled; in its order the step has its peak.
        buffers_of: the buffers of a computation.
        slack: the fraction of its peak by which the step may exceed it.
        extra_bytes: what the outermost computation may keep alive beside that, while it calls
            others: an average that is on its way during a loop. The others get nothing of it.
        ahead_bytes: what any computation may keep alive in addition: weights of the next layer.

    Returns:
        The limit of each computation that runs; none is below what its own order needs.
    """
    around: dict[str, list[tuple[str, int]]] = {}
    peaks: dict[str, int] = {}
    for name in _innermost_first(module, module.entry):
        around[name], peaks[name] = [], 0
        for instruction, live in _live(module, name, buffers_of(name)):
            inner = _called(instruction)
            around[name] += [(other, live) for other in inner]
            peaks[name] = max(peaks[name], live + max((peaks[i] for i in inner), default=0))
    limits = dict.fromkeys(around, int(peaks[module.entry] * (1 + slack)) + ahead_bytes)
    for name in reversed(around):  # callers first
        for other, live in around[name]:
            limits[other] = min(limits[other], limits[name] - live)
    limits[module.entry] += extra_bytes
    return limits


def _innermost_first(module: hlo.Module, computation: str) -> dict[str, None]:
    """List a computation after all that it calls, each once."""
    callees: dict[str, None] = {}
    for instruction in module.body(computation):
        for other in _called(instruction):
            callees |= {n: None for n in _innermost_first(module, other) if n not in callees}
    return {**callees, computation: None}


def _called(instruction: hlo.Instruction) -> tuple[str, ...]:
    return instruction.called if instruction.opcode in hlo.CONTROL_FLOW else ()


def _live(
    module: hlo.Module, computation: str, own_buffers: Buffers
) -> Iterator[tuple[hlo.Instruction, int]]:
    """Yield each instruction with the bytes that are live while it runs."""
    body = module.body(computation)
    kept = frozenset(leaves(own_buffers.values[root(module, computation).name]))
    tasks = tuple(Task(holds=own_buffers.held(instruction)) for instruction in body)
    problem = Problem(tasks, tuple(own_buffers.bytes), kept)
    return zip(body, live_bytes(problem, range(len(tasks))), strict=True)
