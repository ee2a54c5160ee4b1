"""List the collectives that stay XLA's, as no ring does them, with bytes and source lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from jaxoverlap.plan.collectives import KIND_OF
from jaxoverlap.plan.plan import Remaining
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.audit import Collective, collectives
from jaxoverlap.simulation.device_groups import axes_of

_Way = tuple[str, ...]
_MOVED_NARROW = ("all-gather", "all-to-all", "collective-permute")
_VIEWS = ("reshape", "bitcast", "transpose", "copy")
_BY_PARTITIONER = 'is_spmd_generated="true"'


def partitioner_collectives(
    module: hlo.Module, axis_sizes: Mapping[str, int]
) -> tuple[Remaining, ...]:
    """Return the collectives that XLA's partitioner has put into a step, most bytes first.

    Args:
        module: the partitioned module.
        axis_sizes: devices along each axis of its mesh.
    """
    sums: dict[tuple[str, tuple[str, ...], str], list[int]] = defaultdict(lambda: [0, 0])
    by_partitioner = {
        (name, i.name)
        for name, body in module.computations.items()
        for i in body
        if _BY_PARTITIONER in i.line
    }
    for c in moved(module):
        if (c.computation, c.name) in by_partitioner:
            axes = axes_of(c.groups, module.num_devices, axis_sizes)
            total = sums[KIND_OF[c.kind], axes, c.source or _last(c.op_name)]
            total[0] += c.runs
            total[1] += c.runs * c.bytes_moved
    remaining = [
        Remaining(kind=kind, axes=axes, source=source, runs=runs, bytes_moved=sent)
        for (kind, axes, source), (runs, sent) in sums.items()
        if sent
    ]
    return tuple(sorted(remaining, key=lambda r: (-r.bytes_moved, r.source)))


def _last(op_name: str) -> str:
    """Return the end of an operation's path, for what has no source line."""
    return op_name.rpartition("/")[2] or "<unknown>"


def moved(module: hlo.Module) -> Iterator[Collective]:
    """Yield a partitioned module's collectives, as XLA:GPU makes them after the partitioner.

    An all-reduce that is only sliced is a scatter; what is converted before or after it is moved
    travels in the narrower dtype.
    """
    scattered = {
        (name, reduced)
        for name, body in module.computations.items()
        for reduced in _scattered(body)
    }
    narrowed = {
        (name, converted): times
        for name, body in module.computations.items()
        for converted, times in _narrowed(body)
    }
    for c in collectives(module):
        if (c.computation, c.name) in scattered:
            c = replace(c, kind="reduce-scatter", bytes_moved=c.bytes_moved // 2)
        times = narrowed.get((c.computation, c.name), 1)
        yield replace(c, bytes_moved=c.bytes_moved // times) if times > 1 else c


def _narrowed(body: tuple[hlo.Instruction, ...]) -> Iterator[tuple[str, int]]:
    """Yield the collectives that move a converted value, and how many times narrower it could be.

    XLA's CollectiveQuantizer and its movers of conversions gather before they widen, and narrow
    before they gather; also through the views between.
    """
    users, read = hlo.users(body), hlo.operands(body)
    for i in body:
        if i.opcode in _MOVED_NARROW and len(i.operands) == 1 and hlo.shape_bytes(i.shape):
            before = _widening(_past(_VIEWS, read[i.name][0], read), read)
            after = [1 / _widening(_past(_VIEWS, user, users), read) for user in users[i.name]]
            if (times := max(before, min(after, default=1))) > 1:
                yield i.name, int(times)


def _widening(i: hlo.Instruction, read: Mapping[str, list[hlo.Instruction]]) -> float:
    """Return by how many times a conversion widens a value; 1 for any other instruction."""
    if i.opcode != "convert":
        return 1
    return hlo.shape_bytes(i.shape) / hlo.shape_bytes(read[i.name][0].shape)


def _past(
    opcodes: Collection[str],
    i: hlo.Instruction,
    following: Mapping[str, list[hlo.Instruction]],
) -> hlo.Instruction:
    """Return the first instruction of other opcodes, as long as a single one follows each.

    Args:
        opcodes: those that are passed.
        i: where to begin.
        following: `hlo.users` or `hlo.operands` of the body.
    """
    while i.opcode in opcodes and len(following[i.name]) == 1:
        (i,) = following[i.name]
    return i


def _scattered(body: tuple[hlo.Instruction, ...]) -> Iterator[str]:
    """Yield the all-reduces of which each device only slices out its own shard.

    XLA:GPU makes a reduce-scatter of them later; so does every partitioner for which it matters.
    """
    users = hlo.users(body)
    for i in body:
        if i.opcode != "all-reduce" or i.shape.startswith("("):
            continue
        whole = hlo.shape_bytes(i.shape)
        parts = [_sliced(user, users) for user in users[i.name]]
        sizes = {hlo.shape_bytes(part.shape) for part in parts if part is not None}
        if parts and None not in parts and len(sizes) == 1 and sizes != {whole}:
            yield i.name


def joined(module: hlo.Module) -> set[tuple[str, str]]:
    """Find the all-reduces that XLA:GPU joins with another, by computation and name.

    Where two sums over the same devices are added, and nobody else reads them, XLA adds first and
    sends once (AllReduceReassociate, ReduceScatterReassociate). One of them stays. If both were
    sums over other devices before, these are added first too.
    """
    return {
        (name, joined) for name, body in module.computations.items() for joined in _joined(body)
    }


def _joined(body: tuple[hlo.Instruction, ...]) -> Iterator[str]:
    users = hlo.users(body)
    sums: dict[str, tuple[str, _Way]] = {}  # the all-reduce that a value is, and the way from it
    before: dict[str, tuple[str, _Way] | None] = {}  # the same, of what an all-reduce adds up
    for i in body:
        made = [sums.get(o) for o in i.operands if len(users[o.partition("#")[0]]) == 1]
        if i.opcode == "all-reduce" and not i.shape.startswith("("):
            before[i.name] = made[0] if made else None
            sums[i.name] = i.name, (i.shape, i.attribute("replica_groups"))
        elif i.opcode in ("dynamic-slice", "reshape", "bitcast") and made and made[0]:
            name, way = made[0]
            sums[i.name] = name, (*way, i.opcode, i.shape, *i.operands[1:])
        elif i.opcode == "add" and len(made) == 2 and made[0] and made[1]:
            one, other = made[0], made[1]
            if _joins(one, other):
                sums[i.name] = one
            while one and other and _joins(one, other):
                yield other[0]
                one, other = before[one[0]], before[other[0]]


def _joins(one: tuple[str, _Way], other: tuple[str, _Way]) -> bool:
    """Return whether two values are different sums that came the same way."""
    return one[0] != other[0] and one[1] == other[1]


def _sliced(
    user: hlo.Instruction, users: Mapping[str, list[hlo.Instruction]]
) -> hlo.Instruction | None:
    """Return the dynamic-slice by which each device reads a value; None if it is read in full."""
    user = _past(("reshape", "bitcast", "transpose"), user, users)
    return user if user.opcode == "dynamic-slice" else None
