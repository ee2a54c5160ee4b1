"""Sharding rules of custom_partitioning and of fused attention, cuDNN's and Transformer Engine's.

    q: b t n h ;  k: b s n h ;  v: b s n w   ->   out: b t n w ;  statistics: b n t

A rule names the dims of operands and results; dims of one name are one and the same, and are
sharded alike. Shardy reads it to propagate shardings (`jax.experimental.custom_partitioning`), and
the passes here to follow dims through an operation whose inside they do not see. Those of cuDNN's
attention and of Transformer Engine's are written down here, as they are made only while the step is
lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxoverlap._jax import custom_partitioners
from jaxoverlap.passes.analysis.matmul_group import MATMUL_GROUP

Factors = tuple[str, ...]
"""The name of each dim of a value, in order; of a compound dim the major factor's. Empty for an
operand that is a placeholder of size 0."""

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
CUDNN_BACKWARD = "dot_product_attention_bwd_wrapper"
TE_FORWARD = "te_fused_attn_forward_ffi_wrapper"
TE_BACKWARD = "te_fused_attn_backward_ffi_wrapper"
_BNTH = 1  # value of the parameter `layout` with heads before the sequence; 0: BTNH


class ShardingRule(NamedTuple):
    """The factors of each operand and result of an equation."""

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]


def partitions_itself(eqn: Any) -> bool:
    """Return whether a Python function decides how XLA's partitioner splits an equation."""
    attention = (CUDNN_FORWARD, CUDNN_BACKWARD, TE_FORWARD, TE_BACKWARD)
    return eqn.primitive.name in ("custom_partitioning", MATMUL_GROUP, *attention)


def rule_of(eqn: Any) -> ShardingRule | None:
    """Return the sharding rule of an equation; None if it has none, or one that is not known."""
    name = eqn.primitive.name
    if name == "custom_partitioning":
        mappings = custom_partitioners.sharding_rule(eqn)
        if mappings is None:
            return None
        return ShardingRule(
            tuple(map(_expanded, mappings[0], eqn.invars)),
            tuple(map(_expanded, mappings[1], eqn.outvars)),
        )
    if name in (CUDNN_FORWARD, CUDNN_BACKWARD):
        return _attention(eqn)
    if name in (TE_FORWARD, TE_BACKWARD):
        return _te_attention(eqn)
    if name == MATMUL_GROUP:
        return ShardingRule(*eqn.params["group"].factors([v.aval for v in eqn.invars]))
    return None


def _expanded(mapping: Sequence[Any], var: Any) -> Factors:
    """Name each dim: of a dim of several factors the major one, of leading dims one by one."""
    names = [dim if isinstance(dim, str) else dim[0] for dim in mapping]
    if not names or not names[0].startswith(custom_partitioners.BATCHING):
        return tuple(names)
    leading = var.aval.ndim - len(names) + 1
    return (*(f"{names[0]}{d}" for d in range(leading)), *names[1:])


def _attention(eqn: Any) -> ShardingRule | None:
    """Return the rule of cuDNN's attention; None with paged keys or a `score_mod`.

    Heads of keys and values are factor m where there are fewer than query heads, which are n.
    """
    query, key = (v.aval.shape for v in eqn.invars[:2])
    pages = any(v.aval.size for v in eqn.invars[8:10])
    if pages or eqn.params.get("score_mod") is not None:
        return None
    heads_first = eqn.params["layout"] == _BNTH
    kv_heads = "n" if query[1 if heads_first else 2] == key[1 if heads_first else 2] else "m"

    def placed(length: str, heads: str, size: str) -> Factors:
        return ("b", heads, length, size) if heads_first else ("b", length, heads, size)

    q, k, v = placed("t", "n", "h"), placed("s", kv_heads, "h"), placed("s", kv_heads, "w")
    out, statistics = placed("t", "n", "w"), ("b", "n", "t")
    bias = eqn.invars[3].aval.shape
    of_bias = tuple(
        name if size > 1 else f"one {d}"
        for d, (name, size) in enumerate(zip("bnts", bias, strict=False))
    )
    # bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, page_table_k, page_table_v
    given = [q, k, v, of_bias, ("b",), ("b",), ("b", "segments"), ("b", "segments"), (), ()]
    given += [statistics, out, out] if eqn.primitive.name == CUDNN_BACKWARD else []
    made = [q, k, v, of_bias] if eqn.primitive.name == CUDNN_BACKWARD else [out, statistics]
    operands = tuple(
        names if v.aval.size else () for names, v in zip(given, eqn.invars, strict=True)
    )
    return ShardingRule(operands, tuple(made[: len(eqn.outvars)]))


def batch_elements_independent(eqn: Any) -> bool:
    """Return whether an attention computes each sequence of its batch alone.

    Not with dropout, whose mask depends on the position in the batch.
    """
    if eqn.primitive.name in (CUDNN_FORWARD, CUDNN_BACKWARD):
        return not eqn.params["dropout_rate"]
    if eqn.primitive.name in (TE_FORWARD, TE_BACKWARD):
        return not getattr(eqn.params.get("config"), "dropout_probability", 1.0)
    return False


# Transformer Engine's operands behind q, k and v: forward, and backward. Each has a batch or none.
_TE_OPERANDS = {
    TE_FORWARD: ("bias", "softmax_offset", "seed", *["sequences"] * 8),
    TE_BACKWARD: (
        *("bias", "softmax_offset", "softmax_aux", "rng_state", "out", "out"),
        *["sequences"] * 8,
    ),
}


def _te_attention(eqn: Any) -> ShardingRule | None:
    """Return the rule of Transformer Engine's attention, q, k and v apart or packed.

    None for a batch of several dims, or other operands than its source of 2026 has.
    """
    name, avals = eqn.primitive.name, [v.aval for v in eqn.invars]
    others = _TE_OPERANDS[name]
    if len(avals) != 3 + len(others) or avals[0].ndim not in (4, 5):
        return None
    q, k, v = _te_packed(avals)
    heads, length = avals[0].shape[-2], avals[0].shape[1]
    out = ("b", "t", "n", "w")

    def factors(index: int, kind: str, aval: Any) -> Factors:
        own = tuple(f"{kind} {index} {d}" for d in range(aval.ndim))
        if kind == "out" or not aval.size:
            return out if aval.size else ()
        if kind == "softmax_aux":
            by_head = aval.shape[1:3] == (heads, length)
            return ("b", *(("n", "t") if by_head else ("t", "n")), own[3])
        if kind == "sequences":
            return ("b", *own[1:]) if aval.shape[0] == avals[0].shape[0] else own
        if kind == "bias":
            pairs = zip("bnts", own, aval.shape, strict=True)
            return tuple(factor if size > 1 else one for factor, one, size in pairs)
        return own

    rest = zip(others, avals[3:], strict=True)
    operands = (q, k, v, *(factors(i, kind, aval) for i, (kind, aval) in enumerate(rest)))
    if name == TE_BACKWARD:
        return ShardingRule(operands, operands[:5])  # gradients: q, k, v, bias, softmax_offset
    results = zip(("out", "softmax_aux", "rng_state", "max_logit"), eqn.outvars, strict=True)
    # 20 on: no operand has such an index, so results share no factor with one by chance
    return ShardingRule(
        operands, tuple(factors(20 + i, kind, v.aval) for i, (kind, v) in enumerate(results))
    )


def _te_packed(avals: Any) -> tuple[Factors, Factors, Factors]:
    """Return the factors of q, k and v: apart, k with v, or all in one; the others are empty."""
    q, k, _ = avals[:3]
    if q.ndim == 5:
        return ("b", "t", "three", "n", "h"), (), ()
    kv_heads = "n" if q.shape[-2] == k.shape[-2] else "m"
    if k.ndim == 5:
        return ("b", "t", "n", "h"), ("b", "s", "two", kv_heads, "h"), ()
    return ("b", "t", "n", "h"), ("b", "s", kv_heads, "h"), ("b", "s", kv_heads, "w")
