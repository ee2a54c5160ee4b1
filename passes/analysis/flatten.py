"""Inline inner jits that hold matmuls, so that matmuls that share an operand are in one body.

    q = jit[name=_einsum jaxpr={ lambda ; x w. let y = dot_general x w in (y,) }] x w

->  q = dot_general x w

`jnp.einsum`, `jnp.matmul` and most of a user's own helpers are jits of their own: without this,
three projections that read one value are in three bodies, and each would gather it for itself.

Only jits that hold a matmul are opened. One that says more than "compile this" (shardings,
donation, compiler options, a wish about inlining, constants, effects) stays as it is; so do the
bodies of primitives that have rules of their own, but for shard_map.

    q, k = matmul_group[...] x wq wk

->  q = dot_general x wq ;  k = dot_general x wk

Operations of `jaxoverlap.ops` are taken over so: they are then matmuls like any other, and no
longer partition themselves. Where the user leaves them (`operations="leave"`) they stay.

    k = sharding_constraint[...] x ;  v = sharding_constraint[...] x     # the same one

->  k = sharding_constraint[...] x ;  v = k

A value that is constrained twice alike becomes one value. XLA gathers it once for each constraint:
MaxText states one for queries and one for keys and values, and so gathers its stream twice.
"""

from __future__ import annotations

from typing import Any

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import TRANSPARENT, has_matmul
from jaxoverlap.passes.analysis.matmul_group import MATMUL_GROUP


def flatten(jaxpr: Any, *, take_over: bool = True) -> Any:
    """Inline the plain jits around matmuls, and merge equal constraints; it computes the same.

    Args:
        jaxpr: the step.
        take_over: whether to open the groups of matmuls that partition themselves.
    """
    return _body(jaxpr, take_over) if any(map(has_matmul, jaxpr.eqns)) else jaxpr


def _body(jaxpr: Any, take_over: bool) -> Any:
    renamed: dict[Any, Any] = {}
    constraints: dict[Any, list[Any]] = {}

    def now(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else renamed.get(atom, atom)

    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[now(v) for v in eqn.invars])
        if eqn.primitive.name == "sharding_constraint" and not compat.is_literal(eqn.invars[0]):
            alike = constraints.setdefault(eqn.invars[0], [])
            if first := next((e for e in alike if e.params == eqn.params), None):
                renamed[eqn.outvars[0]] = first.outvars[0]
                continue
            alike.append(eqn)
        if eqn.primitive.name == MATMUL_GROUP:
            group = eqn.params["group"].jaxpr([v.aval for v in eqn.invars])
            inner, results = (
                inlining.opened(eqn, group, relined=True) if take_over else ([eqn], eqn.outvars)
            )
            eqns.extend(inner)
            renamed.update(zip(eqn.outvars, results, strict=True))
            continue
        opaque = eqn.primitive.name not in (*TRANSPARENT, "shard_map")
        if opaque or not has_matmul(eqn):
            eqns.append(eqn)
            continue
        eqn = compat.map_jaxprs(lambda inner: _body(inner, take_over), eqn)
        if not compat.is_plain_jit(eqn):
            eqns.append(eqn)
            continue
        inner, results = inlining.opened_jit(eqn)
        eqns.extend(inner)
        renamed.update(zip(eqn.outvars, results, strict=True))
    return jaxpr.replace(eqns=eqns, outvars=[now(v) for v in jaxpr.outvars])
