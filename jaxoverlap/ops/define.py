"""Define operations that partition themselves, and have no gradients of their own kind.

Their gradients are other operations, by `jax.custom_vjp` or by a rule for their tangents; the
derivatives of gradients are the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad, batching, mlir

from jaxoverlap._jax.operations import lowering
from jaxoverlap._jax.operations.question import Partition

Plain = Callable[..., list[Array]]
Batch = Callable[[Plain, int, list[Array]], list[Array]]
"""(the function that binds, size, operands) -> results; the batch's dim is the first of each."""


def operation(
    name: str,
    num_operands: int,
    plain: Callable[..., Plain],
    rule: Callable[..., tuple[str, dict[str, Any]]],
    partition: Callable[..., Partition],
    batch: Batch,
    jvp: Callable[..., tuple[list[Array], list[Array]]] | None = None,
) -> Callable[..., list[Array]]:
    """Define an operation; return the function that binds it.

    Args:
        name: its name, in `plan.operations`.
        num_operands: the number of its operands.
        plain, rule, partition: as in `lowering.lower_as`.
        batch: computes it for each of a batch at once.
        jvp: makes of primals and tangents (those of integers are symbolic zeros) the results and
            their tangents; none: as of `plain`.
    """
    primitive = lowering.primitive(name)

    _define(primitive, plain, batch, jvp)
    positions = range(num_operands)
    lowering.lower_as(primitive, plain, rule, partition, lambda **_: positions, shares=False)
    return primitive.bind


def linear(
    name: str,
    plain: Plain,
    transpose: Callable[..., list[Any]],
    batch: Batch,
) -> Callable[..., list[Array]]:
    """Define a computation that XLA partitions, whose transpose is given; return what binds it.

    Args:
        name: its name in jaxprs.
        plain: computes it.
        transpose: makes of its results' cotangents and its operands those of the operands.
        batch: as of `operation`.
    """
    primitive = lowering.primitive(name)
    _define(primitive, lambda: plain, batch, None)
    ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    return primitive.bind


def _define(
    primitive: Any,
    plain: Callable[..., Plain],
    batch: Batch,
    jvp: Callable[..., tuple[list[Array], list[Array]]] | None,
) -> None:
    """Define a primitive's value, type, tangents and batches."""

    def abstract(*avals: Any, **params: Any) -> list[Any]:
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return list(jax.make_jaxpr(plain(**params))(*structs).out_avals)

    def plain_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        given = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(plain(**params), tuple(primals), tuple(given))

    def batched(operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
        front = [
            jnp.broadcast_to(o, (size, *o.shape)) if d is None else jnp.moveaxis(o, d, 0)
            for o, d in zip(operands, dims, strict=True)
        ]
        results = batch(lambda *given: primitive.bind(*given, **params), size, front)
        return results, [0] * len(results)

    primitive.def_impl(lambda *operands, **params: plain(**params)(*operands))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp or plain_jvp
    batching.primitive_batchers[primitive] = batched
