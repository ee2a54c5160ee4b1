"""Count the scans of a step, and replace one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jaxoverlap._jax import compat


def scans_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the scans of a jaxpr, inner ones before those around them."""
    for eqn in jaxpr.eqns:
        for body in compat.jaxprs_in(eqn):
            yield from scans_of(body)
        if eqn.primitive.name == "scan":
            yield eqn


class ReplacedScan:
    """One walk over a step that replaces one scan by other equations.

    Attributes:
        count: the scans of the step, once `jaxpr` has returned.
    """

    def __init__(self, number: int, replacement: Callable[[Any], list[Any]]):
        """Make a walk.

        Args:
            number: which scan it replaces, counted as by `scans_of`.
            replacement: returns the equations for it.
        """
        self._number, self._replacement, self.count = number, replacement, 0

    def jaxpr(self, jaxpr: Any) -> Any:
        """Return a jaxpr with the scan replaced."""
        eqns: list[Any] = []
        for given in jaxpr.eqns:
            eqn = compat.map_jaxprs(self.jaxpr, given)
            made = [eqn]
            if eqn.primitive.name == "scan":
                made = self._replacement(eqn) if self.count == self._number else made
                self.count += 1
            eqns += made
        return jaxpr.replace(eqns=eqns)
