"""Find the buffers that the instructions of a scheduled computation make and hold.

A model of XLA's buffer assignment, good enough to compare two orders of one computation: a value
that must or does lie in its operand's memory (a bitcast, a tuple, a loop's carry, an update in
place) makes no buffer, and what the computation is given, and constants, are not counted. Nor are
a step's results that lie in the memory of donated arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxoverlap.simulation import hlo

# A value is a buffer's number, a tuple of values, or None if it lies outside the computation.
Value = int | tuple["Value", ...] | None

_SAME = ("bitcast", "opt-barrier", "while", "copy-done", "all-reduce-done", "reshape")
_OUTSIDE = ("parameter", "constant")
_INDEX = re.compile(r", index=(\d+)")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{\{\}: \((\d+), \{\}\)")


@dataclass
class Buffers:
    """The buffers of a computation.

    Attributes:
        bytes: the size of each.
        values: the value of each instruction, by name.
    """

    bytes: list[int] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def held(self, instruction: hlo.Instruction) -> tuple[int, ...]:
        """Return the buffers that an instruction reads or writes."""
        names = (instruction.name, *instruction.operands)
        return tuple(dict.fromkeys(b for name in names for b in leaves(self.values.get(name))))

    def make(self, shape: str) -> Value:
        """Make new buffers for a value of a shape."""
        if shape.startswith("("):
            return tuple(self.make(part) for part in hlo.tuple_shapes(shape))
        self.bytes.append(hlo.shape_bytes(shape))
        return len(self.bytes) - 1


def leaves(value: Value) -> Iterator[int]:
    """Yield the buffers of a value."""
    if isinstance(value, int):
        yield value
    for part in value if isinstance(value, tuple) else ():
        yield from leaves(part)


def buffers(module: hlo.Module, computation: str) -> Buffers:
    """Find the buffers of a computation."""
    own_buffers = Buffers()
    for instruction in module.body(computation):
        operands = [own_buffers.values.get(name) for name in instruction.operands]
        own_buffers.values[instruction.name] = _value(
            module, instruction, operands, own_buffers.make
        )
    if computation == module.entry:
        results = own_buffers.values[root(module, computation).name]
        for number in module.donated:
            for buffer in leaves(results[number] if isinstance(results, tuple) else results):
                own_buffers.bytes[buffer] = 0
    return own_buffers


def root(module: hlo.Module, computation: str) -> hlo.Instruction:
    """Return the instruction whose value is the computation's."""
    return next(i for i in module.body(computation) if i.is_root)


def _value(
    module: hlo.Module,
    instruction: hlo.Instruction,
    operands: list[Value],
    make: Callable[[str], Value],
) -> Value:
    opcode = instruction.opcode
    if opcode in _OUTSIDE:
        return None
    if opcode in _SAME:
        return operands[0]
    if opcode == "tuple":
        return tuple(operands)
    if opcode == "get-tuple-element":
        index = _INDEX.search(instruction.line)
        assert index, instruction.line
        return _element(operands[0], int(index.group(1)))
    if opcode.endswith("-done"):
        return _element(operands[0], 1)
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        sent, *rest = hlo.tuple_shapes(instruction.shape)
        return (
            tuple(operands) if sent.startswith("(") else operands[0],
            *(make(part) for part in rest),
        )
    if opcode == "dynamic-update-slice":
        return operands[0]
    if (place := _in_place(module, instruction)) is not None:
        return operands[place]
    return make(instruction.shape)


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) else None


def _in_place(module: hlo.Module, instruction: hlo.Instruction) -> int | None:
    """Return the number of the operand in whose memory the result must lie, or None."""
    if aliased := _ALIASED.search(instruction.line):
        return int(aliased.group(1))
    if instruction.opcode != "fusion":
        return None
    inside = {i.name: i for called in instruction.called for i in module.body(called)}
    root = next(i for i in inside.values() if i.is_root)
    while root.opcode == "bitcast":
        root = inside[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    updated = inside[root.operands[0]]
    while updated.opcode == "bitcast":
        updated = inside[updated.operands[0]]
    number = re.search(r"parameter\((\d+)\)", updated.line)
    return int(number.group(1)) if number else None
