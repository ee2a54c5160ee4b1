"""Find the collectives beside a step's matmuls in its partitioned module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from jaxoverlap.plan.collectives import OPCODES
from jaxoverlap.simulation import hlo

TAG = "jaxoverlap_site"
TURNED = " turned"  # follows the number where XLA computes the transpose of the result
TAGGED = re.compile(rf'{TAG}="(\d+)(?:{TURNED})?"')
BESIDE = ("reshape", "bitcast", "transpose", "convert", "copy", "add", "add-any")

Place = tuple[str, str]
"""A computation and an instruction in it."""


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
