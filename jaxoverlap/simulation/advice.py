"""List the collectives that belong to no ring, with their time and how to remove them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective
from jaxoverlap.simulation.timeline import Spent, Timeline


@dataclass(frozen=True)
class UndecomposedCollective:
    """Collectives outside rings, of one kind, source line and group size.

    Attributes:
        kind: as HLO writes it.
        source: the "folder/file.py:line" they came from; empty if the module does not say.
        op: the last names of the JAX operation.
        backward: whether it is part of a gradient.
        devices: number of devices that take part together.
        lane: the link that they take.
        runs: how many a step runs.
        bytes_moved: bytes that each device sends in a step.
        seconds: time on the link in a step; exposed_s: the part of it in which kernels wait.
        before, after: the arrays that a device gives and gets in the largest, as in
            "bf16[8,512,4096]".
    """

    kind: str
    source: str
    op: str
    backward: bool
    devices: int
    lane: str
    runs: int
    bytes_moved: int
    seconds: float
    exposed_s: float
    before: str
    after: str

    @property
    def advice(self) -> str:
        """Suggest a sharding constraint that removes an all-to-all or an all-reduce; else empty.

        A gather may well be wanted (a sharded weight, a residual stream), and so may the scatter
        of a sum: the schedule does not tell.
        """
        op = f" ({self.op})" if self.op else ""
        at = f"{'backward of ' if self.backward else ''}{self.source or 'no source line'}{op}"
        pin = "jax.lax.with_sharding_constraint"
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            return (
                f"{at}: {self.before} changes from one sharded dim to another among {self.devices} "
                "devices, as its producer and its reader are sharded differently; unless that is "
                f"intended, as for experts, a {pin} there with one sharding for both removes the "
                "exchange"
            )
        if self.kind == "all-reduce":
            return (
                f"{at}: partial sums, {self.before}, are replicated on {self.devices} devices; "
                f"{pin} on the result, sharded over these, makes it a reduce-scatter of half the "
                "bytes"
            )
        return ""


def strays(module: hlo.Module, timeline: Timeline) -> tuple[UndecomposedCollective, ...]:
    """Return the collectives outside rings, longest exposed first, then longest."""
    groups: dict[tuple, list[Spent]] = {}
    for spent in timeline.spent:
        c = spent.collective
        if c.ring is None:
            key = (c.kind, c.source, _backward(c), c.group_size, spent.lane)
            groups.setdefault(key, []).append(spent)
    ringless = [_stray(module, group) for group in groups.values()]
    return tuple(sorted(ringless, key=lambda s: (-s.exposed_s, -s.seconds)))


def _stray(module: hlo.Module, group: list[Spent]) -> UndecomposedCollective:
    largest = max(group, key=lambda s: s.collective.bytes_moved).collective
    before, after = _arrays(module, largest)
    return UndecomposedCollective(
        kind=largest.kind,
        source=largest.source,
        op="/".join(largest.op_name.split("/")[-2:]),
        backward=_backward(largest),
        devices=largest.group_size,
        lane=group[0].lane,
        runs=sum(s.runs for s in group),
        bytes_moved=sum(s.runs * s.collective.bytes_moved for s in group),
        seconds=math.fsum(s.seconds for s in group),
        exposed_s=math.fsum(s.exposed_s for s in group),
        before=before,
        after=after,
    )


def _backward(c: Collective) -> bool:
    return "transpose(" in c.op_name  # as JAX names what autodiff transposes


def _arrays(module: hlo.Module, c: Collective) -> tuple[str, str]:
    """Return the types of a collective's operands and results on one device, without layouts."""
    body = module.body(c.computation)
    shapes = {i.name: i.shape for i in body}
    start = next(i for i in body if i.name == c.name)
    given = [shapes[name.partition("#")[0]] for name in start.operands]
    waits = (i for i in body if c.name in i.operands[:1] and i.opcode.endswith("-done"))
    end = next(waits, start)
    return _names(*given), _names(end.shape)


def _names(*shapes: str) -> str:
    arrays = [array for shape in shapes for array in hlo.array_shapes(shape)]
    more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    return f"{arrays[0]}{more}" if arrays else ""
