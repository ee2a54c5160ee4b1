"""Name the dims of a step: find which dims of which values are one and the same.

    y: [b, s, f] = dot_general x: [b, s, d] w: [d, f]      # x's dim 0 is y's, w's dim 1 is y's last

A step has a few names of dims: batch, sequence, hidden, heads, vocabulary, experts, layers. A
layout that puts mesh axes on names is right for all values at once, through scans and the backward
pass, where a layout of one value says nothing of the next. GSPMD's and Shardy's propagation follow
dims in the same way (arXiv:2105.04663, section 3.5); here the names outlive any one sharding.

A reshape that splits a dim gives its name to the major part, as a sharded dim's major part is
sharded. An equation that is not understood names nothing: its results have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import TRANSPARENT
from jaxoverlap.passes.analysis.sharding_rules import ShardingRule, rule_of

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
            name = eqn.primitive.name
            if name in TRANSPARENT:
                self._called(eqn, around)
            elif named := rule_of(eqn):
                self._ruled(eqn, named)
            elif rule := _RULES.get(name):
                for operand, result, pairs in rule(eqn):
                    self._same(operand, result, pairs)
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

    def _ruled(self, eqn: Any, rule: ShardingRule) -> None:
        """Join the dims that an operation's own sharding rule gives one name."""
        first: dict[tuple[str, int], _Dim] = {}
        sides = (*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results)
        for var, names in zip(*sides, strict=True):
            if not names or compat.is_literal(var):
                continue
            for d, (name, size) in enumerate(zip(names, var.aval.shape, strict=True)):
                at = first.setdefault((name, size), _Dim(var, d))
                self._same(at.var, var, [(at.dim, d)])

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


# -- rules for primitives that move dims ----------------------------------------------------------

_Joins = Iterator[tuple[Any, Any, Sequence[_Pair]]]


def _dot_general(eqn: Any) -> _Joins:
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    yield lhs, rhs, [*zip(lhs_contract, rhs_contract, strict=True)]
    yield lhs, rhs, [*zip(lhs_batch, rhs_batch, strict=True)]
    left = [d for d in range(lhs.aval.ndim) if d not in (*lhs_contract, *lhs_batch)]
    right = [d for d in range(rhs.aval.ndim) if d not in (*rhs_contract, *rhs_batch)]
    yield lhs, out, [(d, i) for i, d in enumerate((*lhs_batch, *left))]
    first = len(lhs_batch) + len(left)
    yield rhs, out, [(d, i) for i, d in enumerate(right, first)]


def _ragged_dot_general(eqn: Any) -> _Joins:
    """Join the dims of a grouped matmul: contracted and batch dims, and each free dim's result.

    Where the contracted dim is ragged, the result begins with the groups, and where the free dim
    of the left operand is ragged, the right operand has a dim of groups.
    """
    (lhs, rhs, sizes), (out,) = eqn.invars[:3], eqn.outvars
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    yield lhs, rhs, [*zip(*contract, strict=True)]
    yield lhs, rhs, [*zip(*batch, strict=True)]
    left = [d for d in range(lhs.aval.ndim) if d not in (*contract[0], *batch[0])]
    right = [d for d in range(rhs.aval.ndim) if d not in (*contract[1], *batch[1], *groups)]
    first = out.aval.ndim - len(batch[0]) - len(left) - len(right)  # 1 if it begins with the groups
    yield lhs, out, [(d, i) for i, d in enumerate((*batch[0], *left), first)]
    yield rhs, out, [(d, i) for i, d in enumerate(right, first + len(batch[0]) + len(left))]
    grouped, dim = (rhs, groups[0]) if groups else (out, 0)
    if groups or first:
        yield sizes, grouped, [(sizes.aval.ndim - 1, dim)]


def _convolution(eqn: Any) -> _Joins:
    """Join the batch and the features; a convolution mixes the elements of spatial dims.

    Features are joined through a depthwise convolution, and through no other grouped one.
    """
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    numbers = eqn.params["dimension_numbers"]
    (batch, feature), (made, summed) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    of_features, of_batch = (eqn.params[f"{name}_group_count"] for name in ("feature", "batch"))
    yield rhs, out, [(made, numbers.out_spec[1])]
    if of_features == 1:
        yield lhs, rhs, [(feature, summed)]
    if of_batch == 1:
        yield lhs, out, [(batch, numbers.out_spec[0])]
    for dim, count in ((feature, of_features), (batch, of_batch)):
        if count > 1 and count == lhs.aval.shape[dim] == rhs.aval.shape[made]:
            yield lhs, out, [(dim, numbers.out_spec[1])]


def _along(param: str) -> Callable[[Any], _Joins]:
    """Join the dims of operands and results, but for those that the equation works along."""

    def rule(eqn: Any) -> _Joins:
        for operand, out in zip(eqn.invars, eqn.outvars, strict=True):
            ndim = out.aval.ndim
            along = {d % ndim for d in np.atleast_1d(eqn.params[param])}
            kept = [(d, d) for d in range(ndim) if d not in along]
            yield operand, out, kept
            yield eqn.outvars[0], out, kept

    return rule


def _fft(eqn: Any) -> _Joins:
    (operand,), (out,) = eqn.invars, eqn.outvars
    yield operand, out, [(d, d) for d in range(out.aval.ndim - len(eqn.params["fft_lengths"]))]


def _broadcast_in_dim(eqn: Any) -> _Joins:
    operand, out = eqn.invars[0], eqn.outvars[0]
    pairs = enumerate(eqn.params["broadcast_dimensions"])
    yield operand, out, [p for p in pairs if _equal(operand, out, p)]


def _transpose(eqn: Any) -> _Joins:
    pairs = [(d, i) for i, d in enumerate(eqn.params["permutation"])]
    yield eqn.invars[0], eqn.outvars[0], pairs


def _without(param: str) -> Callable[[Any], _Joins]:
    def rule(eqn: Any) -> _Joins:
        for operand, out in zip(eqn.invars, eqn.outvars, strict=False):
            gone = {d % operand.aval.ndim for d in eqn.params[param]}
            kept = [d for d in range(operand.aval.ndim) if d not in gone]
            yield operand, out, [(d, i) for i, d in enumerate(kept)]

    return rule


def _reshape(eqn: Any) -> _Joins:
    """Join the major parts of dims that are split or merged, and dims that stay as they are."""
    operand, out = eqn.invars[0], eqn.outvars[0]
    yield operand, out, _reshaped(operand.aval.shape, out.aval.shape)


def _reshaped(one: Sequence[int], other: Sequence[int]) -> list[_Pair]:
    """Pair the dims of two shapes of the same elements: each with the major part of its twin."""
    pairs, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        if one[i] == 1 or other[j] == 1:
            i, j = i + (one[i] == 1), j + (other[j] == 1 and one[i] != 1)
            continue
        pairs.append((i, j))
        a, b = one[i], other[j]
        while a != b:
            if a < b:
                i += 1
                a *= one[i]
            else:
                j += 1
                b *= other[j]
        i, j = i + 1, j + 1
    return pairs


def _kept(eqn: Any) -> _Joins:
    """Join the dims that keep their size, of slices, pads and concatenations."""
    for out in eqn.outvars:
        for operand in eqn.invars:
            if operand.aval.ndim == out.aval.ndim:
                dims = [(d, d) for d in range(out.aval.ndim)]
                yield operand, out, [p for p in dims if _equal(operand, out, p)]


def _gather(eqn: Any) -> _Joins:
    (operand, indices), (out,) = eqn.invars[:2], eqn.outvars
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.aval.ndim) if d not in gone]
    pairs = zip(window, numbers.offset_dims, strict=True)
    yield operand, out, [(d, i) for d, i in pairs if sizes[d] == operand.aval.shape[d]]
    rows = [d for d in range(out.aval.ndim) if d not in numbers.offset_dims]
    yield indices, out, [*zip(range(indices.aval.ndim - 1), rows, strict=True)]


def _scatter(eqn: Any) -> _Joins:
    operand, indices, updates = eqn.invars[:3]
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0]
    yield operand, out, [(d, d) for d in range(out.aval.ndim)]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.aval.ndim) if d not in gone]
    pairs = zip(window, numbers.update_window_dims, strict=True)
    yield operand, updates, [p for p in pairs if _equal(operand, updates, p)]
    rows = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    yield indices, updates, [*zip(range(indices.aval.ndim - 1), rows, strict=True)]


def _barrier(eqn: Any) -> _Joins:
    for operand, out in zip(eqn.invars, eqn.outvars, strict=True):
        yield operand, out, [(d, d) for d in range(out.aval.ndim)]


def _equal(one: Any, other: Any, pair: _Pair) -> bool:
    return one.aval.shape[pair[0]] == other.aval.shape[pair[1]]


_REDUCTIONS = ["sum", "max", "min", "prod", "and", "or", "xor"]
_RULES: dict[str, Callable[[Any], _Joins]] = {
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _without("dimensions"),
    **{f"reduce_{kind}": _without("axes") for kind in _REDUCTIONS},
    **dict.fromkeys(("argmax", "argmin"), _without("axes")),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "concatenate", "split", "top_k"), _kept),
    "dynamic_update_slice": _kept,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add"), _scatter),
    "optimization_barrier": _barrier,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _convolution,
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "fft": _fft,
}
