"""Find the collectives next to a step's matmuls in its partitioned module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxoverlap.plan.collectives import OPCODES, PERMUTE
from jaxoverlap.simulation import hlo
from jaxoverlap.simulation.device_groups import parties

TAG = "jaxoverlap_site"
TURNED = " turned"  # follows the number where XLA computes the transpose of the result
TAGGED = re.compile(rf'{TAG}="(\d+)(?:{TURNED})?"')
BESIDE = ("reshape", "bitcast", "transpose", "convert", "copy", "add", "add-any")
# Where devices' parts of a value are moved or cut, and the kernels that the CPU makes of that.
_MOVES = (*BESIDE, *OPCODES, "dynamic-slice", "slice", "concatenate", "fusion")

Place = tuple[str, str]
"""A computation and an instruction in it."""


def collectives_of_sites(
    module: hlo.Module, between: Collection[str] = BESIDE
) -> dict[int, set[Place]]:
    """Find the collectives next to each matmul of a step, by the matmul's id.

    A matmul that XLA has joined with another is missing.

    Args:
        module: the partitioned one.
        between: opcodes that may be between the two: views, converts and sums.
    """
    collectives: dict[int, set[Place]] = {}
    for name, body in module.computations.items():
        read, users = hlo.operands(body), hlo.users(body)
        for i in body:
            tag = TAGGED.search(i.line) if i.opcode == "dot" else None
            if tag is None:
                continue
            beside = {(name, c.name) for way in (read, users) for c in _beside(i, way, between)}
            collectives.setdefault(int(tag.group(1)), set()).update(beside)
    return collectives


def behind_conversions(module: hlo.Module) -> dict[int, str]:
    """Find the matmuls that wait for a collective only through a conversion to another dtype.

    Args:
        module: the partitioned one.

    Returns:
        The opcode of a collective by the matmul's id.
    """
    direct = collectives_of_sites(module, [opcode for opcode in BESIDE if opcode != "convert"])
    opcodes = {(name, i.name): i.opcode for name, body in module.computations.items() for i in body}
    return {
        site: min(opcodes[place] for place in places)
        for site, places in collectives_of_sites(module).items()
        if places and not direct[site]
    }


def repeated_gathers(module: hlo.Module) -> set[Place]:
    """Find the gathers that move what another one of their computation moves too.

    The partitioner writes the same groups of devices in two ways, as it comes from one matmul or
    the other; XLA compares the writing, and runs both.

    Args:
        module: the partitioned one.
    """
    alike: dict[tuple[Any, ...], list[Place]] = {}
    for name, body in module.computations.items():
        for i in body:
            if i.opcode == "all-gather" and len(i.operands) == 1:
                groups = parties(i.attribute("replica_groups"), module.num_devices)
                key = name, i.operands, i.attribute("dimensions"), i.shape.partition("{")[0], groups
                alike.setdefault(key, []).append((name, i.name))
    return {place for places in alike.values() if len(places) > 1 for place in places}


def permuted_matmuls(module: hlo.Module) -> Iterator[str]:
    """Yield the matmuls whose operands or result the partitioner sends by a permute.

    XLA permutes a dim sharded over two mesh axes so that the other axis comes first, and then may
    leave the product where it is, which is wrong (docs/upstream.md).
    """
    with_matmul = {n for n, b in module.computations.items() if any(i.opcode == "dot" for i in b)}
    for body in module.computations.values():
        ways = hlo.operands(body), hlo.users(body)
        for i in body:
            if i.opcode == "dot" or (i.opcode == "fusion" and not with_matmul.isdisjoint(i.called)):
                near = (c for way in ways for c in _beside(i, way, _MOVES))
                if any(c.opcode.startswith(PERMUTE) for c in near):
                    yield i.name


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
