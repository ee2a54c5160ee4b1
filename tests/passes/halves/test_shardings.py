"""The matmuls of parts lie as those with whole rows."""

from __future__ import annotations

from typing import Any

from jaxoverlap.passes.analysis.jaxprs import bodies, dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.halves.shardings import shardings_of_parts
from tests.support.halves import B, D, S, V, arguments, halved, step


def lie(key: Any) -> Shardings:
    """Mark a site by what no sharding of a step would be."""
    return Shardings(((repr(key),),), None, None)


def test_parts_lie_as_the_whole_did():
    jaxpr, done = halved(step, arguments(), (B, S))
    whole = {dot.index: dot.eqn for dot in dots(jaxpr)}
    lies = shardings_of_parts(jaxpr, done.jaxpr, {key: lie(key) for key in whole}, 2)
    parts = {dot.index: dot.eqn for dot in dots(done.jaxpr)}
    assert lies.keys() == parts.keys()
    for key, eqn in whole.items():
        copies = [parts[at] for at, one in lies.items() if one == lie(key)]
        assert len(copies) == 2
        for copy in copies:
            assert copy.params == eqn.params
            sizes, cut = ([v.aval.size for v in (*e.invars, *e.outvars)] for e in (eqn, copy))
            assert sum(2 * b == a for a, b in zip(sizes, cut, strict=True)) >= 2


def test_the_sum_of_a_lookups_gradient_keeps_its_place():
    jaxpr, done = halved(step, arguments(), (B, S))

    def of(j: Any) -> Any:
        """Return where the scatter-add into the table stands: a body and a place."""
        table = (V, D)
        (position,) = (
            (body.index, i)
            for body in bodies(j)
            for i, e in enumerate(body.eqns)
            if e.primitive.name == "scatter-add" and e.outvars[0].aval.shape == table
        )
        return position

    lies = shardings_of_parts(jaxpr, done.jaxpr, {of(jaxpr): lie("sum")}, 2)
    assert lies == {of(done.jaxpr): lie("sum")}


def test_a_matmul_that_was_not_told_of_stays_untold():
    jaxpr, done = halved(step, arguments(), (B, S))
    assert shardings_of_parts(jaxpr, done.jaxpr, {}, 2) == {}
