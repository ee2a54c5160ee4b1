"""Which matmuls of a body a collective could run beside: what neither feeds it nor waits for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from jaxoverlap import _compat
from jaxoverlap.passes.jaxprs import Body, Dot
from jaxoverlap.passes.rings import Ring


def beside(body: Body, ring: Ring) -> list[Dot]:
    """The matmuls of a body that a ring's collective, in one piece, could hide behind.

    A value that is gathered waits for what makes it, not for the matmuls' other operands.
    """
    mine = [m.dot.eqn for m in ring.members]
    moved = [ring.shard.var] if ring.arrives else [v for eqn in mine for v in _read(eqn)]
    related = {*_feeding(body, moved), *_following(body, mine)}
    return [dot for dot in body.dots if id(dot.eqn) not in related]


def _feeding(body: Body, values: Iterable[Any]) -> set[int]:
    """The equations that values are made by, by their identity."""
    wanted, found = {*values}, set[int]()
    for eqn in reversed(body.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.add(id(eqn))
            wanted.update(_read(eqn))
    return found


def _following(body: Body, eqns: Collection[Any]) -> set[int]:
    """These equations and all that read what they give."""
    found = {id(eqn) for eqn in eqns}
    given = {v for eqn in eqns for v in eqn.outvars}
    for eqn in body.eqns:
        if not given.isdisjoint(_read(eqn)):
            found.add(id(eqn))
            given.update(eqn.outvars)
    return found


def _read(eqn: Any) -> list[Any]:
    return [a for a in eqn.invars if not _compat.is_literal(a)]
