"""Define operations that partition themselves, and have no gradients of their own kind.

Their gradients are other operations, by `jax.custom_vjp`; those of gradients are the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.interpreters import ad, batching

from jaxoverlap._jax.operations import lowering
from jaxoverlap._jax.operations.question import Partition

Plain = Callable[..., list[Array]]


def operation(
    name: str,
    num_operands: int,
    plain: Callable[..., Plain],
    rule: Callable[..., tuple[str, dict[str, Any]]],
    partition: Callable[..., Partition],
    batch: Callable[..., tuple[list[Array], list[int]]],
) -> Callable[..., list[Array]]:
    """Define an operation; return the function that binds it.

    Args:
        name: its name, in `plan.operations`.
        num_operands: the number of its operands.
        plain, rule, partition: as in `lowering.lower_as`.
        batch: makes of the function that binds it, its operands and their mapped dims (None: not
            mapped) the results and their mapped dims.
    """
    primitive = lowering.primitive(name)

    def bind(*operands: Any, **params: Any) -> list[Array]:
        return primitive.bind(*operands, **params)

    def abstract(*avals: Any, **params: Any) -> list[Any]:
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return list(jax.make_jaxpr(plain(**params))(*structs).out_avals)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        given = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(plain(**params), tuple(primals), tuple(given))

    def batched(operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        return batch(lambda *operands: bind(*operands, **params), operands, dims)

    primitive.def_impl(lambda *operands, **params: plain(**params)(*operands))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    places = range(num_operands)
    lowering.lower_as(primitive, plain, rule, partition, lambda **_: places, shares=False)
    return bind
