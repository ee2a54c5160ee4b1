"""Outer updates as optax transformations: CO2's penalty and clip, and SlowMo's scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxoverlap.train.dtypes import at_least_float32

# (norm of the last outer update, norm of the outer gradient) -> what the gradient is divided by.
Penalty = Callable[[jax.Array, jax.Array], jax.Array]
_TINY = 1e-12


class ClippedMomentumState(NamedTuple):
    """The outer momentum."""

    momentum: optax.Updates


def clipped_momentum(momentum: float, clip: float | None = None) -> optax.GradientTransformation:
    """Accumulate momentum, m = momentum · m + g, each element clipped to [-clip, clip].

    A complex element keeps its phase; its modulus is at most `clip`.

    Source: CO2 (arXiv 2401.16265), whose clip is on the momentum, element by element: the state
    for the next round is clipped too. The authors' released code calls the clip and drops its
    result; this one clips.
    """

    def init(params: Any) -> ClippedMomentumState:
        return ClippedMomentumState(optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def one(m: jax.Array, g: jax.Array) -> jax.Array:
            new = momentum * m + g
            if clip is None:
                return new
            if jnp.iscomplexobj(new):
                return new / jnp.maximum(jnp.abs(new) / clip, 1)
            return jnp.clip(new, -clip, clip)

        new = jax.tree.map(one, state.momentum, updates)
        return new, ClippedMomentumState(new)

    return optax.GradientTransformation(init, update)


class PenalizedState(NamedTuple):
    """The state of what is penalized, and the norm of its last update."""

    inner: Any
    moved: jax.Array


def penalized(
    inner: optax.GradientTransformation, penalty: Penalty
) -> optax.GradientTransformation:
    """Divide an outer gradient that is a round late by a penalty, before another transformation.

    The gradient was found from where the last round began, and is applied to where this one began.
    The norm of the difference is that of the last update, which the state keeps.

    Args:
        inner: what makes the update.
        penalty: of the norms of the last update and of the gradient; taken as 1 where it is less.
    """

    def init(params: Any) -> PenalizedState:
        return PenalizedState(inner.init(params), jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        by = jnp.maximum(penalty(state.moved, norm(updates)), 1.0)
        divided = jax.tree.map(lambda g: (g / by).astype(g.dtype), updates)
        moves, new = inner.update(divided, state.inner, params)
        return moves, PenalizedState(new, norm(moves))

    return optax.GradientTransformation(init, update)


def ratio(moved: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return 1 + |last update| / |gradient|: a reconstruction.

    CO2's paper has a penalty that grows with the gap between where two rounds began. Its formula
    was not found, and the released code has a constant, 1. This form is 1 without a gap and grows
    with it; it is this project's own.
    """
    return 1.0 + moved / (gradient + _TINY)


def norm(tree: Any) -> jax.Array:
    """Return the norm of all elements of a tree, float32 []; sums are in float32 at least."""
    wide = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)
    return jnp.asarray(optax.tree.norm(wide), jnp.float32)


def per_inner_rate(rate: float | optax.Schedule) -> optax.GradientTransformation:
    """Divide the outer gradient by the inner learning rate (SlowMo, arXiv 1910.00643, line 7).

    With a rate of 0 workers do not move: the quotient is taken as 0.

    Args:
        rate: the inner learning rate, or a schedule of it by the number of the round.
    """
    if not callable(rate):
        return optax.scale(1 / rate)

    def inverse(count: Any) -> jax.Array:
        found = jnp.asarray(rate(count), jnp.float32)
        return jnp.where(found == 0, 0.0, 1 / jnp.where(found == 0, 1.0, found))

    return optax.scale_by_learning_rate(inverse, flip_sign=False)
