"""A stand-in for Transformer Engine's attention: its primitives' names, operands and rules.

Written from its published source (transformer_engine/jax/cpp_extensions/attention.py), as it is not
installed here; the kernels are matmuls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import dispatch  # noqa: TID251 # as Transformer Engine does
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.attention import stand_in, stand_in_backward


class Config(NamedTuple):
    """The one parameter of both primitives."""

    dropout_probability: float = 0.0
    scaling_factor: float = 0.5


EXACT = Config()


def _forward(q, k, v, *others, config):
    out, sums = stand_in(q, k, v, causal=True, scale=config.scaling_factor)
    return out, sums[..., None], jnp.zeros((others[2].shape[0], 4), jnp.uint32), jnp.zeros(0)


def _backward(q, k, v, bias, offset, sums, state, out, to_out, *others, config):
    scale = config.scaling_factor
    made = stand_in_backward(q, k, v, out, sums[..., 0], to_out, causal=True, scale=scale)
    return *made, bias, offset


def _primitive(name: str, compute: Any) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    dispatch.prim_requires_devices_during_lowering.add(primitive)

    def abstract(*avals, config):
        like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return jax.make_jaxpr(lambda *a: compute(*a, config=config))(*like).out_avals

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(
            lambda *a, config: _partitioned(compute, config, len(a))(*a), multiple_results=True
        ),
    )
    primitive.def_impl(lambda *a, config: list(compute(*a, config=config)))
    return primitive


def _partitioned(compute: Any, config: Config, count: int) -> Any:
    """Partition over batch and heads, as Transformer Engine does."""

    def lowered(operands):
        return list(compute(*operands, config=config))

    def partition(mesh, operands, results):
        def own(x):
            return NamedSharding(mesh, x.sharding.spec if x.shape else P())

        inside = [jax.tree.map(own, x) for x in (operands, results)]
        return mesh, lowered, inside[1], tuple(inside[0])

    def rule(mesh, operands, results):
        given = [(f"…{i}",) for i in range(count)]
        if count == 17:
            return SdyShardingRule(tuple(given), tuple(given[:5]))
        given[0] = ("…0", "seqlen", "head", "hidden")
        sums = ("…0", "head", "seqlen", "i")
        return SdyShardingRule(tuple(given), (given[0], sums, ("…20",), ("max_logit",)))

    call = custom_partitioning(lowered)
    call.def_partition(partition=partition, sharding_rule=rule)
    return lambda *operands: call(list(operands))


FORWARD = _primitive("te_fused_attn_forward_ffi_wrapper", _forward)
BACKWARD = _primitive("te_fused_attn_backward_ffi_wrapper", _backward)


def attention(q: Any, k: Any, v: Any, config: Config = EXACT) -> Any:
    """Attend causally, f[batch, sequence, heads, head], with lengths that hide nothing."""

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def others(q):
        lengths, none = jnp.full(q.shape[0], q.shape[1], jnp.int32), jnp.zeros(0, jnp.int32)
        return lengths, lengths, *[none] * 6

    def forward(q, k, v):
        nothing = jnp.zeros(0, q.dtype)
        seed = jnp.zeros((1, 2), jnp.uint32)
        made = FORWARD.bind(q, k, v, nothing, jnp.zeros(0), seed, *others(q), config=config)
        return made[0], (q, k, v, *made[:3])

    def backward(kept, to_out):
        q, k, v, out, sums, state = kept
        nothing = jnp.zeros(0, q.dtype), jnp.zeros(0)
        operands = q, k, v, *nothing, sums, state, out, to_out, *others(q)
        return tuple(BACKWARD.bind(*operands, config=config)[:3])

    attend.defvjp(forward, backward)
    return attend(q, k, v)
