"""Find the values of a partitioned module that XLA will move to the host's memory.

The program that XLA's partitioner returns says where values move to the host's memory and back, by
calls of `MoveToHost` and `MoveToDevice`. XLA's host offloader later places what lies between them
there: slices, updates, and what loops carry. The same is done here, so that estimates count
neither the bytes nor the kernels of such values, and know the copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import HOST_SPACE
from jaxoverlap.simulation.host_copies import FROM_HOST, TO_HOST

_TARGETS = {
    'custom_call_target="MoveToHost"': TO_HOST,
    'custom_call_target="MoveToDevice"': FROM_HOST,
}
_SAME = ("bitcast", "copy", "dynamic-slice", "reshape", "slice", "transpose")
# A value: its computation, its instruction, and its place in a tuple, or None for an array.
_Value = tuple[str, str, int | None]


def copied(i: hlo.Instruction) -> str | None:
    """Return the direction of a copy in a partitioned module; None for other instructions."""
    if i.opcode != "custom-call":
        return None
    return next((kind for target, kind in _TARGETS.items() if target in i.line), None)


def with_host_memory(module: hlo.Module) -> hlo.Module:
    """Return a partitioned module in which layouts say which values are in the host's memory.

    What a loop starts with in the host's memory is an allocation there.
    """
    every = (i for body in module.computations.values() for i in body)
    if not any(copied(i) == TO_HOST for i in every):
        return module
    host = _reached(module)
    computations = {
        name: tuple(_placed(name, body, host)) for name, body in module.computations.items()
    }
    return replace(module, computations=computations)


def _reached(module: hlo.Module) -> set[_Value]:
    """Return the values that are in the host's memory."""
    equal, seeds = dict[_Value, list[_Value]](), list[_Value]()
    for name, body in module.computations.items():
        for i in body:
            seeds += [(name, i.name, None)] if copied(i) == TO_HOST else []
            for one, other, both in _links(module, name, i):
                equal.setdefault(one, []).append(other)
                if both:
                    equal.setdefault(other, []).append(one)
    host = set[_Value]()
    while seeds:
        if (value := seeds.pop()) not in host:
            host.add(value)
            seeds += equal.get(value, [])
    return host


def _links(
    module: hlo.Module, name: str, i: hlo.Instruction
) -> Iterator[tuple[_Value, _Value, bool]]:
    """Yield pairs of values: the second is where the first is; with True the reverse too."""
    here = name, i.name, None
    read = [operand.partition("#")[0] for operand in i.operands]
    if i.opcode in _SAME:
        yield (name, read[0], None), here, False
    elif i.opcode == "dynamic-update-slice":
        yield (name, read[0], None), here, True
        yield (name, read[1], None), here, False
    elif i.opcode == "get-tuple-element":
        yield (name, read[0], int(i.attribute("index"))), here, True
    elif i.opcode == "tuple":
        for n, operand in enumerate(read):
            yield (name, operand, None), (name, i.name, n), False
    elif i.opcode in ("while", "opt-barrier") and i.shape.startswith("("):
        for n in range(len(hlo.tuple_shapes(i.shape))):
            yield (name, read[0], n), (name, i.name, n), True
            if i.opcode == "while":
                for called in i.called:
                    for inside in module.body(called):
                        if inside.is_root or inside.opcode == "parameter":
                            yield (called, inside.name, n), (name, i.name, n), True
    elif i.opcode == "opt-barrier":
        yield (name, read[0], None), here, False


def _placed(
    name: str, body: Iterable[hlo.Instruction], host: set[_Value]
) -> Iterator[hlo.Instruction]:
    """Yield a computation's instructions, with the memory of their results in their layouts."""
    made = dict[str, hlo.Instruction]()
    for i in body:
        made[i.name] = i
        if i.opcode == "tuple":
            allocated = {
                n: f"{i.operands[n]}.host"
                for n in range(len(i.operands))
                if (name, i.name, n) in host and (name, i.operands[n], None) not in host
            }
            for n, own in allocated.items():
                shape = _in_host(made[i.operands[n]].shape)
                yield hlo.Instruction(own, shape, "constant", (), f"  %{own} = {shape} constant()")
            i = replace(i, operands=tuple(_renamed(i.operands, allocated)))
        if i.shape.startswith("("):
            parts = hlo.tuple_shapes(i.shape)
            here = [n for n in range(len(parts)) if (name, i.name, n) in host]
            if here:
                parts = [_in_host(p) if n in here else p for n, p in enumerate(parts)]
                i = replace(i, shape=f"({', '.join(parts)})")
        elif (name, i.name, None) in host:
            i = replace(i, shape=_in_host(i.shape))
        yield i


def _renamed(operands: Iterable[str], names: Mapping[int, str]) -> Iterator[str]:
    return (names.get(n, operand) for n, operand in enumerate(operands))


def _in_host(shape: str) -> str:
    """Return the shape of an array with the host's memory in its layout."""
    if HOST_SPACE in shape:
        return shape
    if "{" not in shape:
        return f"{shape}{{:{HOST_SPACE}}}"
    return re.sub(r"\}", f"{HOST_SPACE if ':' in shape else ':' + HOST_SPACE}}}", shape, count=1)
