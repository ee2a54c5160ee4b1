"""Read what one device does from a partitioned module: its matmuls, and what is beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxoverlap.plan.collectives import OPCODES
from jaxoverlap.simulation import hlo

TAG = "jaxoverlap_site"
TAGGED = re.compile(TAG + r'="(\d+)"')
BESIDE = ("reshape", "bitcast", "transpose", "convert", "copy", "add", "add-any")

Place = tuple[str, str]
"""A computation and an instruction in it."""

_WORKING = re.compile(rf" = (.*?) (dot|{'|'.join(OPCODES)})\(")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z]|$)")
_DIMS = re.compile(r"\[([\d,]*)\]")


def work_of(text: str) -> Counter[Any]:
    """Return the matmuls and collectives of a partitioned module, by sizes and groups.

    Dims are sorted: a probe may keep XLA from turning a matmul around.
    """
    return Counter(
        (at[2], *_sorted_dims(at[1]), *_GROUPS.findall(line))
        for line in text.splitlines()
        if (at := _WORKING.search(line))
    )


def _sorted_dims(shape: str) -> list[tuple[str, ...]]:
    """Return the dims of an array, or of the arrays of a tuple."""
    return sorted(tuple(sorted(dims.split(","))) for dims in _DIMS.findall(shape))


def work_of_sites(text: str, num_devices: int) -> dict[int, Counter[Any]]:
    """Return the work of each matmul of a step, and of the collectives beside it, by its number."""
    module = hlo.parse_partitioned(text, num_devices)
    found: dict[int, Counter[Any]] = {}
    lines = {(name, i.name): i.line for name, body in module.computations.items() for i in body}
    for line in lines.values():
        if tag := TAGGED.search(line):
            found.setdefault(int(tag.group(1)), Counter()).update(work_of(line))
    for site, places in collectives_of_sites(module).items():
        for place in places:
            found.setdefault(site, Counter()).update(work_of(lines[place]))
    return found


def collectives_of_sites(
    module: hlo.Module, between: Collection[str] = BESIDE
) -> dict[int, set[Place]]:
    """Find the collectives that stand beside each matmul of a step, by its number.

    A matmul that XLA has joined with another is missing.

    Args:
        module: the partitioned one.
        between: opcodes that may stand between the two: views, converts and sums.
    """
    collectives: dict[int, set[Place]] = {}
    for name, body in module.computations.items():
        made = {i.name: i for i in body}
        users: dict[str, list[hlo.Instruction]] = {}
        for i in body:
            for operand in i.operands:
                users.setdefault(operand.partition("#")[0], []).append(i)
        read = {at.name: [made[o.partition("#")[0]] for o in at.operands] for at in body}
        for i in body:
            tag = TAGGED.search(i.line) if i.opcode == "dot" else None
            if tag is None:
                continue
            beside = {(name, c.name) for way in (read, users) for c in _beside(i, way, between)}
            collectives.setdefault(int(tag.group(1)), set()).update(beside)
    return collectives


def _beside(
    dot: hlo.Instruction, way: Mapping[str, list[hlo.Instruction]], between: Collection[str]
) -> Iterator[hlo.Instruction]:
    """Yield the collectives reached from a matmul in one direction, up to what computes."""
    seen, stack = set[str](), list(way.get(dot.name, ()))
    while stack:
        at = stack.pop()
        if at.name in seen:
            continue
        seen.add(at.name)
        if at.opcode in OPCODES:
            yield at
        if at.opcode in between:
            stack += way.get(at.name, ())
