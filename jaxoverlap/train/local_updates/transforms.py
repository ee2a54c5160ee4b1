"""Outer updates as optax transformations: CO2's penalty, clip and rates, and SlowMo's scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxoverlap.train.dtypes import at_least_float32

# (size of the last outer update, size of the outer gradient) -> what the gradient is divided by.
Penalty = Callable[[jax.Array, jax.Array], jax.Array]
Over = Literal["all", "leaf", "element"]
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
    """The state of what is penalized, and the size of its last update (`Over`)."""

    inner: Any
    moved: Any


def penalized(
    inner: optax.GradientTransformation, penalty: Penalty, over: Over = "all"
) -> optax.GradientTransformation:
    """Divide an outer gradient that is a round late by a penalty, before another transformation.

    The gradient was found from where the last round began, and is applied to where this one began.
    The difference is the last update, whose size the state keeps: the norm of all of it, float32
    []; of each leaf, float32 [leaves]; or each element's modulus, like the parameters.

    Args:
        inner: what makes the update.
        penalty: of the sizes of the last update and of the gradient, arrays of one shape; taken as
            1 where it is less.
        over: what has a size, and a penalty, of its own.
    """

    def by(moved: jax.Array, size: jax.Array) -> jax.Array:
        return jnp.maximum(penalty(moved, size), 1.0)

    def divided(updates: Any, moved: Any) -> Any:
        if over == "element":
            factors = jax.tree.map(by, moved, _sizes(updates, over))
        else:
            leaves, structure = jax.tree.flatten(updates)
            each = jnp.broadcast_to(by(moved, _sizes(updates, over)), len(leaves))
            factors = structure.unflatten(list(each))
        return jax.tree.map(lambda g, f: (g / f).astype(g.dtype), updates, factors)

    def init(params: Any) -> PenalizedState:
        return PenalizedState(inner.init(params), _sizes(optax.tree.zeros_like(params), over))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        moves, new = inner.update(divided(updates, state.moved), state.inner, params)
        return moves, PenalizedState(new, _sizes(moves, over))

    return optax.GradientTransformation(init, update)


def _sizes(tree: Any, over: Over) -> Any:
    """Return the norm of a tree, of each leaf, or the modulus of each element, in float32."""
    if over == "all":
        return norm(tree)
    if over == "leaf":
        return jnp.stack([norm(leaf) for leaf in jax.tree.leaves(tree)] or [jnp.zeros(())])
    return jax.tree.map(lambda x: jnp.abs(x).astype(jnp.float32), tree)


class LeafRatesState(NamedTuple):
    """The state from which the rates of leaves are found (`rate_by_leaf`).

    Attributes:
        inner: the state of what makes the update.
        gradient: the last outer gradient.
        moves: the last updates, the newest last: two with a delay, one without.
        products, squares: running sums of a leaf, float32 [leaves].
    """

    inner: Any
    gradient: Any
    moves: tuple[Any, ...]
    products: jax.Array
    squares: jax.Array


def rate_by_leaf(
    inner: optax.GradientTransformation, *, delay: int, decay: float = 0.9
) -> optax.GradientTransformation:
    """Scale each leaf's update by a rate found from the change of its outer gradients.

    Let a round cover the share c of the way x to the optimum: its outer gradient is c x. With rate
    a and a delay of a round x_{t+1} = x_t - a c x_{t-1}, whose modes z obey z² - z + a c = 0. They
    decay fastest at a c = 1/4 (without a delay z = 1 - a c, and a c = 1 is best), so a = 1 / (4 c).

    Two outer gradients differ by c times the move between the starts of their rounds. So with y
    their differences and u the moves, c is found by least squares over past rounds, in each leaf:

        c = Σ decay^age <y, u> / Σ decay^age <u, u>;  a = min(1, 1 / (4 c)), and at least 1/4

    It is this project's own. It keeps three copies of the parameters, two without a delay.

    Args:
        inner: what makes the update at rate 1, without momentum.
        delay: of the outer gradients, in rounds, 0 or 1.
        decay: of what past rounds count.
    """
    best = 0.25 if delay else 1.0

    def init(params: Any) -> LeafRatesState:
        zeros = optax.tree.zeros_like(params)
        sums = jnp.zeros(max(len(jax.tree.leaves(params)), 1), jnp.float32)
        return LeafRatesState(inner.init(params), zeros, (zeros,) * (delay + 1), sums, sums)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        moved, *later = state.moves
        change = jax.tree.map(jnp.subtract, updates, state.gradient)
        products = decay * state.products + _dots(change, moved)
        squares = decay * state.squares + _dots(moved, moved)
        share = products / jnp.where(squares > 0, squares, 1.0)
        rates = jnp.clip(best / jnp.maximum(share, _TINY), 0.25, 1.0)
        steps, new = inner.update(updates, state.inner, params)
        leaves, structure = jax.tree.flatten(steps)
        scaled = [(r * s).astype(s.dtype) for r, s in zip(rates, leaves, strict=True)]
        steps = structure.unflatten(scaled)
        return steps, LeafRatesState(new, updates, (*later, steps), products, squares)

    return optax.GradientTransformation(init, update)


def _dots(one: Any, other: Any) -> jax.Array:
    """Return the real part of each leaf's inner product, float32 [leaves]."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        wide = at_least_float32(x.dtype)
        return jnp.vdot(x.astype(wide), y.astype(wide)).real.astype(jnp.float32)

    return jnp.stack([dot(x, y) for x, y in pairs])


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
