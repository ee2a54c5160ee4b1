"""List the collectives of XLA's schedule, and the matmuls scheduled while each is in flight.

A collective hides if it is asynchronous and a matmul is scheduled between its start and its done.
That is necessary for overlap, not sufficient: it says nothing yet about seconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxoverlap._util.expect import hlo_text
from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.collectives import OPCODES, PERMUTE, RING_PASSES
from jaxoverlap.plan.operations import OPERATIONS, described
from jaxoverlap.plan.speedup import Speedup
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.device_groups import parties
from jaxoverlap.simulation.hlo_work import operand_shape
from jaxoverlap.simulation.host_copies import host_copies
from jaxoverlap.simulation.schedule import Collective, bodies
from jaxoverlap.simulation.streams import scheduled_module, with_streams

_RING = re.compile(rf"\b({'|'.join((*RING_PASSES.values(), *OPERATIONS))})\.(\d+)(?![\w.])")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}")
_GROUPS = re.compile(r", (replica_groups|source_target_pairs)=(\S+?)(?:, |$)")
_SYNCHRONOUS = re.compile(r'"?is_sync"?[:=]true')
_BY_COPY = re.compile(r'"collectives_mode":"COLLECTIVES_(PEER|SYMMETRIC)_MEMORY"')
_SCALE_UP = '"communication_domain":"COLLECTIVE_COMMUNICATION_DOMAIN_SCALE_UP_FABRIC"'


@dataclass(frozen=True)
class Coverage:
    """How many of some collectives, and of their bytes, are covered; loops count by their trips.

    Attributes:
        count, covered: collectives that a step runs, and how many of them are covered.
        bytes_moved, bytes_covered: bytes that each device sends in them, and in the covered ones.
        synchronous: how many of them nothing can overlap with.
    """

    count: int
    covered: int
    bytes_moved: int
    bytes_covered: int
    synchronous: int

    @classmethod
    def of(cls, collectives: Iterator[Collective]) -> Coverage:
        """Return the sums over some collectives."""
        listed = list(collectives)
        return cls(
            count=sum(c.runs for c in listed),
            covered=sum(c.runs for c in listed if c.covered),
            bytes_moved=sum(c.runs * c.bytes_moved for c in listed),
            bytes_covered=sum(c.runs * c.bytes_moved for c in listed if c.covered),
            synchronous=sum(c.runs for c in listed if not c.asynchronous),
        )

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return (
            f"{self.covered} of {self.count} covered, {human_bytes(self.bytes_covered)} of "
            f"{human_bytes(self.bytes_moved)}, {self.synchronous} synchronous"
        )


@dataclass(frozen=True)
class Audit:
    """Return every collective of a scheduled module, in schedule order.

    Attributes:
        module: the module's name.
        collectives: all of them.
        speedup: how it compares with the step as it is, where `overlap` compared them.
        operations: what was decided for the operations that partition themselves, in words, by
            their names.
        host_copies: the copies from and to the host's memory (`host_copies`).
    """

    module: str
    collectives: tuple[Collective, ...]
    speedup: Speedup | None = None
    operations: tuple[tuple[str, str], ...] = ()
    host_copies: tuple[Collective, ...] = ()

    @property
    def total(self) -> Coverage:
        """Coverage of all collectives."""
        return Coverage.of(iter(self.collectives))

    @property
    def hops(self) -> Coverage:
        """Coverage of the rings' hops."""
        return Coverage.of(c for c in self.collectives if c.ring)

    @property
    def rest(self) -> Coverage:
        """Coverage of the collectives that are XLA's own."""
        return Coverage.of(c for c in self.collectives if not c.ring)

    @property
    def host_coverage(self) -> dict[str, Coverage]:
        """Coverage of the copies in each direction, where there are any."""
        kinds = dict.fromkeys(c.kind for c in self.host_copies)
        return {k: Coverage.of(c for c in self.host_copies if c.kind == k) for k in kinds}

    def __str__(self) -> str:
        groups: dict[tuple, list[Collective]] = {}
        for c in (*self.collectives, *self.host_copies):
            groups.setdefault((c.kind, c.ring, c.source, c.group_size, c.stream), []).append(c)
        return "\n".join(
            (
                table(self.module, _COLUMNS, map(_row, groups.values()), right=_RIGHT),
                f"all collectives: {self.total}",
                f"  ring hops:     {self.hops}",
                f"  XLA's own:     {self.rest}",
                *(f"{kind}: {sums}" for kind, sums in self.host_coverage.items()),
                *(f"{name}: {said}" for name, said in self.operations),
                *([str(self.speedup)] if self.speedup else ()),
            )
        )


_COLUMNS = (
    "collective", "ring", "source", "devices", "stream", "runs", "bytes", "async", "covered",
    "matmuls under"
)  # fmt: skip
_RIGHT = ("devices", "stream", "runs", "bytes", "async", "covered", "matmuls under")


def _row(group: list[Collective]) -> tuple[str, ...]:
    """Return a table row: the hops of one ring, or the other collectives of one source line."""
    first, sums = group[0], Coverage.of(iter(group))
    under = sorted({len(c.matmuls) for c in group})
    return (
        first.kind,
        first.ring or "",
        first.source,
        str(first.group_size),
        "" if first.stream is None else str(first.stream),
        str(sums.count),
        human_bytes(sums.bytes_moved),
        str(sums.count - sums.synchronous),
        str(sums.covered),
        "-".join(str(n) for n in dict.fromkeys((under[0], under[-1]))),
    )


def audit(compiled: jax.stages.Compiled | str, *, multi_streaming: bool | None = None) -> Audit:
    """Audit a compiled step, overlapped or not, or the text of a scheduled HLO module.

    Args:
        compiled: the step, or the text.
        multi_streaming: as for `jaxoverlap.simulate`.

    Raises:
        ValueError: if it is not such a text.
    """
    text = hlo_text("compiled", compiled)
    module = scheduled_module(text, multi_streaming=multi_streaming)
    return Audit(
        module.name,
        collectives(module),
        operations=described(text),
        host_copies=host_copies(module),
    )


def collectives(module: hlo.Module) -> tuple[Collective, ...]:
    """Return every collective of a scheduled module, in schedule order.

    Raises:
        ValueError: if one is never waited for, or the module lacks a computation that it calls.
    """
    return tuple(with_streams(module, _collectives(module)))


def _collectives(module: hlo.Module) -> Iterator[Collective]:
    """Yield every collective, each with the matmuls it overlaps with, without its stream."""
    for computation, runs, body, starts in bodies(module):
        shapes = {i.name: i.shape for i in body}
        for position, start in enumerate(body):
            core = _collective(module, start)
            if core is None:
                continue
            done = starts.done(position) if start.opcode.endswith("-start") else position
            asynchronous = done > position and not _SYNCHRONOUS.search(start.line)
            kind, size = core.opcode.removesuffix("-start"), group_size(core, module.num_devices)
            sent = [hlo.shape_bytes(operand_shape(shapes, name)) for name in start.operands]
            yield Collective(
                name=start.name,
                computation=computation,
                kind=kind,
                bytes_moved=_sent(kind, size, sent, hlo.shape_bytes(body[done].shape)),
                group_size=size,
                runs=runs,
                source=module.source(core) or module.source(start),
                ring=ring_of(core.op_name) if kind == PERMUTE else None,
                asynchronous=asynchronous,
                matmuls=starts.matmuls(position, done) if asynchronous else (),
                groups=_groups(core),
                op_name=core.op_name,
                by_copy=_BY_COPY.search(core.line) is not None,
                scale_up=_SCALE_UP in core.line,
            )


def ring_of(op_name: str) -> str | None:
    """Return the ring that a permute belongs to, as in "all_gather_matmul.7"; None if to none."""
    ring = _RING.search(op_name)
    return f"{ring.group(1)}.{ring.group(2)}" if ring else None


def _collective(module: hlo.Module, instruction: hlo.Instruction) -> hlo.Instruction | None:
    """Return the collective that an instruction is, starts or wraps; None if none."""
    if instruction.opcode.removesuffix("-start") in OPCODES:
        return instruction
    if instruction.opcode == "async-start":
        inside = (i for called in instruction.called for i in module.computations.get(called, ()))
        return next((i for i in inside if i.opcode in OPCODES), None)
    return None


def _groups(collective: hlo.Instruction) -> str:
    if "replica_groups=mesh[" in collective.line and (
        match := _MESH_GROUPS.search(collective.line)
    ):
        return match.group().removeprefix("replica_groups=")
    match = _GROUPS.search(collective.line)
    return match.group(2) if match else ""


def group_size(collective: hlo.Instruction, num_devices: int) -> int:
    """Return the number of devices in one group of a collective, or in one cycle of a permute."""
    permute = ", source_target_pairs=" in collective.line
    return _group_size(_groups(collective), num_devices, permute)


@functools.lru_cache(maxsize=4096)  # a ring writes the same pairs a thousand times
def _group_size(groups: str, num_devices: int, permute: bool) -> int:
    if permute:
        target = {source: to for source, to in parties(groups, num_devices)}
        return max((_path(target, start) for start in target), default=1)
    return max(map(len, parties(groups, num_devices)))


def _path(target: dict[int, int], start: int) -> int:
    """Return the number of devices on a permute's path from one device on."""
    size, at = 1, target[start]
    while at != start:
        size += 1
        if at not in target:
            break
        at = target[at]
    return size


def _sent(kind: str, n: int, operands: list[int], result: int) -> int:
    """Return the bytes that each device sends in a collective, if a ring carries it."""
    if kind == "all-gather":
        return result * (n - 1) // n
    if kind == "all-reduce":
        return 2 * sum(operands) * (n - 1) // n
    if kind in ("reduce-scatter", "all-to-all"):
        return sum(operands) * (n - 1) // n
    if kind == "ragged-all-to-all":  # what is sent, where it goes, and four lists of sizes
        return min(operands[:2]) * (n - 1) // n  # the larger one has room to spare
    return sum(operands)
