"""Read a value without its dims of size 1 in one equation, for all matmuls that read it.

    q = dot_general x wq ;  k = dot_general x wk                      # x: [1, s@model, d]

->  v = squeeze x ;  q = reshape (dot_general v wq) ;  k = reshape (dot_general v wk)

XLA leaves such dims out of each matmul by itself, in a reshape for each, before it partitions the
step. Its partitioner then gathers each reshape: q, k and v, or gate and up, gather one value three
times or twice, where a batch of two rows is gathered once.

The same holds for a value that several equations broadcast along a dim of size 1, as all heads of
queries and keys are rotated by the same angles:

    y = mul q cos ;  z = mul k cos                                    # cos: [b, s@model, 1, d]

->  v = squeeze cos ;  y = mul q (broadcast_in_dim v) ;  z = mul k (broadcast_in_dim v)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import Body, map_bodies
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.plan.edits import ShareViews

_BROADCASTING = ("mul", "add", "sub", "div")


def run(step: EditedStep, edits: Sequence[ShareViews]) -> EditedStep:
    """Share the views of a step."""
    return step.to(with_one_view(step.jaxpr))


def with_one_view(jaxpr: Any) -> Any:
    """Let the matmuls of each body share one view of an operand that has dims of size 1.

    Manual code, and matmuls whose types state their shardings, stay as they are.
    """
    return map_bodies(jaxpr, _visit)


def _visit(body: Body) -> list[Any] | None:
    positions = {
        dot.position
        for dot in body.dots
        if dot.eqn.primitive.name == "dot_general"
        and dot.inside is None
        and not compat.stated_axes(dot.eqn)
    }
    if not positions:
        return None
    read = Counter(v for position in positions for v in _narrow(body.eqns[position]))
    shared = {v for v, times in read.items() if times > 1}
    read = Counter(v for eqn in body.eqns for v in _repeated(eqn))
    repeated = {v for v, times in read.items() if times > 1}
    if not shared and not repeated:
        return None
    views: dict[Any, Any] = {}
    eqns: list[Any] = []
    for position, eqn in enumerate(body.eqns):
        if position in positions and not shared.isdisjoint(_narrow(eqn)):
            eqns += _viewed(eqn, views)
        elif again := repeated.intersection(_repeated(eqn)):
            eqns += _broadcast(eqn, again, views)
        else:
            eqns.append(eqn)
    return eqns


def _repeated(eqn: Any) -> set[Any]:
    """Return the operands that an equation broadcasts along an inner dim of size 1.

    Not those that repeat a row's sum or maximum along the row, as norms and softmaxes do: they are
    fused with what made it. Nor vectors: weights are not sharded along what they are repeated.
    """
    if eqn.primitive.name not in _BROADCASTING or compat.stated_axes(eqn):
        return set()
    whole = eqn.outvars[0].aval.shape
    return {v for v in compat.variables(eqn.invars) if _is_repeated(v.aval.shape, whole)}


def _is_repeated(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    if len(shape) != len(whole) or sum(size > 1 for size in shape) < 2 or shape[-1] == 1:
        return False
    return any(one == 1 < all_of_it for one, all_of_it in zip(shape, whole, strict=True))


def _broadcast(eqn: Any, repeated: Collection[Any], views: dict[Any, Any]) -> list[Any]:
    """Return an equation that broadcasts views of some of its operands, and missing views."""
    made, operands, kept = [], [], dict[int, tuple[int, ...]]()
    for number, var in enumerate(eqn.invars):
        if compat.is_literal(var) or var not in repeated:
            operands.append(var)
            continue
        made += _missing_view(var, views, eqn)
        operands.append(views[var])
        kept[number] = tuple(d for d, size in enumerate(var.aval.shape) if size != 1)
    fn = functools.partial(_elementwise, eqn, kept)
    return [*made, *inlining.inline(fn, operands, eqn.outvars, eqn)]


def _elementwise(eqn: Any, kept: Mapping[int, tuple[int, ...]], *operands: jax.Array) -> jax.Array:
    """Compute an equation of operands of which some have lost their dims of size 1."""
    whole = eqn.outvars[0].aval.shape
    full = [
        lax.broadcast_in_dim(x, whole, kept[number]) if number in kept else x
        for number, x in enumerate(operands)
    ]
    return eqn.primitive.bind(*full, **eqn.params)


def _narrow(eqn: Any) -> set[Any]:
    """Return the operands of a matmul that have dims of size 1."""
    return {v for v in compat.variables(eqn.invars) if 1 in v.aval.shape}


def _viewed(eqn: Any, views: dict[Any, Any]) -> list[Any]:
    """Return the equations of a matmul on views of its operands, and those of missing views."""
    made = [e for var in compat.variables(eqn.invars) for e in _missing_view(var, views, eqn)]
    operands = [v if compat.is_literal(v) else views[v] for v in eqn.invars]
    matmul = functools.partial(_matmul, eqn)
    return [*made, *inlining.inline(matmul, operands, eqn.outvars, eqn)]


def _missing_view(var: Any, views: dict[Any, Any], like: Any) -> list[Any]:
    """Give a value a view without its dims of size 1, if it has none; return its equations."""
    if var in views:
        return []
    views[var] = compat.squeezed_var(var) if 1 in var.aval.shape else var
    if views[var] is var:
        return []
    return list(inlining.inline(jnp.squeeze, [var], [views[var]], like))


def _matmul(eqn: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Multiply operands that have lost their dims of size 1, into a result that has them."""
    params = dict(eqn.params)
    shapes = [v.aval.shape for v in eqn.invars]
    params["dimension_numbers"] = tuple(
        tuple(_renumbered(dims, shape) for dims, shape in zip(pair, shapes, strict=True))
        for pair in params["dimension_numbers"]
    )
    return lax.reshape(lax.dot_general_p.bind(lhs, rhs, **params), eqn.outvars[0].aval.shape)


def _renumbered(dims: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number some dims of a shape as they are numbered without its dims of size 1."""
    kept = [d for d, size in enumerate(shape) if size != 1]
    return tuple(kept.index(d) for d in dims if d in kept)
