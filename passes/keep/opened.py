"""Open what only wraps equations, so that a body's values all stand in it.

    y = jit[name=gelu jaxpr={ ... }] x ;  z = remat[differentiated=False jaxpr={ ... }] y

->  the equations of both

A remat that is not differentiated is the forward pass of one inside another; XLA gets it as a call.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.jaxprs import REMATS, TRANSPARENT


def opened(jaxpr: Any, *, remats: bool = False) -> Any:
    """Return a jaxpr whose plain jits, and remats that are not differentiated, are opened.

    With `remats` those of scans' bodies are too, which XLA gets as they are (`prevent_cse=False`).
    Every equation with a body, and every result that nobody reads, is a new one, so that it can be
    told from those of other places.
    """
    renamed: dict[Any, Any] = {}

    def now(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else renamed.get(atom, atom)

    eqns: list[Any] = []
    for given in jaxpr.eqns:
        eqn = given.replace(invars=[now(v) for v in given.invars])
        if _is_wrapper(eqn) or (remats and _is_free(eqn)):
            inner, results = inlining.opened(eqn, opened(eqn.params["jaxpr"], remats=remats))
            eqns += inner
            renamed.update(zip(eqn.outvars, results, strict=True))
            continue
        if eqn.primitive.name in (*TRANSPARENT, "shard_map"):
            eqn = compat.map_jaxprs(functools.partial(opened, remats=remats), eqn)
        eqns.append(
            eqn.replace(
                outvars=[compat.like_var(v) if compat.is_dropped(v) else v for v in eqn.outvars]
            )
        )
    return jaxpr.replace(eqns=eqns, outvars=[now(v) for v in jaxpr.outvars])


def _is_wrapper(eqn: Any) -> bool:
    if eqn.primitive.name in REMATS:
        return not eqn.params["differentiated"]
    return compat.is_plain_jit(eqn)


def _is_free(eqn: Any) -> bool:
    """Return whether an equation is a remat of which XLA may share what it computes."""
    return eqn.primitive.name in REMATS and not np.any(eqn.params["prevent_cse"])
