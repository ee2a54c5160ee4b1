"""Read the text of a scheduled HLO module: computations, instructions in order, source lines.

It reads only what the audit needs. Computations start in column 0 (braces do not nest reliably in
the text), an instruction is one line, and its position in the text is that in the schedule.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxoverlap.cost.kernels import array_bytes
from jaxoverlap.simulation.branch_shares import share_of

CONTROL_FLOW = ("while", "call", "conditional")  # the opcodes that run other computations
_NAMES = re.compile(r"%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(|\{)")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_CALLING = ("calls=", "to_apply=", "body=", "computation")  # one is in every line that calls
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_TRIPS = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)"?\}')
_ARRAY = re.compile(r"(\w+?)\[([\d,<=]*)\]")
_LAYOUT = re.compile(r"\]\{([\d,]+)[:}]")
_DONATED = re.compile(r"\{(\d*)\}: \(\d+, \{\}, \w+-alias\)")
_CUT = "it seems to be truncated; give the full text"
_COLLECTIVE_KERNEL = '"kind":"__triton_collective"'
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_BRACKETS = re.compile(r"[({\[]")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    """An instruction: one line of a computation.

    Attributes:
        name: without the percent sign.
        shape: the result's shape, as text.
        opcode: as HLO writes it, as in "collective-permute-start".
        operands: names of the operands.
        line: the full line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def is_root(self) -> bool:
        """Return whether the instruction is its computation's root."""
        return self.line.startswith("  ROOT ")

    @property
    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that the instruction calls."""
        if not any(word in self.line for word in _CALLING):
            return ()
        names = _CALLED.findall(self.line)
        for group in _CALLED_LIST.findall(self.line):
            names += re.findall(r"%?([\w.\-]+)", group)
        return tuple(names)

    @property
    def op_name(self) -> str:
        """Return the name path of the instruction's JAX operation; empty if unknown."""
        match = _OP_NAME.search(self.line)
        return match.group(1).replace("\\'", "'") if match else ""

    @property
    def trip_count(self) -> int | None:
        """Return the trip count of a while loop; None if XLA does not know it."""
        match = _TRIPS.search(self.line)
        return int(match.group(1)) if match else None

    @property
    def share(self) -> float | None:
        """Return the share of a conditional's runs that take its slowest branch, if it is known."""
        return share_of(self.op_name) if self.opcode == "conditional" else None

    @property
    def control(self) -> list[str]:
        """Return the names of the instruction's control predecessors."""
        return _NAMES.findall(self.attribute("control-predecessors").strip("{}"))

    def attribute(self, name: str) -> str:
        """Return an attribute's text up to the next top-level comma; empty if there is none."""
        start = self.line.find(f", {name}=")
        return _until_comma(self.line[start + len(name) + 3 :]) if start >= 0 else ""


@dataclass(frozen=True)
class Module:
    """A scheduled module.

    Attributes:
        name: as in "jit_train_step".
        entry: the name of the entry computation.
        num_devices: devices that it runs on.
        computations: instructions by computation, in schedule order.
        frames: "folder/file.py:line" by stack frame id.
        donated: results, by number, that are in the memory of an argument.
        multi_streaming: whether XLA's options set two communication streams, used in turns; the
            text does not say.
    """

    name: str
    entry: str
    num_devices: int
    computations: Mapping[str, tuple[Instruction, ...]]
    frames: Mapping[int, str]
    donated: frozenset[int] = frozenset()
    multi_streaming: bool = False

    def body(self, computation: str) -> tuple[Instruction, ...]:
        """Return the instructions of a computation, in schedule order.

        Raises:
            ValueError: if the module's text lacks it.
        """
        if computation not in self.computations:
            raise ValueError(f"{self.name} calls {computation}, which its text lacks: {_CUT}")
        return self.computations[computation]

    def source(self, instruction: Instruction) -> str:
        """Return an instruction's source line as "folder/file.py:line"; empty if unknown."""
        if match := _FRAME.search(instruction.line):
            return self.frames.get(int(match.group(1)), "")
        if match := _SOURCE.search(instruction.line):
            return f"{_short(match.group(1))}:{match.group(2) or 0}"
        return ""


def users(body: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """Map each value's name to the instructions of a body that read it, each once."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in body:
        for name in dict.fromkeys(o.partition("#")[0] for o in instruction.operands):
            users[name].append(instruction)
    return users


def operands(body: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """Map each instruction's name to the instructions of a body that it reads."""
    made = {i.name: i for i in body}
    return {i.name: [made[o.partition("#")[0]] for o in i.operands] for i in body}


def parse(text: str) -> Module:
    """Parse the text of a scheduled HLO module.

    Raises:
        ValueError: if it is not the text of a complete HLO module, or the module is not scheduled.
    """
    head = text.split("\n", 1)[0]
    if not head.startswith("HloModule "):
        raise ValueError(
            f"expected the text of an HLO module, which starts with 'HloModule'; got {head[:60]!r}"
        )
    if "is_scheduled=true" not in head:
        raise ValueError(
            f"{head.split(',')[0]} is not scheduled: its text does not say what overlaps with "
            "what. Give the text of a compiled executable"
        )
    return _parsed(text)


def parse_partitioned(text: str, num_devices: int) -> Module:
    """Parse the text of a module that XLA has partitioned but not scheduled.

    The order of its instructions says what needs what, and nothing about time. A while whose
    condition counts up to a constant has its trips written in, as a scheduled module's has.

    Args:
        text: the module's.
        num_devices: devices that it is for, which the text does not say.

    Raises:
        ValueError: if it is not the text of a complete HLO module.
    """
    module = replace(_parsed(text), num_devices=num_devices)
    counted = {
        name: tuple(_counted(module, name, i) if i.opcode == "while" else i for i in body)
        for name, body in module.computations.items()
    }
    return replace(module, computations=counted)


def _counted(module: Module, computation: str, loop: Instruction) -> Instruction:
    """Return a while loop with its trip count, if it counts from 0 to a constant."""
    trips = loop.trip_count or _trips(module, computation, loop)
    if trips is None or loop.trip_count:
        return loop
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return replace(loop, line=loop.line + known)


def _trips(module: Module, computation: str, loop: Instruction) -> int | None:
    condition = {i.name: i for i in module.body(loop.attribute("condition").lstrip("%"))}
    root = next(i for i in condition.values() if i.is_root)
    around = {i.name: i for i in module.body(computation)}
    if root.opcode != "compare" or "direction=LT" not in root.line:
        return None
    index, bound = (condition[name] for name in root.operands)
    position = re.search(r"index=(\d+)", index.line)
    limit = re.search(r"constant\((\d+)\)", bound.line)
    initial = around.get(loop.operands[0])
    if not (position and limit and initial and initial.opcode == "tuple"):
        return None
    first = around[initial.operands[int(position.group(1))]]
    while first.opcode in ("copy", "bitcast", "convert"):
        first = around[first.operands[0]]
    return int(limit.group(1)) if "constant(0)" in first.line else None


def _parsed(text: str) -> Module:
    head = text.split("\n", 1)[0]
    computations: dict[str, list[Instruction]] = {}
    entry, body, closed = "", [], True
    for line in text.splitlines():
        if line.startswith("  ") and (match := _INSTRUCTION.match(line)):
            body.append(_instruction(match.group(1), match.group(2), line))
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            body, closed = computations.setdefault(match.group(2), []), False
            entry = match.group(2) if match.group(1) else entry
        elif line.startswith("}"):
            closed = True
    name = head.split()[1].rstrip(",")
    if not entry or not closed:
        raise ValueError(f"the text of {name} has no end, or no entry computation: {_CUT}")
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
    if _COLLECTIVE_KERNEL in text:
        computations = {key: _unfused(value, computations) for key, value in computations.items()}
    frozen = {key: tuple(value) for key, value in computations.items()}
    donated = frozenset(int(result or 0) for result in _DONATED.findall(head))
    return Module(name, entry, math.prod(map(int, counts)), frozen, _frames(text), donated)


def _unfused(
    body: list[Instruction], computations: Mapping[str, list[Instruction]]
) -> list[Instruction]:
    """Return a body with the collectives that XLA put into kernels of its own as collectives.

    A small all-reduce is a fusion that holds nothing else, and may be asynchronous. Its seconds are
    then those of NCCL: no such kernel was measured.
    """
    found: dict[str, Instruction] = {}  # by the name of the fusion or its start
    for outer in body:
        if _COLLECTIVE_KERNEL in outer.line:
            inside = (i for name in outer.called for i in computations.get(name, ()) if i.is_root)
            if inner := found.get(outer.operands[0]) or next(inside, None):
                found[outer.name] = inner
    return [_as_collective(i, found[i.name]) if i.name in found else i for i in body]


def _as_collective(fusion: Instruction, inner: Instruction) -> Instruction:
    """Return a fusion, its start or its done, as the collective that it holds."""
    opcode = inner.opcode + fusion.opcode.removeprefix("fusion")
    head = fusion.line.partition(f" {fusion.opcode}(")[0]
    attributes = inner.line.partition(f" {inner.opcode}(")[2].partition(")")[2]
    if control := fusion.attribute("control-predecessors"):
        attributes += f", control-predecessors={control}"
    line = f"{head} {opcode}({', '.join(fusion.operands)}){attributes}"
    return replace(fusion, opcode=opcode, line=line)


def _instruction(name: str, rest: str, line: str) -> Instruction:
    shape, rest = _split_shape(rest)
    opcode, _, arguments = rest.partition("(")
    operands = () if opcode in ("parameter", "constant") else _operands(arguments)
    return Instruction(name, shape, opcode, operands, line)


def _split_shape(rest: str) -> tuple[str, str]:
    """Split a line after its result's shape; a tuple's shape contains spaces."""
    if not rest.startswith("("):
        shape, _, after = rest.partition(" ")
        return shape, after
    end = _closing(rest)
    return rest[: end + 1], rest[end + 2 :]


def _closing(text: str) -> int:
    """Return the index of the parenthesis that closes the one at the start of `text`."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in the module's text: {text[:60]!r}")


def _operands(arguments: str) -> tuple[str, ...]:
    """Return the operands' names, without the shapes and % signs that may precede them."""
    plain, closed, _ = arguments.partition(")")
    plain = _COMMENT.sub("", plain)
    if closed and not _BRACKETS.search(plain):  # names alone, as XLA prints them: nothing nests
        return tuple(name.strip().lstrip("%") for name in plain.split(",") if name)
    rest = _COMMENT.sub("", arguments[: _closing("(" + arguments) - 1])
    named = (argument.split()[-1:] for argument in _split(rest))
    return tuple(name.lstrip("%") for names in named for name in names)


def _split(text: str) -> Iterator[str]:
    """Yield the parts of a text between its top-level commas."""
    while text:
        part = _until_comma(text)
        text = text[len(part) + 1 :]
        yield part


def _until_comma(text: str) -> str:
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            return text[:position]
    return text


@functools.lru_cache(maxsize=65536)
def shape_bytes(shape: str) -> int:
    """Return the bytes of all arrays in a shape's text."""
    arrays = ((array.partition("[")[0], dims(array)) for array in array_shapes(shape))
    return sum(array_bytes(dtype, math.prod(sizes)) for dtype, sizes in arrays)


def tuple_shapes(shape: str) -> tuple[str, ...]:
    """Return the elements of a tuple's shape as texts; a nested tuple is one element."""
    return tuple(part.strip() for part in _split(_COMMENT.sub("", shape)[1:-1]))


@functools.lru_cache(maxsize=65536)
def array_shapes(shape: str) -> tuple[str, ...]:
    """Return the arrays of a shape's text without layouts: ("bf16[8,128]", ...)."""
    return tuple(f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(shape))


@functools.lru_cache(maxsize=65536)
def dims(array: str) -> tuple[int, ...]:
    """Return the dims of one array's text: (8, 128) for "bf16[8,128]"."""
    inside = array.partition("[")[2].partition("]")[0]
    return tuple(int(dim.lstrip("<=")) for dim in inside.split(",") if dim)


@functools.lru_cache(maxsize=65536)
def fastest_dim(shape: str) -> int | None:
    """Return the minor-most dim of an array, ignoring dims of size 1.

    The last, where the text has no layout; None if no dim is longer than one.
    """
    sizes = dims(shape)
    layout = _LAYOUT.search(shape)
    order = [int(d) for d in layout.group(1).split(",")] if layout else range(len(sizes))[::-1]
    return next((d for d in order if sizes[d] > 1), None)


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _frames(text: str) -> dict[int, str]:
    """Return the stack frames at the head of a module, as "folder/file.py:line" by id."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current = None
    for line in text.splitlines()[1:]:
        if line in _TABLES:
            current = tables[line]
        elif current is not None and line and line[0].isdigit():
            number, _, value = line.partition(" ")
            current[int(number)] = value
        elif line:
            break
    files = {k: v.strip('"') for k, v in tables["FileNames"].items()}

    def field(text: str, name: str) -> int:
        match = re.search(rf"\b{name}=(\d+)", text)
        return int(match.group(1)) if match else 0

    locations = {
        k: f"{_short(files.get(field(v, 'file_name_id'), ''))}:{field(v, 'line')}"
        for k, v in tables["FileLocations"].items()
    }
    return {
        k: locations.get(field(v, "file_location_id"), "") for k, v in tables["StackFrames"].items()
    }
