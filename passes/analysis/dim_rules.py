"""Say which dims of an equation's operands and results are one and the same.

    y: [b, s, f] = dot_general x: [b, s, d] w: [d, f]    # (b, s, d), (d, f) -> (b, s, f); adds d

A rule gives each dim a factor, as Shardy's sharding rules do (`sdy.sharding_rule`; a test compares
the two): dims of one factor are the same dim. The layouts' search names the dims of a step by them
(`passes/analysis/dims.py`), and a batch split follows one factor through the step
(`passes/analysis/batch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxoverlap.passes.analysis.sequence_call import SEQUENCE_CALL
from jaxoverlap.passes.analysis.sharding_rules import (
    TE_BACKWARD,
    TE_FORWARD,
    batch_elements_independent,
    rule_of,
)

Factors = tuple[Hashable, ...]
"""The factors of a value's dims, in order."""


class DimRule(NamedTuple):
    """The factors of an equation.

    Attributes:
        operands, results: the factors of each operand and result; a dim that is split or merged has
            that of its major part; none for an operand that represents a missing one.
        combine: the primitive that combines what is computed from parts of a factor that a result
            does not have; None if nothing can.
        mixed: the factors whose elements an equation reads together, so that it cannot run on some
            of them: the summed dim of a cumulative sum.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    combine: str | None = None
    mixed: frozenset[Hashable] = frozenset()


def dim_rule(eqn: Any) -> DimRule | None:
    """Return the rule of an equation without bodies; None if it is not known."""
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        return _elementwise(eqn)
    if rule := _RULES.get(name):
        return rule(eqn)
    if stated := rule_of(eqn):
        return _stated(eqn, *stated)
    return None


def _stated(eqn: Any, operands: tuple[Factors, ...], results: tuple[Factors, ...]) -> DimRule:
    """Return the rule of an operation that partitions itself; it runs on all of its operands.

    Of an attention each sequence is computed alone, unless a mask of the batch drops scores.
    Transformer Engine's also has results for all the batch: the greatest score, and a random state
    that only dropout reads, are of the parts' greatest; gradients of a shared bias are added.
    """
    factors = frozenset(f for names in (*operands, *results) for f in names)
    if not batch_elements_independent(eqn):
        return DimRule(operands, results, mixed=factors)
    combine = {TE_FORWARD: "max", TE_BACKWARD: "add"}.get(eqn.primitive.name)
    return DimRule(operands, results, combine, mixed=factors - {"b"})


# They compute each element of their results from the same element of their operands.
_ELEMENTWISE = frozenset(
    [
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
        "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv",
        "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac",
        "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic",
        "lt", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not",
        "one_minus_square", "or", "polygamma", "population_count", "pow", "real",
        "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
        "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
        "threefry2x32", "xor", "zeta",
    ]
)  # fmt: skip


def _own(number: int, var: Any) -> Factors:
    """Return factors that no other operand has."""
    return tuple((number, d) for d in range(var.aval.ndim))


def _replaced(factors: Sequence[Hashable], new: Mapping[int, Hashable]) -> Factors:
    return tuple(new.get(d, factor) for d, factor in enumerate(factors))


def _shared(lhs: Factors, rhs: Factors, *pairs: Sequence[Sequence[int]]) -> Factors:
    """Return the right side's factors, with the left side's for the dims that are paired."""
    return _replaced(rhs, {r: lhs[d] for pair in pairs for d, r in zip(*pair, strict=True)})


def _elementwise(eqn: Any) -> DimRule:
    """Operands have the result's dims; a scalar, and a dim of one element, is repeated."""
    shape = eqn.outvars[0].aval.shape

    def factors(number: int, var: Any) -> Factors:
        return tuple(
            d if own == size else (number, d)
            for d, (own, size) in enumerate(zip(var.aval.shape, shape, strict=False))
        )

    operands = tuple(factors(i, v) for i, v in enumerate(eqn.invars))
    return DimRule(operands, (tuple(range(len(shape))),) * len(eqn.outvars))


def _one_by_one(eqn: Any) -> DimRule:
    operands = tuple(_own(i, v) for i, v in enumerate(eqn.invars))
    return DimRule(operands, operands)


def _sum_of(eqn: Any) -> str | None:
    """Return how sums of parts are combined; None where each would be rounded to an integer."""
    dtype = eqn.outvars[0].aval.dtype
    fractions = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars[:2])
    if fractions and jnp.issubdtype(dtype, jnp.integer):
        return None
    return "or" if dtype == np.bool_ else "add"


def _dot_general(eqn: Any) -> DimRule:
    contract, batch = eqn.params["dimension_numbers"]
    lhs, rhs = (_own(i, v) for i, v in enumerate(eqn.invars))
    rhs = _shared(lhs, rhs, contract, batch)
    left = [f for d, f in enumerate(lhs) if d not in (*contract[0], *batch[0])]
    right = [f for d, f in enumerate(rhs) if d not in (*contract[1], *batch[1])]
    result = (*(lhs[d] for d in batch[0]), *left, *right)
    return DimRule((lhs, rhs), (result,), _sum_of(eqn))


def _ragged_dot_general(eqn: Any) -> DimRule:
    """A grouped matmul: sizes of groups count elements of the ragged dim from its start.

    Where the contracted dim is ragged, the result begins with the groups, and where the free dim
    of the left operand is ragged, the right operand has a dim of groups.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    lhs, rhs, sizes = (_own(i, v) for i, v in enumerate(eqn.invars[:3]))
    rhs = _shared(lhs, rhs, contract, batch)
    left = [f for d, f in enumerate(lhs) if d not in (*contract[0], *batch[0])]
    right = [f for d, f in enumerate(rhs) if d not in (*contract[1], *batch[1], *groups)]
    result = [*(lhs[d] for d in batch[0]), *left, *right]
    by_group = eqn.outvars[0].aval.ndim > len(result)
    group = rhs[groups[0]] if groups else "group"
    if groups or by_group:
        sizes = (*sizes[:-1], group)
    mixed = {lhs[d] for d in numbers.lhs_ragged_dimensions} | {group} | set(sizes)
    others = tuple(_own(i, v) for i, v in enumerate(eqn.invars[3:], 3))
    result = [group, *result] if by_group else result
    return DimRule((lhs, rhs, sizes, *others), (tuple(result),), _sum_of(eqn), frozenset(mixed))


def _convolution(eqn: Any) -> DimRule:
    """Images are convolved one by one; spatial dims, and features in groups, are mixed.

    Features keep their factor through a depthwise convolution.
    """
    numbers, (lhs_var, rhs_var) = eqn.params["dimension_numbers"], eqn.invars
    (batch, feature), (made, summed) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    of_features, of_batch = (eqn.params[f"{name}_group_count"] for name in ("feature", "batch"))
    lhs, rhs = _own(0, lhs_var), _own(1, rhs_var)
    result: list[Hashable] = [("new", d) for d in range(eqn.outvars[0].aval.ndim)]
    mixed = {lhs[d] for d in numbers.lhs_spec[2:]} | {rhs[d] for d in numbers.rhs_spec[2:]}
    if of_features == 1:
        rhs = _replaced(rhs, {summed: lhs[feature]})
    if of_batch == 1:
        result[numbers.out_spec[0]] = lhs[batch]
    result[numbers.out_spec[1]] = rhs[made]
    for dim, count in ((feature, of_features), (batch, of_batch)):
        if count > 1:
            mixed |= {lhs[dim], rhs[made], rhs[summed]}
            if count == lhs_var.aval.shape[dim] == rhs_var.aval.shape[made]:
                lhs = _replaced(lhs, {dim: rhs[made]})
    return DimRule((lhs, rhs), (tuple(result),), _sum_of(eqn), frozenset(mixed))


def _along(param: str, *, keeps: bool) -> Callable[[Any], DimRule]:
    """A rule of equations that work along a dim, or some, each of which may keep its factor."""

    def rule(eqn: Any) -> DimRule:
        ndim = eqn.outvars[0].aval.ndim
        along = {d % ndim for d in np.atleast_1d(eqn.params[param])}

        def factors(side: str, number: int) -> Factors:
            return tuple((side, number, d) if d in along else d for d in range(ndim))

        if keeps:
            shared = tuple(range(ndim))
            operands, results = (shared,) * len(eqn.invars), (shared,) * len(eqn.outvars)
            return DimRule(operands, results, mixed=frozenset(along))
        operands = tuple(factors("operand", i) for i, _ in enumerate(eqn.invars))
        return DimRule(operands, tuple(factors("result", i) for i, _ in enumerate(eqn.outvars)))

    return rule


def _windowed(eqn: Any) -> DimRule:
    """A pooling, or its gradient: dims with windows of one element keep their factor."""
    params, ndim = eqn.params, len(eqn.params["window_dimensions"])
    ones = (1,) * ndim
    steps = zip(
        params["window_dimensions"],
        params["window_strides"],
        params.get("base_dilation", ones),
        params["padding"],
        strict=True,
    )
    kept = {d for d, step in enumerate(steps) if step == (1, 1, 1, (0, 0))}

    def factors(number: int, var: Any) -> Factors:
        return tuple(d if d in kept else (number, d) for d in range(var.aval.ndim))

    operands = tuple(factors(i, v) for i, v in enumerate(eqn.invars))
    return DimRule(operands, tuple(factors(-1 - i, v) for i, v in enumerate(eqn.outvars)))


def _fft(eqn: Any) -> DimRule:
    ndim, last = eqn.outvars[0].aval.ndim, len(eqn.params["fft_lengths"])
    operand, result = (
        tuple(d if d < ndim - last else (side, d) for d in range(ndim)) for side in (0, 1)
    )
    return DimRule((operand,), (result,))


def _broadcast_in_dim(eqn: Any) -> DimRule:
    operand, shape = eqn.invars[0], eqn.outvars[0].aval.shape
    dims = zip(eqn.params["broadcast_dimensions"], operand.aval.shape, strict=True)
    factors = tuple(out if size == shape[out] else ("one", out) for out, size in dims)
    return DimRule((factors, *((),) * (len(eqn.invars) - 1)), (tuple(range(len(shape))),))


def _transpose(eqn: Any) -> DimRule:
    factors = _own(0, eqn.invars[0])
    return DimRule((factors,), (tuple(factors[d] for d in eqn.params["permutation"]),))


def _without(param: str, combine: str | None = None) -> Callable[[Any], DimRule]:
    def rule(eqn: Any) -> DimRule:
        factors = _own(0, eqn.invars[0])
        gone = {d % max(len(factors), 1) for d in eqn.params[param]}
        kept = tuple(f for d, f in enumerate(factors) if d not in gone)
        return DimRule((factors,), (kept,), combine)

    return rule


def _reshape(eqn: Any) -> DimRule | None:
    """Dims that are split or merged keep the factor of their major part."""
    if eqn.params["dimensions"] is not None:
        return None
    operand, out = eqn.invars[0], eqn.outvars[0]
    factors = _own(0, operand)
    same = {j: factors[i] for i, j in _reshaped(operand.aval.shape, out.aval.shape)}
    others = ((),) * (len(eqn.invars) - 1)
    return DimRule((factors, *others), (_replaced(_own(-1, out), same),))


def _reshaped(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """Pair the dims of two shapes of the same elements: each with the major part of its twin."""
    pairs, i, j = [], 0, 0
    if not math.prod(one):
        return pairs
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


def _kept(is_kept: Callable[[Any, int], bool]) -> Callable[[Any], DimRule]:
    """A rule of equations that change the size of some dims of their first operand."""

    def rule(eqn: Any) -> DimRule:
        operand, others = eqn.invars[0], eqn.invars[1:]
        factors = _own(0, operand)
        gone = {d: ("new", d) for d in range(len(factors)) if not is_kept(eqn, d)}
        results = (_replaced(factors, gone),) * len(eqn.outvars)
        return DimRule((factors, *(_own(i, v) for i, v in enumerate(others, 1))), results)

    return rule


def _same_size(eqn: Any, dim: int) -> bool:
    return eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]


def _unpadded(eqn: Any, dim: int) -> bool:
    return not any(eqn.params["padding_config"][dim])


def _not_ranked(eqn: Any, dim: int) -> bool:
    ndim = eqn.invars[0].aval.ndim
    return dim != eqn.params.get("axis", ndim - 1) % ndim


def _not_repeated(eqn: Any, dim: int) -> bool:
    return eqn.params["reps"][dim] == 1


def _dynamic_update_slice(eqn: Any) -> DimRule:
    operand, update, *starts = eqn.invars
    factors = _own(0, operand)
    partial = {d: (1, d) for d, n in enumerate(update.aval.shape) if n != operand.aval.shape[d]}
    mixed = frozenset(factors[d] for d in partial)
    operands = (factors, _replaced(factors, partial), *((),) * len(starts))
    return DimRule(operands, (factors,), mixed=mixed)


def _gather(eqn: Any) -> DimRule:
    """Return a gather's rule: index dims carry over, as do operand dims read in full."""
    (operand, indices), out = eqn.invars[:2], eqn.outvars[0].aval
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    factors = _own(0, operand)
    batch = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    of_indices = _shared(factors, _own(1, indices), batch)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.aval.ndim) if d not in gone]
    result: dict[int, Hashable] = {
        position: factors[d]
        for d, position in zip(window, numbers.offset_dims, strict=True)
        if sizes[d] == operand.aval.shape[d]
    }
    rows = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    result |= dict(zip(rows, of_indices[:-1], strict=True))
    made = tuple(result.get(d, ("new", d)) for d in range(out.ndim))
    return DimRule(
        (factors, of_indices), (made,), mixed=frozenset(factors[d] for d in numbers.start_index_map)
    )


def _scatter(eqn: Any) -> DimRule:
    """Return a scatter's rule: dims that updates write in full and batch dims keep their factors.

    The updates' other dims are not split: a part's sum would be a full buffer, reduced on its own.
    """
    operand, indices, updates = eqn.invars[:3]
    numbers, factors = eqn.params["dimension_numbers"], _own(0, operand)
    batch = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    of_indices = _shared(factors, _own(1, indices), batch)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.aval.ndim) if d not in gone]
    written: dict[int, Hashable] = {
        position: factors[d]
        for d, position in zip(window, numbers.update_window_dims, strict=True)
        if operand.aval.shape[d] == updates.aval.shape[position]
    }
    rows = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
    written |= dict(zip(rows, of_indices[:-1], strict=True))
    of_updates = _replaced(_own(2, updates), written)
    scattered = {factors[d] for d in numbers.scatter_dims_to_operand_dims}
    mixed = frozenset(set(factors) - set(of_updates) | scattered)
    return DimRule((factors, of_indices, of_updates), (factors,), mixed=mixed)


def _stack(eqn: Any) -> DimRule:
    factors, axis = tuple(range(eqn.invars[0].aval.ndim)), eqn.params["axis"]
    result = (*factors[:axis], "stack", *factors[axis:])
    return DimRule((factors,) * len(eqn.invars), (result,))


def _unstack(eqn: Any) -> DimRule:
    factors, axis = _own(0, eqn.invars[0]), eqn.params["axis"]
    return DimRule((factors,), ((*factors[:axis], *factors[axis + 1 :]),) * len(eqn.outvars))


def _all_to_all(eqn: Any) -> DimRule | None:
    split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]
    return _exchanged(eqn, {split, concat}) if eqn.params["tiled"] else None


def _gathered(dim: str) -> Callable[[Any], DimRule | None]:
    """A rule of gathers and scatters of manual axes, whose other dims keep their factors."""
    return lambda eqn: _exchanged(eqn, {eqn.params[dim]}) if eqn.params["tiled"] else None


def _exchanged(eqn: Any, moved: set[int]) -> DimRule:
    """Dims but those along which elements go to other devices keep their factors."""
    factors = _own(0, eqn.invars[0])
    result = _replaced(factors, {d: ("moved", d) for d in moved})
    return DimRule((factors,), (result,), mixed=frozenset(factors[d] for d in moved))


def _ragged_all_to_all(eqn: Any) -> DimRule:
    """Tokens go where the lists of sizes say; other dims keep their factors."""
    operand, result = _own(0, eqn.invars[0]), _own(1, eqn.invars[1])
    result = (result[0], *operand[1:])
    lists = tuple(_own(i, v) for i, v in enumerate(eqn.invars[2:], 2))
    mixed = {operand[0], result[0], *(f for factors in lists for f in factors)}
    return DimRule((operand, result, *lists), (result,), mixed=frozenset(mixed))


def _sequence_call(eqn: Any) -> DimRule:
    """Each sequence is computed alone; other dims of one shape are taken to be the same."""
    call, shapes = eqn.params["call"], [v.aval.shape for v in eqn.invars]

    def factors(number: int, var: Any, batch: int | None) -> Factors:
        alike = shapes.index(var.aval.shape) if var.aval.shape in shapes else -number
        return tuple("batch" if d == batch else (alike, d) for d in range(var.aval.ndim))

    sides = ((eqn.invars, call.operands, 0), (eqn.outvars, call.results, len(shapes)))
    operands, results = (
        tuple(factors(n, *pair) for n, pair in enumerate(zip(some, dims, strict=True), first))
        for some, dims, first in sides
    )
    mixed = {f for names in (*operands, *results) for f in names} - {"batch"}
    return DimRule(operands, results, "add", frozenset(mixed))


_RULES: dict[str, Callable[[Any], DimRule | None]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _convolution,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _without("dimensions"),
    "reduce_sum": _without("axes", "add"),
    "reduce_prod": _without("axes", "mul"),
    **{f"reduce_{kind}": _without("axes", kind) for kind in ("max", "min", "and", "or", "xor")},
    **dict.fromkeys(("argmax", "argmin"), _without("axes")),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis", keeps=True)
    ),
    **dict.fromkeys(("sort", "concatenate"), _along("dimension", keeps=False)),
    "rev": _along("dimensions", keeps=False),
    "split": _along("axis", keeps=False),
    "fft": _fft,
    **dict.fromkeys(
        (
            *(f"reduce_window{kind}" for kind in ("", "_sum", "_max", "_min")),
            "select_and_scatter_add",
            "select_and_gather_add",
        ),
        _windowed,
    ),
    **dict.fromkeys(("slice", "dynamic_slice"), _kept(_same_size)),
    "pad": _kept(_unpadded),
    "top_k": _kept(_not_ranked),
    "tile": _kept(_not_repeated),
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), _scatter
    ),
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged_all_to_all,
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gathered("all_gather_dimension")),
    "reduce_scatter": _gathered("scatter_dimension"),
    SEQUENCE_CALL: _sequence_call,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys(
        ("optimization_barrier", "device_put", "pvary", "ppermute"),
        _one_by_one,
    ),
}
