"""Name the dims of a step: find which dims of which values are one and the same.

    y: [b, s, f] = dot_general x: [b, s, d] w: [d, f]      # x's dim 0 is y's, w's dim 1 is y's last

A step has a few names of dims: batch, sequence, hidden, heads, vocabulary, experts, layers. A
layout that puts mesh axes on names is right for all values at once, through scans and the backward
pass, where a layout of one value says nothing of the next. GSPMD's and Shardy's propagation follow
dims in the same way (arXiv:2105.04663, section 3.5); here the names outlive any one sharding.

`passes/analysis/dim_rules.py` says which dims of an equation are the same. Of an equation that it
does not know, the dims of values of one shape are; any other equation gives its results names of
their own, and is listed in `unnamed`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.dim_rules import DimRule, dim_rule
from jaxoverlap.passes.analysis.jaxprs import TRANSPARENT

Name = int
"""The number of a named dim; of no meaning beyond the step that it is from."""

_Pair = tuple[int, int]  # a dim of an operand, and the dim of the result that it becomes


class _Dim(NamedTuple):
    var: Any
    dim: int


class DimNames:
    """The named dims of a step.

    Attributes:
        unnamed: the equations that are not understood, so that no name goes through them.
    """

    def __init__(self, jaxpr: Any):
        self._parents: dict[_Dim, _Dim] = {}
        self._numbers: dict[_Dim, Name] = {}
        self.unnamed: list[Any] = []
        self._visit(jaxpr)

    def of(self, var: Any) -> tuple[Name, ...]:
        """Return the names of a value's dims, in order."""
        return tuple(self._name(_Dim(var, d)) for d in range(var.aval.ndim))

    def _name(self, dim: _Dim) -> Name:
        return self._numbers.setdefault(self._root(dim), len(self._numbers))

    def _root(self, dim: _Dim) -> _Dim:
        while (parent := self._parents.get(dim)) is not None:
            if (above := self._parents.get(parent)) is not None:
                self._parents[dim] = above
            dim = parent
        return dim

    def _same(self, one: Any, other: Any, pairs: Iterator[_Pair] | Sequence[_Pair]) -> None:
        """Join dims of two values; literals and scalars have none to join."""
        if compat.is_literal(one) or compat.is_literal(other):
            return
        for a, b in pairs:
            root, its = self._root(_Dim(one, a)), self._root(_Dim(other, b))
            if root != its:
                self._parents[root] = its

    def _alike(self, one: Any, other: Any) -> None:
        """Join all dims of two values of one shape."""
        if one.aval.shape == other.aval.shape:
            self._same(one, other, [(d, d) for d in range(one.aval.ndim)])

    # -- equations ----------------------------------------------------------------------------

    def _visit(self, jaxpr: Any, around: tuple[Any, ...] = ()) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in TRANSPARENT:
                self._called(eqn, around)
                if rule := dim_rule(eqn):  # a `per_sequence` says what of its results are the batch
                    self._ruled(eqn, rule)
            elif rule := dim_rule(eqn):
                self._ruled(eqn, rule)
            elif compat.has_jaxprs(eqn) or not self._by_shape(eqn):
                self.unnamed.append(compat.lined_as(eqn, around))

    def _by_shape(self, eqn: Any) -> bool:
        """Join an element-wise equation's operands and results; a dim of size 1 is repeated.

        Returns:
            Whether it looks like one: each result has the shape of an operand, or no dims.
        """
        joined = set[Any]()
        for result in eqn.outvars:
            for operand in eqn.invars:
                pairs = list(zip(operand.aval.shape, result.aval.shape, strict=False))
                if operand.aval.ndim == result.aval.ndim and all(a in (1, b) for a, b in pairs):
                    same = [(d, d) for d, (a, b) in enumerate(pairs) if a == b]
                    self._same(operand, result, same)
                    joined.add(result)
        return not eqn.invars or all(v in joined or not v.aval.shape for v in eqn.outvars)

    def _ruled(self, eqn: Any, rule: DimRule) -> None:
        """Join the dims that a rule gives one factor."""
        first: dict[Hashable, _Dim] = {}
        sides = (*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results)
        for var, factors in zip(*sides, strict=True):
            if compat.is_literal(var):
                continue
            for d, factor in enumerate(factors):
                one = first.setdefault(factor, _Dim(var, d))
                self._same(one.var, var, [(one.dim, d)])

    def _called(self, eqn: Any, around: tuple[Any, ...]) -> None:
        """Join the operands and results of an equation with those of the bodies that it runs."""
        name, bodies = eqn.primitive.name, list(compat.jaxprs_in(eqn))
        operands = list(eqn.invars)
        if name == "scan":
            self._scanned(eqn, bodies[0])
        elif name == "while":
            body, num_cond, num_body = compat.while_parts(eqn)
            carry = operands[num_cond + num_body :]
            self._bound(operands[num_cond:], body.invars)
            self._bound(carry, eqn.outvars)
            self._bound(carry, body.outvars)
        else:
            for body in bodies:
                inner = operands[1:] if name == "cond" else operands
                if len(inner) == len(body.invars):
                    self._bound(inner, body.invars)
                if len(eqn.outvars) == len(body.outvars):
                    self._bound(eqn.outvars, body.outvars)
        for body in bodies:
            self._visit(body, (*around, eqn))

    def _scanned(self, eqn: Any, body: Any) -> None:
        num_consts, num_carry = compat.scan_counts(eqn)
        first = num_consts + num_carry
        self._bound(eqn.invars[:first], body.invars[:first])
        self._bound(eqn.outvars[:num_carry], body.outvars[:num_carry])
        self._bound(body.invars[num_consts:first], body.outvars[:num_carry])
        stacked = [*zip(eqn.invars[first:], body.invars[first:], strict=True)]
        stacked += zip(eqn.outvars[num_carry:], body.outvars[num_carry:], strict=True)
        for whole, part in stacked:
            self._same(stacked[0][0], whole, [(0, 0)])
            self._same(whole, part, [(d + 1, d) for d in range(part.aval.ndim)])

    def _bound(self, outer: Sequence[Any], inner: Sequence[Any]) -> None:
        for one, other in zip(outer, inner, strict=True):
            self._alike(one, other)
