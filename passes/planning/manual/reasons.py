"""Find the reasons why matmuls in manual code are not rewritten."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxoverlap.passes.analysis.einsum import SIDES
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.manual.candidates import BodyCollectives, is_chunkwise, is_sum
from jaxoverlap.passes.planning.matmuls import matmul_of, refusal
from jaxoverlap.passes.planning.ring_plan import Member, Ring
from jaxoverlap.passes.planning.splits import Refusal, ShardedMatmul
from jaxoverlap.passes.planning.terms import Requests
from jaxoverlap.plan.collectives import RINGED, Kind
from jaxoverlap.plan.decisions import Reason

_BEFORE: tuple[Kind, ...] = ("all_gather", "all_to_all")
_AFTER: tuple[Kind, ...] = ("reduce_scatter", "all_reduce", "all_to_all")


def refusal_of(dot: Dot, requests: Requests) -> Reason | None:
    """Return why a matmul is skipped whatever its collective; None if it need not be."""
    assert dot.manual is not None
    if dot.manual.explicit:
        axes = ", ".join(dot.manual.explicit)
        return _no_ring(f"mesh axis {axes} is explicit next to the manual ones")
    return refusal(dataclasses.replace(dot, inside=None), requests)


def crossed(member: Member, shardings: Mapping[int, Shardings]) -> Reason | None:
    """Return why a shard_map's automatic axes forbid a matmul's ring, or None."""
    matmul = sharded_by_xla(member.dot, shardings)
    if matmul is None or isinstance(matmul, Reason):
        return matmul
    moved = [s.axis for s in matmul.splits if isinstance(s, Refusal) or s.collective]
    if moved:
        return _no_ring(f"XLA moves it along {', '.join(moved)} too, and would do so once a chunk")
    layout = member.ring_layout
    moving = {layout.letter, layout.collective.letter, layout.collective.to}
    for side in SIDES:
        for letter, axes in zip(matmul.einsum.side(side), matmul.spec(side), strict=True):
            if letter in moving and axes:
                return _no_ring(
                    f"dim {letter} moves, and automatic axis {', '.join(axes)} shards it"
                )
    return None


def sharded_by_xla(dot: Dot, shardings: Mapping[int, Shardings]) -> ShardedMatmul | Reason | None:
    """Return a matmul sharded on automatic axes, or why it is unknown; None without such axes."""
    sizes = dot.manual.automatic if dot.manual else {}
    if not sizes:
        return None
    if dot.index not in shardings:
        return _no_ring("its sharding on the automatic axes is not known")
    # Drop the manual axes: shardings of a shard_map's operands name them, but they are cut already.
    lhs, rhs, out = (
        spec and tuple(tuple(a for a in axes if a in sizes) for axes in spec)
        for spec in shardings[dot.index][:3]
    )
    return matmul_of(dot, Shardings(lhs, rhs, out), sizes)


def spread(member: Member, shardings: Mapping[int, Shardings]) -> int:
    """Count the devices of automatic axes over which the moving value is spread."""
    matmul = sharded_by_xla(member.dot, shardings)
    if matmul is None or isinstance(matmul, Reason):
        return 1
    moving = matmul.spec(member.ring_layout.collective.side)
    return math.prod(matmul.axis_sizes[a] for axes in moving for a in axes)


def why_not(found: BodyCollectives, dot: Dot, rings: Sequence[Ring]) -> Reason:
    """Return why a matmul is in none of the rings."""
    done = {ring.written.position: ring.site for ring in rings if ring.written}
    lhs, rhs = dot.eqn.invars
    reasons = [
        _above(found, lhs, done),
        _above(found, rhs, done),
        _below(found, dot.eqn.outvars[0], done),
    ]
    whys = dict.fromkeys(why for why in reasons if why)
    waiting = [why.detail for why in whys if why.code != "no collective"]
    if waiting:
        return _no_ring("; ".join(waiting))
    idle = [why.detail for why in whys] or ["none next to it inside shard_map"]
    return Reason("no collective", "; ".join(idle))


def _above(found: BodyCollectives, var: Any, done: Mapping[int, int]) -> Reason | None:
    """Return why the collective that an operand comes from has no ring; None without one."""
    through = ""
    while (eqn := found.uses.maker(var)) is not None:
        position = found.uses.made[var]
        collective = found.collectives.get(position)
        if collective is not None:
            if RINGED.get(eqn.primitive.name, _BEFORE[0]) not in _BEFORE:
                return None  # a sum that it waits for
            if position in done:
                return _done(done[position], eqn.primitive.name)
            what = f"reads the result of {eqn.primitive.name}"
            return collective if isinstance(collective, Reason) else _not_decomposed(what, through)
        if not is_chunkwise(eqn):
            if through or len(eqn.invars) != 1:
                return None
            through = eqn.primitive.name
        var = eqn.invars[0]
    return None


def _below(found: BodyCollectives, var: Any, done: Mapping[int, int]) -> Reason | None:
    """Return why the collective that a result reaches has no ring; None without one."""
    through = ""
    while readers := [position for position in found.uses.readers(var) if position is not None]:
        for position in readers:
            collective, name = found.collectives.get(position), found.eqns[position].primitive.name
            if collective is not None:
                if isinstance(collective, Reason):
                    return collective
                if position in done:
                    return _done(done[position], name)
                if len(found.uses.readers(var)) > 1:
                    return _no_ring(f"its result is read by {name} and by others")
                if collective.kind == "all_reduce" and collective.dim_of_sum is None:
                    shape = collective.eqn.invars[0].aval.shape
                    n = collective.axis_size
                    return _no_ring(f"no dim of the result {shape} divides into {n} chunks")
                known = collective.kind in _AFTER
                return _not_decomposed(f"its result is read by {name}", through if known else "")
        eqn = found.eqns[readers[0]]
        opaque = len(eqn.outvars) != 1 or readers[0] in found.dots
        if len(readers) > 1 or opaque or (through and not is_chunkwise(eqn) and not is_sum(eqn)):
            return None
        through = through if is_chunkwise(eqn) else eqn.primitive.name
        var = eqn.outvars[0]
    return None


def _no_ring(detail: str) -> Reason:
    return Reason("no ring", detail)


def _done(ring: int, name: str) -> Reason:
    return Reason("no collective", f"ring {ring} does its {name}")


def _not_decomposed(what: str, through: str) -> Reason:
    """Return why a matmul has no ring although rings can decompose its kind of collective."""
    if through in ("add", "add_any"):
        return _no_ring(f"{what} in a sum with something else")
    how = f" through {through}" if through else ", in a way that no ring does"
    return _no_ring(what + how)
