"""The primitive of matmuls that are one operation: its value, gradients and batches.

All of these are operations of the same kind. The gradients of one operation are one operation too:
what they share (the gradient of the result, an operand) is gathered once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching

from jaxoverlap._jax.operations import lowering
from jaxoverlap.ops.partition import partition
from jaxoverlap.ops.rule import rule
from jaxoverlap.passes.analysis.matmul_group import MATMUL_GROUP, MatmulGroup, Product

Outputs = Sequence[Sequence[Product]]

matmul_group_p = lowering.primitive(MATMUL_GROUP)


def bind(outputs: Outputs, *operands: Any) -> list[Array]:
    """Bind matmuls as one operation; an operand that none of them reads is left out."""
    used = sorted({n for output in outputs for p in output for n in (p.lhs, p.rhs)})
    position = {n: i for i, n in enumerate(used)}
    group = MatmulGroup(
        tuple(
            tuple(replace(p, lhs=position[p.lhs], rhs=position[p.rhs]) for p in output)
            for output in outputs
        )
    )
    return matmul_group_p.bind(*(operands[n] for n in used), group=group)


def _abstract(*avals: Any, group: MatmulGroup) -> list[Any]:
    return list(group.jaxpr(avals).out_avals)


matmul_group_p.def_impl(lambda *operands, group: group(*operands))
matmul_group_p.def_abstract_eval(_abstract)
lowering.lower_as(
    matmul_group_p,
    plain=lambda group: group,
    rule=rule,
    partition=partition,
    operands=lambda group: [n for p in group.products for n in (p.lhs, p.rhs)],
)


# -- gradients ------------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, group: MatmulGroup
) -> tuple[list[Any], list[Any]]:
    """Compute the results, and their tangents: one more operation, linear in all tangents."""
    results = matmul_group_p.bind(*primals, group=group)
    moving = [not isinstance(t, ad.Zero) for t in tangents]
    operands, count = [*primals, *tangents], len(primals)
    outputs = [
        [
            varied
            for p in output
            for varied, moves in (
                (replace(p, lhs=p.lhs + count), moving[p.lhs]),
                (replace(p, rhs=p.rhs + count), moving[p.rhs]),
            )
            if moves
        ]
        for output in group.outputs
    ]
    made = iter(bind([o for o in outputs if o], *operands) if any(outputs) else ())
    zeros = (ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results)
    return results, [next(made) if o else z for o, z in zip(outputs, zeros, strict=True)]


def _transpose(cts: Sequence[Any], *operands: Any, group: MatmulGroup) -> list[Any]:
    """Compute the gradients of the operands that the results are linear in: one operation."""
    count = len(operands)
    terms: dict[int, list[tuple[Product, tuple[int, ...]]]] = {}
    for number, (ct, output) in enumerate(zip(cts, group.outputs, strict=True)):
        if isinstance(ct, ad.Zero):
            continue
        for p in output:
            linear = p.lhs if ad.is_undefined_primal(operands[p.lhs]) else p.rhs
            aval = [getattr(operands[n], "aval", operands[n]) for n in (p.lhs, p.rhs)]
            gradient = _gradient(p, linear == p.lhs, aval, number + count)
            terms.setdefault(linear, []).append(gradient)
    gradients: list[Any] = [None] * count
    outputs: list[list[Product]] = []
    ends: list[tuple[int, tuple[int, ...]]] = []  # whose gradient, and in which order of dims
    for linear, made in terms.items():
        for order, dtype in dict.fromkeys((order, p.dtype) for p, order in made):
            outputs.append([p for p, its in made if (its, p.dtype) == (order, dtype)])
            ends.append((linear, order))
    values = bind(outputs, *operands, *cts) if outputs else []
    for (linear, order), value in zip(ends, values, strict=True):
        value = lax.transpose(value, order) if order != tuple(range(len(order))) else value
        value = value.astype(operands[linear].aval.dtype)
        before = gradients[linear]
        gradients[linear] = value if before is None else ad.add_jaxvals(before, value)
    zeros = (ad.Zero(o.aval) if ad.is_undefined_primal(o) else None for o in operands)
    return [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]


def _gradient(
    p: Product, of_lhs: bool, avals: Sequence[Any], ct: int
) -> tuple[Product, tuple[int, ...]]:
    """Return the matmul of one operand's gradient, and the order that its dims are wanted in.

    Args:
        p: a matmul that is linear in that operand.
        of_lhs: whether it is the left one.
        avals: the types of both operands.
        ct: the number of the result's gradient.
    """
    einsum = p.einsum(*avals)
    wanted, other = (einsum.lhs, einsum.rhs) if of_lhs else (einsum.rhs, einsum.lhs)
    numbers, made = numbers_of(einsum.out, other, wanted)
    product = Product(ct, p.rhs if of_lhs else p.lhs, numbers, p.precision, p.dtype)
    return product, tuple(made.index(c) for c in wanted)


def numbers_of(lhs: str, rhs: str, out: str) -> tuple[tuple[Any, ...], str]:
    """Return `lax.dot_general`'s dimension numbers of an einsum, and the order of its result."""
    batch = [c for c in lhs if c in rhs and c in out]
    summed = [c for c in lhs if c in rhs and c not in out]
    made = "".join(
        (
            *batch,
            *(c for c in lhs if c not in (*batch, *summed)),
            *(c for c in rhs if c not in (*batch, *summed)),
        )
    )

    def dims(letters: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(lhs.index(c) for c in letters), tuple(rhs.index(c) for c in letters)

    return (dims(summed), dims(batch)), made


ad.primitive_jvps[matmul_group_p] = _jvp
ad.primitive_transposes[matmul_group_p] = _transpose


# -- batches --------------------------------------------------------------------------------------


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, group: MatmulGroup
) -> tuple[list[Any], list[Any]]:
    """Compute a batch of groups: its dim is a batch dim, or a free one of the batched operand."""
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    front = [o if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]
    batched = [d is not None for d in dims]
    outputs: list[list[Product]] = []
    positions: list[int | None] = []
    for output in group.outputs:
        made = [_batched(p, batched[p.lhs], batched[p.rhs], front[p.lhs].ndim) for p in output]
        if (
            len({position for _, position in made}) > 1
        ):  # the terms of a sum want the dim in one place
            for n in {n for p in output for n in (p.lhs, p.rhs) if not batched[n]}:
                front[n] = jnp.broadcast_to(front[n], (size, *front[n].shape))
                batched[n] = True
            return _batch(front, [0 if b else None for b in batched], group=group)
        outputs.append([p for p, _ in made])
        positions.append(made[0][1])
    results = bind(outputs, *front)
    return results, positions


def _batched(p: Product, lhs: bool, rhs: bool, lhs_ndim: int) -> tuple[Product, int | None]:
    """Return a matmul whose operands may have a batch's dim in front, and where its result has it.

    Args:
        p: the matmul.
        lhs, rhs: whether its operands have that dim.
        lhs_ndim: the dims of the left operand, with that one.
    """

    def dims(pair: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(d + lhs for d in pair[0]), tuple(d + rhs for d in pair[1])

    summed, batch = map(dims, p.dimension_numbers)
    position: int | None = None
    if lhs and rhs:
        batch, position = ((0, *batch[0]), (0, *batch[1])), 0
    elif lhs:
        position = len(batch[0])
    elif rhs:
        position = lhs_ndim - len(summed[0])
    return replace(p, dimension_numbers=(summed, batch)), position


batching.primitive_batchers[matmul_group_p] = _batch
