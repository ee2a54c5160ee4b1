"""Follow the rows of a batch through one equation.

    y: [b, s, f] = dot_general x: [b, s, d] w: [d, f]     # rows along x's dim 0 are along y's dim 0
    g: [d, f] = dot_general x: [b, s, d] dy: [b, s, f]    # a sum over the rows: halves are added

An equation treats the rows alike if it computes each row of its results from the same row of its
operands. Then it can run on some of the rows alone. If it adds over the rows, it runs on some of
them, and the sums are added. A rule says which it is, as the batching rules of `jax.vmap` do; an
equation without a rule, or for which the rule has no answer, mixes the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.passes.analysis.sharding_rules import BACKWARD, FORWARD, rule_of

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
        "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta",
    ]
)  # fmt: skip


class RowSplit(NamedTuple):
    """How rows are cut: each shard of the rows in the same number of parts.

    A dim of `size` rows is `[shards, parts, size / shards / parts]`, and a part has the rows at one
    place of the middle dim: where the rows are sharded over as many devices, or fewer, each device
    keeps its own, and nothing moves.
    """

    shards: int
    parts: int

    def divides(self, size: int) -> bool:
        """Return whether a dim of this size can be cut."""
        return size % (self.shards * self.parts) == 0

    def part(self, size: int) -> int:
        """Return the rows of one part."""
        return size // self.parts


@dataclass(frozen=True)
class Followed:
    """An equation that treats the rows alike.

    Attributes:
        operands: the dim of each operand along which its rows lie; None for one that all parts
            share.
        results: the dim of each result along which its rows lie; the name of a primitive if the
            results of the parts are combined by it.
        params: the parameters that are others for a part.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


Dims = Sequence[int | None]
"""The dim of each operand along which its rows lie; None for one that is whole."""


def follow(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Follow the rows through an equation; None if it mixes them.

    Args:
        eqn: the equation; one without bodies.
        dims: where the rows of its operands lie; of one at least.
        cut: how the rows are cut.
    """
    name = eqn.primitive.name
    rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name)
    return rule(eqn, dims, cut) if rule else None


def _only(dims: Dims) -> int | None:
    """Return the dim in which all operands have their rows; None if there are several."""
    known = {d for d in dims if d is not None}
    return known.pop() if len(known) == 1 else None


def _elementwise(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Operands have the rows where the result has them; one that is repeated there is shared."""
    if (dim := _only(dims)) is None:
        return None
    return Followed(_alike(eqn, dim), (dim,) * len(eqn.outvars))


def _alike(eqn: Any, dim: int) -> tuple[int | None, ...]:
    """Return the dims of operands of the result's rank: a scalar, or a dim of 1, has no rows."""
    return tuple(dim if v.aval.ndim and v.aval.shape[dim] > 1 else None for v in eqn.invars)


def _dot_general(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Rows of one operand are the result's; those of a batch, or those contracted, both have.

    Where each operand has rows of its own, as the queries and keys of attention over a cut
    sequence, those of the first stay cut, and the second is joined.
    """
    contract, batch = eqn.params["dimension_numbers"]
    first = len(batch[0])
    for side, (dim, var) in enumerate(zip(dims, eqn.invars, strict=True)):
        free = [d for d in range(var.aval.ndim) if d not in (*contract[side], *batch[side])]
        if dim in free:
            return Followed((dim, None) if side == 0 else (None, dim), (first + free.index(dim),))
        first += len(free)
    for paired in (contract, batch):
        for pair in zip(*paired, strict=True):
            if all(d in (None, p) for d, p in zip(dims, pair, strict=True)):
                if paired is contract and _rounds(eqn):
                    return None
                whole = "or" if eqn.outvars[0].aval.dtype == np.bool_ else "add"
                return Followed(
                    pair, (whole,) if paired is contract else (batch[0].index(pair[0]),)
                )
    return None


def _rounds(eqn: Any) -> bool:
    """Return whether fractions give whole numbers: the sum of each part would be rounded."""
    whole = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
    return whole and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)


def _broadcast_in_dim(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim = dims[0]
    if dim is None:
        return None
    out = eqn.params["broadcast_dimensions"][dim]
    return Followed(tuple(dims), (out,), {"shape": _halved(eqn.params["shape"], out, cut)})


def _halved(shape: Sequence[int], dim: int, cut: RowSplit) -> tuple[int, ...]:
    return (*shape[:dim], cut.part(shape[dim]), *shape[dim + 1 :])


def _reshape(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """The rows stay together where dims behind them are merged with theirs, or split off it."""
    if (dim := dims[0]) is None or eqn.params["dimensions"] is not None:
        return None
    before, after = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    above = math.prod(before[:dim])
    for out, size in enumerate(after):
        if size > 1 and math.prod(after[:out]) == above:
            if not cut.divides(size):
                return None
            return Followed(tuple(dims), (out,), {"new_sizes": _halved(after, out, cut)})
    return None


def _transpose(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    return Followed(tuple(dims), (tuple(eqn.params["permutation"]).index(dims[0]),))


def _without(dim: int, gone: Sequence[int], ndim: int) -> int:
    kept = [d for d in range(ndim) if d not in {g % ndim for g in gone}]
    return kept.index(dim)


def _squeeze(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim = dims[0]
    assert dim is not None
    out = _without(dim, eqn.params["dimensions"], eqn.invars[0].aval.ndim)
    return Followed(tuple(dims), (out,))


def _reduction(combine: str | None) -> Callable[[Any, Dims, RowSplit], Followed | None]:
    """A reduction over the rows too is combined from those of the parts, if that is possible."""

    def rule(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
        dim, axes = dims[0], eqn.params["axes"]
        assert dim is not None
        if dim in axes:
            return Followed(tuple(dims), (combine,)) if combine else None
        return Followed(tuple(dims), (_without(dim, axes, eqn.invars[0].aval.ndim),))

    return rule


def _along(param: str) -> Callable[[Any, Dims, RowSplit], Followed | None]:
    """An equation that works along one dim, or some, treats the rows of the others alike."""

    def rule(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
        dim, along = _only(dims), eqn.params[param]
        ndim = eqn.outvars[0].aval.ndim
        worked = {d % ndim for d in np.atleast_1d(along)}
        if dim is None or dim in worked:
            return None
        return Followed(_alike(eqn, dim), (dim,) * len(eqn.outvars))

    return rule


def _slice(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim, params = dims[0], eqn.params
    assert dim is not None
    size, strides = eqn.invars[0].aval.shape[dim], params["strides"]
    kept = params["start_indices"][dim] == 0 and params["limit_indices"][dim] == size
    if not kept or (strides and strides[dim] != 1):
        return None
    limits = _halved(params["limit_indices"], dim, cut)
    return Followed(tuple(dims), (dim,), {"limit_indices": limits})


def _dynamic_slice(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim, sizes = dims[0], eqn.params["slice_sizes"]
    if dim is None or sizes[dim] != eqn.invars[0].aval.shape[dim]:
        return None
    return Followed(tuple(dims), (dim,), {"slice_sizes": _halved(sizes, dim, cut)})


def _dynamic_update_slice(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim, (operand, update) = _only(dims[:2]), (v.aval.shape for v in eqn.invars[:2])
    if dim is None or update[dim] != operand[dim]:
        return None
    return Followed((dim, dim, *[None] * (len(dims) - 2)), (dim,))


def _pad(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim = dims[0]
    if dim is None or any(eqn.params["padding_config"][dim]):
        return None
    return Followed(tuple(dims), (dim,))


def _top_k(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim, ndim = dims[0], eqn.invars[0].aval.ndim
    if dim is None or dim == eqn.params.get("axis", ndim - 1) % ndim:
        return None
    return Followed(tuple(dims), (dim,) * len(eqn.outvars))


def _gather(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Rows of the indices are rows of the result; a dim that is taken whole keeps its rows."""
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    rows = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    if (dim := dims[1]) is not None:
        other = _paired(numbers.start_indices_batching_dims, numbers.operand_batching_dims, dim)
        if dim == eqn.invars[1].aval.ndim - 1 or dims[0] not in (None, other):
            return None
        return Followed((other, dim), (rows[dim],))
    dim, sizes = dims[0], eqn.params["slice_sizes"]
    assert dim is not None
    if dim in numbers.operand_batching_dims:
        other = _paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims, dim)
        return Followed((dim, other), (rows[other],))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if dim in gone or dim in numbers.start_index_map or sizes[dim] != eqn.invars[0].aval.shape[dim]:
        return None
    window = [d for d in range(eqn.invars[0].aval.ndim) if d not in gone]
    result = numbers.offset_dims[window.index(dim)]
    return Followed((dim, None), (result,), {"slice_sizes": _halved(sizes, dim, cut)})


def _paired(ours: Sequence[int], theirs: Sequence[int], dim: int) -> Any:
    return theirs[ours.index(dim)] if dim in ours else None


def _scatter(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Rows that all three operands have are the result's; a sum over rows is left whole.

    A part's sum would be a whole buffer of its own, and be sent alone.
    """
    operand, updates = eqn.invars[0].aval, eqn.invars[2].aval
    numbers = eqn.params["dimension_numbers"]
    rows = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(operand.ndim) if d not in gone]
    places: list[tuple[int, int | None, int]] = [
        (ours, theirs, rows[theirs])
        for ours, theirs in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        )
    ]
    places += [
        (ours, None, place)
        for ours, place in zip(window, numbers.update_window_dims, strict=True)
        if ours not in numbers.scatter_dims_to_operand_dims
        and operand.shape[ours] == updates.shape[place]
    ]
    for place in places:
        if all(d in (None, p) for d, p in zip(dims, place, strict=True)):
            return Followed(place, (place[0],))
    return None


def _convolution(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Each image is convolved alone; the gradient of the kernel adds over them."""
    numbers, given = eqn.params["dimension_numbers"], tuple(dims)
    if given == (numbers.lhs_spec[0], None) and eqn.params["batch_group_count"] == 1:
        return Followed(given, (numbers.out_spec[0],))
    if given == (numbers.lhs_spec[1], numbers.rhs_spec[1]):
        adds = eqn.params["feature_group_count"] == 1 and not _rounds(eqn)
        return Followed(given, ("add",)) if adds else None
    return None


def _attention(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """Each sequence of the batch attends to itself; what is dropped depends on its place in it."""
    rule = rule_of(eqn)
    if rule is None or eqn.params["dropout_rate"]:
        return None
    operands = tuple(names.index(_BATCH) if _BATCH in names else None for names in rule.operands)
    if any(d not in (None, p) for d, p in zip(dims, operands, strict=True)):
        return None
    if any(_BATCH not in names for names in rule.results):
        return None  # the gradient of a bias that all sequences share
    return Followed(operands, tuple(names.index(_BATCH) for names in rule.results))


_BATCH = "b"  # the batch's name in the rule of cuDNN's attention


def _stack(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    if (dim := _only(dims)) is None:
        return None
    return Followed((dim,) * len(dims), (dim + (dim >= eqn.params["axis"]),))


def _unstack(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim, axis = dims[0], eqn.params["axis"]
    if dim is None or dim == axis:
        return None
    return Followed((dim,), (dim - (dim > axis),) * len(eqn.outvars))


def _tile(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    dim = dims[0]
    if dim is None or eqn.params["reps"][dim] != 1:
        return None
    return Followed((dim,), (dim,))


def _sharding_constraint(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """A part lies like the whole, if its rows divide among the devices."""
    dim, sharding = dims[0], eqn.params["sharding"]
    assert dim is not None
    shape = _halved(eqn.invars[0].aval.shape, dim, cut)
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return None
    return Followed((dim,), (dim,))


def _device_put(eqn: Any, dims: Dims, cut: RowSplit) -> Followed | None:
    """A move to another kind of memory moves each part; a sharding has to divide the parts too."""
    for dim, var, place in zip(dims, eqn.invars, eqn.params["devices"], strict=True):
        if place is None or isinstance(place, jax.memory.Space) or dim is None:
            continue
        if not isinstance(place, jax.sharding.NamedSharding):
            return None
        try:
            place.shard_shape(_halved(var.aval.shape, dim, cut))
        except ValueError:
            return None
    known = tuple(dim for dim in dims if dim is not None)
    return Followed(known, known) if len(known) == len(dims) else None


_RULES: dict[str, Callable[[Any, Dims, RowSplit], Followed | None]] = {
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reduce_sum": _reduction("add"),
    "reduce_max": _reduction("max"),
    "reduce_min": _reduction("min"),
    "reduce_and": _reduction("and"),
    "reduce_or": _reduction("or"),
    "reduce_xor": _reduction("xor"),
    "reduce_prod": _reduction("mul"),
    "argmax": _reduction(None),
    "argmin": _reduction(None),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
    "rev": _along("dimensions"),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "split": _along("axis"),
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "sharding_constraint": _sharding_constraint,
    "device_put": _device_put,
    "top_k": _top_k,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul"), _scatter),
    "conv_general_dilated": _convolution,
    **dict.fromkeys((FORWARD, BACKWARD), _attention),
}
