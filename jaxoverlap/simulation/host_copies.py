"""Find the copies between a device and its host's memory in a scheduled module.

An array whose layout has a memory space of 5 is in the host's (pinned) memory. Whatever reads one
and gives an array of the device is a copy from it, also a kernel that does so by itself; what
writes into one is a copy to it. Each is a `Collective` of one device, so that whatever knows
collectives knows what a copy hides behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import HOST_SPACE, operand_shape
from jaxoverlap.simulation.schedule import Collective, bodies

FROM_HOST, TO_HOST = "from host", "to host"
KINDS = (FROM_HOST, TO_HOST)  # the lanes too: a link carries both ways at once
_NONE = """
    bitcast call conditional constant domain get-tuple-element opt-barrier parameter tuple while
    after-all add-dependency
"""
_NOTHING = frozenset(_NONE.split())


class _Moved(NamedTuple):
    kind: str
    num_bytes: int


def host_copies(module: hlo.Module) -> tuple[Collective, ...]:
    """Return every copy between the device and the host's memory, in schedule order.

    Raises:
        ValueError: if one is never waited for, or the module lacks a computation that it calls.
    """
    if not any(HOST_SPACE in i.shape for body in module.computations.values() for i in body):
        return ()
    return tuple(_copies(module))


def _copies(module: hlo.Module) -> Iterator[Collective]:
    for computation, runs, body, starts in bodies(module):
        shapes = {i.name: i.shape for i in body}
        for position, start in enumerate(body):
            moved = _moved(module, start, shapes)
            if moved is None:
                continue
            done = starts.done(position) if start.opcode.endswith("-start") else position
            yield Collective(
                name=start.name,
                computation=computation,
                kind=moved.kind,
                bytes_moved=moved.num_bytes,
                group_size=1,
                runs=runs,
                source=module.source(start),
                ring=None,
                asynchronous=done > position,
                matmuls=starts.matmuls(position, done),
                op_name=start.op_name,
            )


def _moved(module: hlo.Module, i: hlo.Instruction, shapes: Mapping[str, str]) -> _Moved | None:
    """Return an instruction's copy between device and host memory; None if it makes none."""
    if i.opcode in _NOTHING or i.opcode.endswith(("-done", "-update")):
        return None
    given = [operand_shape(shapes, name) for name in i.operands]
    reads_host = any(HOST_SPACE in shape for shape in given)
    result = _result(i)
    if HOST_SPACE not in result:
        return _Moved(FROM_HOST, hlo.shape_bytes(result)) if reads_host else None
    if not given:
        return None  # an allocation
    updates = _update_bytes(module, i, shapes)
    return _Moved(TO_HOST, hlo.shape_bytes(result) if updates is None else updates)


def _result(i: hlo.Instruction) -> str:
    """Return an instruction's result shape as text; of a start, its done's."""
    if i.opcode == "copy-start":  # destination, source, context
        return hlo.tuple_shapes(i.shape)[0]
    return hlo.tuple_shapes(i.shape)[1] if i.opcode.endswith("-start") else i.shape


def _update_bytes(module: hlo.Module, i: hlo.Instruction, shapes: Mapping[str, str]) -> int | None:
    """Return the bytes of a partial update of an array; None if all of it is written."""
    if i.opcode == "dynamic-update-slice":
        return hlo.shape_bytes(operand_shape(shapes, i.operands[1]))
    for called in i.called:
        inside = {one.name: one for one in module.body(called)}
        root = next(one for one in inside.values() if one.is_root)
        if root.opcode == "dynamic-update-slice":
            return hlo.shape_bytes(inside[root.operands[1]].shape)
    return None
