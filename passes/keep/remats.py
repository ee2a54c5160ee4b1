"""Find the remats of a step, and which of what they compute again is there already.

A value that a remat computes again has the number (`numbers.py`) of the value that was computed
first: in the remat's own body, before it; around the scan whose body that is; or in an earlier scan
of as many steps beside that one, which can stack it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxoverlap.passes.keep.numbers import Numbers, Scope, is_remat


class Source(NamedTuple):
    """Where a value is computed first.

    Attributes:
        var: the value.
        around: whether it is computed around the scan that the remat is in.
        scan: the scan that computes it in each step; None where no scan does.
    """

    var: Any
    around: bool = False
    scan: Any = None


@dataclass(frozen=True)
class Remat:
    """A remat of a step.

    Attributes:
        number: which it is, in the order of the walk.
        eqn: the equation.
        inside: its body.
        scope: the body that it is in.
        earlier: the bodies of the scans that may stack what it computes again.
    """

    number: int
    eqn: Any
    inside: Scope
    scope: Scope
    earlier: tuple[Scope, ...]

    @property
    def body(self) -> Any:
        """The jaxpr that it runs."""
        return self.inside.jaxpr

    @property
    def runs(self) -> int:
        """How many copies of its values are saved: the steps of the scan that it is in."""
        return self.scope.scan.params["length"] if self.scope.scan is not None else 1

    @functools.cached_property
    def sources(self) -> Mapping[Any, Source]:
        """The values that it computes again, and where each was computed first."""
        given = {self.inside.numbers[v] for v in self.body.invars}
        first = self._first
        return {
            var: first[number]
            for eqn in self.body.eqns
            for var in eqn.outvars
            if (number := self.inside.numbers[var]) in first and number not in given
        }

    @functools.cached_property
    def _first(self) -> dict[int, Source]:
        known = dict[int, Source]()

        def learn(scope: Scope, until: int | None, **where: Any) -> None:
            eqns = scope.jaxpr.eqns[:until]
            for var in (*scope.jaxpr.invars, *(v for eqn in eqns for v in eqn.outvars)):
                known.setdefault(scope.numbers[var], Source(var, **where))

        learn(self.scope, self.inside.position)
        if self.scope.scan is not None and self.scope.outer is not None:
            learn(self.scope.outer, self.scope.position, around=True)
            for one in self.earlier:
                learn(one, None, scan=one.scan)
        return known


def remats_of(jaxpr: Any) -> list[Remat]:
    """Find the remats of an opened step (`opened.py`), outer ones first."""
    scopes = list(Numbers().scopes(jaxpr))
    return [
        Remat(number, eqn, inside, outer, tuple(_earlier(outer, scopes)))
        for number, (eqn, inside, outer) in enumerate(_remats(scopes))
    ]


def _remats(scopes: list[Scope]) -> Iterator[tuple[Any, Scope, Scope]]:
    for inside in scopes:
        if inside.outer is not None and inside.scan is None:
            eqn = inside.outer.jaxpr.eqns[inside.position]
            if is_remat(eqn):
                yield eqn, inside, inside.outer


def _earlier(scope: Scope, scopes: list[Scope]) -> Iterator[Scope]:
    """Yield the bodies of the scans that stand before the one whose body this is."""
    if scope.scan is None:
        return
    length = scope.scan.params["length"]
    for one in scopes:
        beside = one.outer is scope.outer and one.position < scope.position
        if beside and one.scan is not None and one.scan.params["length"] == length:
            yield one
