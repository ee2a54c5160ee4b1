"""Find the buffers that the instructions of a scheduled computation make and hold.

A model of XLA's buffer assignment, good enough to compare two orders of one computation: a value
that must or does alias its operand's memory (a bitcast, a tuple, a loop's carry, an update in
place) makes no buffer, and what the computation is given, and constants, are not counted. Nor are
a step's results that alias donated arguments. A buffer in the host's memory has no
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.hlo_work import HOST_SPACE

# A value is a buffer's number, a tuple of values, or None if it lies outside the computation.
Value = int | tuple["Value", ...] | None

_SAME = ("bitcast", "opt-barrier", "while", "copy-done", "all-reduce-done", "reshape")
_OUTSIDE = ("parameter", "constant")
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
        return self._add(0 if HOST_SPACE in shape else hlo.shape_bytes(shape))

    def copy(self, value: Value) -> Value:
        """Make new buffers of a value's sizes."""
        if isinstance(value, tuple):
            return tuple(map(self.copy, value))
        return None if value is None else self._add(self.bytes[value])

    def _add(self, size: int) -> int:
        self.bytes.append(size)
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
    carried: set[str] = set()  # the values in whose memory a loop's result lies
    tuples = {i.name: i.operands for i in module.body(computation) if i.opcode == "tuple"}
    for instruction in module.body(computation):
        operands = [own_buffers.values.get(name) for name in instruction.operands]
        if instruction.opcode == "while" and (starts := tuples.get(instruction.operands[0])):
            changed = _changed(module, instruction, len(starts))
            operands = [_carry(starts, changed, own_buffers, carried)]
        own_buffers.values[instruction.name] = _value(
            module, instruction, operands, own_buffers.make
        )
    if computation == module.entry:
        results = own_buffers.values[root(module, computation).name]
        for number in module.donated:
            for buffer in leaves(results[number] if isinstance(results, tuple) else results):
                own_buffers.bytes[buffer] = 0
    return own_buffers


def _carry(
    starts: Sequence[str], changed: Sequence[bool], own_buffers: Buffers, carried: set[str]
) -> Value:
    """Return what a loop carries: a value that it changes is copied where others need it as it was.

    Args:
        starts: the names of the values that it starts with.
        changed: which of them it changes.
        own_buffers: the buffers of the computation; those of copies are added.
        carried: the names of values that loops have changed; those of this one are added.
    """
    kept = {name for name, changes in zip(starts, changed, strict=True) if not changes}

    def element(name: str, changes: bool) -> Value:
        value = own_buffers.values.get(name)
        if changes and (name in carried or name in kept):
            return own_buffers.copy(value)
        if changes:
            carried.add(name)
        return value

    return tuple(map(element, starts, changed))


def _changed(module: hlo.Module, loop: hlo.Instruction, size: int) -> list[bool]:
    """Tell for each element of a loop's carry whether the loop's body changes it."""
    body = loop.attribute("body").lstrip("%")
    inside = {i.name: i for i in module.body(body)}
    ends = root(module, body)
    if ends.opcode != "tuple":
        return [True] * size

    def is_given(end: hlo.Instruction, number: int) -> bool:
        element = end.opcode == "get-tuple-element" and end.attribute("index") == str(number)
        return element and inside[end.operands[0]].opcode == "parameter"

    return [not is_given(inside[name], number) for number, name in enumerate(ends.operands)]


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
        return _element(operands[0], int(instruction.attribute("index")))
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
    if (position := _in_place(module, instruction)) is not None:
        return operands[position]
    return make(instruction.shape)


def _element(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) else None


def _in_place(module: hlo.Module, instruction: hlo.Instruction) -> int | None:
    """Return the number of the operand whose memory the result must alias, or None."""
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
