"""Read the sharding rules of operations that partition themselves.

    q: b t n h ;  k: b s n h ;  v: b s n w   ->   out: b t n w ;  statistics: b n t

A rule names the dims of operands and results; dims of one name are one and the same, and are
sharded alike. Shardy reads it to propagate shardings (`jax.experimental.custom_partitioning`), and
the passes here to follow dims through an operation whose inside they do not see. That of cuDNN's
attention is written down here, as JAX makes it only while it lowers the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxoverlap._jax import custom_partitioners
from jaxoverlap.passes.analysis.matmul_group import MATMUL_GROUP

Factors = tuple[str, ...]
"""The names of a value's dims, in order; none for an operand that stands for a missing one."""

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_BNTH = 1  # of the parameter `layout`: heads stand before the sequence; 0: behind it


class ShardingRule(NamedTuple):
    """The factors of each operand and result of an equation."""

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]


def partitions_itself(eqn: Any) -> bool:
    """Return whether a Python function decides how XLA's partitioner splits an equation."""
    return eqn.primitive.name in ("custom_partitioning", MATMUL_GROUP, FORWARD, BACKWARD)


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
    if name in (FORWARD, BACKWARD):
        return _attention(eqn)
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
    """Return the rule of cuDNN's attention; None with pages or a function of the scores.

    Query heads have a name of their own where several share a key.
    """
    query, key = (v.aval.shape for v in eqn.invars[:2])
    pages = any(v.aval.size for v in eqn.invars[8:10])
    if pages or eqn.params.get("score_mod") is not None:
        return None
    heads_first = eqn.params["layout"] == _BNTH
    shared = "n" if query[1 if heads_first else 2] == key[1 if heads_first else 2] else "m"

    def placed(length: str, heads: str, size: str) -> Factors:
        return ("b", heads, length, size) if heads_first else ("b", length, heads, size)

    q, k, v = placed("t", "n", "h"), placed("s", shared, "h"), placed("s", shared, "w")
    out, statistics = placed("t", "n", "w"), ("b", "n", "t")
    bias = eqn.invars[3].aval.shape
    of_bias = tuple(
        name if size > 1 else f"one {d}"
        for d, (name, size) in enumerate(zip("bnts", bias, strict=False))
    )
    given = [q, k, v, of_bias, ("b",), ("b",), ("b", "segments"), ("b", "segments"), (), ()]
    given += [statistics, out, out] if eqn.primitive.name == BACKWARD else []
    made = [q, k, v, of_bias] if eqn.primitive.name == BACKWARD else [out, statistics]
    operands = tuple(
        names if v.aval.size else () for names, v in zip(given, eqn.invars, strict=True)
    )
    return ShardingRule(operands, tuple(made[: len(eqn.outvars)]))
