"""Find the matmuls that could overlap with a collective: no dependency either way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.planning.ring_plan import Ring


class IndependentMatmuls:
    """The matmuls of one body, by what they feed and what they wait for.

    Sets of matmuls are integers, a bit a matmul, so that the sets of all values take one walk over
    the body each way.
    """

    def __init__(self, body: Body):
        self._dots = body.dots
        bits = {id(dot.eqn): 1 << i for i, dot in enumerate(body.dots)}
        self._feeding: dict[Any, int] = {}  # by value: what it is made from
        for eqn in body.eqns:
            made = bits.get(id(eqn), 0) | _union(self._feeding, _read(eqn))
            self._feeding.update(dict.fromkeys(eqn.outvars, made))
        self._following: dict[Any, int] = {}  # by value: what is made from it
        for eqn in reversed(body.eqns):
            after = bits.get(id(eqn), 0) | _union(self._following, eqn.outvars)
            for v in _read(eqn):
                self._following[v] = self._following.get(v, 0) | after
        self._bits = bits

    def of(self, ring: Ring) -> Iterator[Dot]:
        """Yield the matmuls that a ring's collective, in one piece, could hide behind, in order.

        A value that is gathered waits for what makes it, not for the matmuls' other operands.
        """
        mine = [m.dot.eqn for m in ring.members]
        moved = [ring.shard.var] if ring.arrives else [v for eqn in mine for v in _read(eqn)]
        related = _union(self._feeding, moved)
        for eqn in mine:
            related |= self._bits[id(eqn)] | _union(self._following, eqn.outvars)
        left = (1 << len(self._dots)) - 1 & ~related
        while left:
            lowest = left & -left
            yield self._dots[lowest.bit_length() - 1]
            left ^= lowest


def _union(sets: Mapping[Any, int], values: Iterable[Any]) -> int:
    union = 0
    for v in values:
        union |= sets.get(v, 0)
    return union


def _read(eqn: Any) -> list[Any]:
    return list(compat.variables(eqn.invars))
