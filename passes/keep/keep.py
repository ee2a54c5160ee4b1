"""Keep values of the forward pass that the backward pass would compute again.

    scan over w:      body:  h = dot x w ;  y = tanh h                        stacked: x
    scan over x, w:   body:  dx, dw = remat[{ h = dot x w ;  y = tanh h ;  ... y ... }] x w dy

->  scan over w:      body:  h = dot x w ;  y = tanh h                        stacked: x, h
    scan over x, w, h: body: dx, dw = remat[{ y = tanh h ;  ... y ... }] x w h dy

By the time that a step is seen, its gradient has been taken: the values that `jax.checkpoint`
computes again stand in the bodies of remats. One that is kept is one more operand of the remat, and
in scans one more result that the forward one stacks, and that the backward one slices; what only
it needed is computed once. In layers that are written one after the other it is but an operand.
Keeping costs memory and no accuracy: a kept value has the bits that the forward pass had.

This is selective recomputation (Korthikanti et al., arXiv 2205.05198), chosen for each value and
after differentiation, so that it does not matter who wrote the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.passes.keep.opened import opened
from jaxoverlap.passes.keep.remats import Remat, Source, remats_of
from jaxoverlap.passes.keep.scans import stack_of, widened
from jaxoverlap.plan.edits import Keep


def run(step: EditedStep, edits: Sequence[Keep]) -> EditedStep:
    """Keep the values that edits name; `EditedStep.facts` has the values (`_Keeping.waiting`)."""
    jaxpr = opened(step.jaxpr)
    remats = remats_of(jaxpr)
    wanted: dict[int, set[Any]] = {}
    for edit in edits:
        for number, position, output in edit.places:
            if not 0 <= number < len(remats):
                raise misfit(edit, f"the step has {len(remats)} remats, counted from 0")
            remat = remats[number]
            wanted.setdefault(number, set()).add(_value(edit, remat, position, output))
    keeping = _Keeping()
    for number, values in wanted.items():
        keeping.add(remats[number], values)
    jaxpr = compat.without_dead(keeping.jaxpr(jaxpr))
    return step.to(jaxpr, {Keep: keeping.waiting(remats, edits)})


def _value(edit: Keep, remat: Remat, position: int, output: int) -> Any:
    """Return the value of a remat that an edit names."""
    eqns = remat.body.eqns
    if not 0 <= position < len(eqns) or not 0 <= output < len(eqns[position].outvars):
        raise misfit(edit, f"remat {remat.number} has no result {output} of equation {position}")
    value = eqns[position].outvars[output]
    if value not in remat.sources:
        raise misfit(edit, "the forward pass does not compute that value")
    return value


class _Keeping:
    """One rewriting of a step: what each equation gets in addition."""

    def __init__(self) -> None:
        # By the id of an equation, which is that of one place in an opened step.
        self.operands: dict[int, dict[Any, Any]] = {}  # of remats: the value inside, and outside
        self.consts: dict[int, dict[Any, Any]] = {}  # of scans: likewise
        self.slices: dict[int, dict[Any, Any]] = {}
        self.stacks: dict[int, dict[Any, Any]] = {}  # of scans: the value inside, and its stack

    def add(self, remat: Remat, values: set[Any]) -> None:
        """Let a remat read values, and all of equal numbers, and not compute them."""
        numbers = {remat.inside.numbers[v] for v in values}
        scan, outside = remat.scope.scan, dict[int, Any]()
        for var, source in remat.sources.items():
            number = remat.inside.numbers[var]
            if number not in numbers:
                continue
            if number not in outside:
                outside[number] = self._brought(scan, source)
            self.operands.setdefault(id(remat.eqn), {})[var] = outside[number]

    def _brought(self, scan: Any, source: Source) -> Any:
        """Return the variable, in the body that the remat is in, that has a value."""
        if source.around:
            given, ways = source.var, self.consts
        elif source.scan is None:
            return source.var
        else:
            given, ways = self._stack(source), self.slices
        brought = ways.setdefault(id(scan), {})
        for inside, outside in brought.items():
            if outside is given:
                return inside
        inside = compat.like_var(source.var)
        brought[inside] = given
        return inside

    def _stack(self, source: Source) -> Any:
        """Return the stack of a value that a scan computes: a new one, if it stacks none."""
        if (there := stack_of(source.scan, source.var)) is not None:
            return there
        stacks = self.stacks.setdefault(id(source.scan), {})
        if source.var not in stacks:
            length = source.scan.params["length"]
            stacks[source.var] = compat.typed_stack_var(source.var, length)
        return stacks[source.var]

    def waiting(self, remats: Sequence[Remat], edits: Sequence[Keep]) -> dict[Any, Any]:
        """Return the values that wait, by the number of a remat, of an equation, of a result there.

        They are the new stacks, and values of the body that the remat is in.
        """
        found = dict[Any, Any]()
        for number, position, output in (place for edit in edits for place in edit.places):
            source = remats[number].sources[remats[number].body.eqns[position].outvars[output]]
            if source.scan is not None:
                found[number, position, output] = self._stack(source)
            elif not source.around:
                found[number, position, output] = source.var
        return found

    def jaxpr(self, jaxpr: Any) -> Any:
        """Return a body with all that its equations get."""
        return jaxpr.replace(eqns=[self._eqn(eqn) for eqn in jaxpr.eqns])

    def _eqn(self, given: Any) -> Any:
        eqn = compat.map_jaxprs(self.jaxpr, given) if compat.has_jaxprs(given) else given
        if (operands := self.operands.get(id(given))) is not None:
            return _reading(eqn, operands)
        ways = (way.get(id(given), {}) for way in (self.consts, self.slices, self.stacks))
        consts, slices, stacks = ways
        return widened(eqn, consts, slices, stacks) if consts or slices or stacks else eqn


def _reading(remat: Any, operands: Mapping[Any, Any]) -> Any:
    """Return a remat that reads values and does not compute them.

    Args:
        remat: the remat.
        operands: the values, as its body has them, and as the body around it has them.
    """
    body = remat.params["jaxpr"]
    eqns = [
        eqn.replace(outvars=[compat.like_var(v) if v in operands else v for v in eqn.outvars])
        for eqn in body.eqns
    ]
    body = compat.with_binders(body, [*body.invars, *operands], body.outvars).replace(eqns=eqns)
    params = {**remat.params, "jaxpr": body}
    given = [*remat.invars, *operands.values()]
    return compat.without_dead_operands(remat.replace(invars=given, params=params))
