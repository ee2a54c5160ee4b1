"""Define `mezo`: MeZO's estimate of the gradient, and the update that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxoverlap._util.expect import expect, expect_one_of
from jaxoverlap._util.limits import number, whole
from jaxoverlap.train.arguments import function, rate
from jaxoverlap.train.dtypes import at_least_float32
from jaxoverlap.train.zeroth_order.directions import (
    Draw,
    chances,
    direction,
    in_12_bits,
    new_key,
    numbers,
    stochastic,
)

_NOT_DECAYED = re.compile(r"(bias|scale|(layer|rms|batch|group)?norm)(e?s)?|ln")  # whole words
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


Rounding = Literal["stochastic", "nearest"]


class MezoState(NamedTuple):
    """What the next direction follows from: the run's key, and the number of the step, int32 []."""

    key: jax.Array
    step: jax.Array


class Pending(NamedTuple):
    """The update of one step: all that is needed to make it later.

    Attributes:
        scalars: float32 [directions], the projected gradients.
        rate: float32 [], the learning rate of its own step; 0 where nothing is pending.
        step: int32 [], its step, which its directions follow from.
    """

    scalars: jax.Array
    rate: jax.Array
    step: jax.Array


def decays(path: str, leaf: Any) -> bool:
    """Return whether a parameter is a matrix, by its dims and its name.

    Biases and the parameters of norms are recognised by their names (bias, scale, norm,
    layernorm, ln), as stacked layers give them a dim more. Source: MeZO's trainer (arXiv
    2305.17333), which leaves out biases and layer norms.
    """
    words = (word.lower() for word in _WORDS.findall(path))
    return len(leaf.shape) > 1 and not any(map(_NOT_DECAYED.fullmatch, words))


@dataclass(frozen=True)
class Mezo:
    """MeZO as an optax-shaped transformation; make one by `mezo`.

    `init` and `update` are optax's, but that `update` takes projected gradients instead of a
    tree of gradients. The state between steps is a key and a count.
    """

    eps: float
    learning_rate: float | optax.Schedule
    directions: int = 1
    weight_decay: float = 0.0
    decays: Callable[[str, Any], bool] = decays
    rounding: Rounding = "stochastic"

    def init(self, params: Any, *, seed: int = 0) -> MezoState:
        """Return the state before the first step; it does not depend on the parameters."""
        return MezoState(new_key(seed), jnp.int32(0))

    def rate(self, step: jax.Array) -> jax.Array:
        """Return a step's learning rate, float32 []."""
        of = self.learning_rate
        return jnp.asarray(of(step) if callable(of) else of, jnp.float32)

    def perturbed(
        self, params: Any, draw: Draw, sign: Any, *, number: Any = None, row: Any = None
    ) -> Any:
        """Return parameters + sign · eps · direction, in the parameters' own dtypes.

        Args:
            params: a tree, or a part of one.
            draw: which direction.
            sign: 1 or -1.
            number: the number of each leaf, where `params` is a part of a tree; else `numbers`.
            row: the layer's, where leaves are one layer of stacked ones.
        """

        def one(leaf: Any, number: int) -> Any:
            along = direction(draw, number, leaf.shape, row)
            by = sign * in_12_bits(jnp.float32(self.eps))
            moved = leaf.astype(at_least_float32(leaf.dtype)) + by * along
            return moved.astype(leaf.dtype)

        return jax.tree.map(one, params, numbers(params) if number is None else number)

    def projected(self, losses: jax.Array) -> jax.Array:
        """Return (L+ - L-) / 2 eps: the gradient along each direction, float32 [directions].

        Args:
            losses: float32 or float64 [directions, 2], those at +eps first.
        """
        scalars = (losses[:, 0] - losses[:, 1]) / (2 * in_12_bits(jnp.float32(self.eps)))
        return scalars.astype(jnp.float32)

    def update(self, scalars: jax.Array, state: MezoState, params: Any) -> tuple[Any, MezoState]:
        """Return the updates to add to parameters, and the next state, as optax does.

        Args:
            scalars: float32 [directions], the projected gradients.
            state: of the step.
            params: the parameters at which the losses were taken.
        """
        pending = Pending(scalars, self.rate(state.step), state.step)
        return self.updates(pending, state.key, params), MezoState(state.key, state.step + 1)

    def updates(
        self, pending: Pending, key: jax.Array, params: Any, *, number: Any = None, row: Any = None
    ) -> Any:
        """Return -rate · (mean over directions of scalar · direction + weight decay · parameters).

        The arguments are `perturbed`'s, and the update's scalars, rate and step.
        """
        flat, treedef = jax.tree.flatten_with_path(params)
        named = jax.tree.leaves(numbers(params) if number is None else number)
        made = [
            self._update(pending, key, leaf, n, row, self._decay(path, leaf, row))
            for (path, leaf), n in zip(flat, named, strict=True)
        ]
        return jax.tree.unflatten(treedef, made)

    def applied(
        self, pending: Pending, key: jax.Array, params: Any, *, number: Any = None, row: Any = None
    ) -> Any:
        """Return the parameters with a pending update made, rounded as `rounding` says."""
        updates = self.updates(pending, key, params, number=number, row=row)
        named = numbers(params) if number is None else number

        def one(leaf: jax.Array, update: jax.Array, number: int) -> jax.Array:
            moved = leaf.astype(at_least_float32(leaf.dtype)) + update
            if self.rounding == "nearest" or leaf.dtype.itemsize != 2:
                return moved.astype(leaf.dtype)
            draw = Draw(key, pending.step, self.directions)  # after those of the directions
            new = stochastic(moved, leaf.dtype, chances(draw, number, leaf.shape, row))
            # Nothing moves where nothing is pending, as a flushed state is flushed again.
            return jnp.where(pending.rate == 0, leaf, new)

        return jax.tree.map(one, params, updates, named)

    def _decay(self, path: Any, leaf: Any, row: Any) -> float:
        stacked = leaf if row is None else jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
        return self.weight_decay if self.decays(jax.tree_util.keystr(path), stacked) else 0.0

    def _update(
        self, pending: Pending, key: jax.Array, leaf: Any, number: int, row: Any, decay: float
    ) -> jax.Array:
        def added(which: Any, total: jax.Array) -> jax.Array:
            along = direction(Draw(key, pending.step, which), number, leaf.shape, row)
            by = in_12_bits(pending.rate * pending.scalars[which] / self.directions)
            return total + by * along

        total = jnp.zeros(leaf.shape, jnp.float32)
        if decay:
            total = in_12_bits(pending.rate * decay * leaf)
        if self.directions == 1:
            return -added(0, total)
        return -jax.lax.fori_loop(0, self.directions, added, total)


def mezo(
    *,
    eps: float,
    lr: float | optax.Schedule,
    directions: int = 1,
    weight_decay: float = 0.0,
    decays: Callable[[str, Any], bool] = decays,
    rounding: Rounding = "stochastic",
) -> Mezo:
    """Estimate the gradient from two losses along a random direction (MeZO, arXiv 2305.17333).

    z ~ N(0, I); g = (L(θ + eps z) - L(θ - eps z)) / 2 eps; θ' = θ - lr (g z + weight_decay θ), with
    g z averaged over the directions (n-SPSA). Parameters are never changed in place: what MeZO
    restores by +eps, -2 eps, +eps rounds, and rounds differently on each device of a pair.
    Directions, eps and lr g are taken in 12 bits (`zeroth_order.directions` has the reason).

    Args:
        eps: how far parameters are moved; MeZO's are 1e-3 for all parameters, 1e-2 for LoRA, 1e-1
            for prefixes.
        lr: the learning rate, or an optax schedule of it by the step; MeZO's are 1e-6 or 1e-7, 1e-4
            for LoRA, 1e-2 for prefixes.
        directions: sampled in each step; each costs two forward passes.
        weight_decay: of the parameters that `decays` says.
        decays: (a parameter's path, the parameter) -> whether it decays; matrices, by default.
        rounding: of updated parameters in 16 bits: "stochastic", up or down by chance and right in
            the mean, or "nearest", which loses every update below half a parameter's last bit:
            with MeZO's rates nearly all. Parameters in float32 are always rounded to the nearest.

    Raises:
        ValueError: if eps or a rate is not above 0 and finite, a schedule has a value below 0 or
            not finite (at the steps that are looked at), directions are less than 1, or the decay
            is below 0.
    """
    eps = number("eps", eps, above=0, why=", as MeZO's 1e-3")
    held = np.finfo(np.float32).tiny <= np.float32(eps) <= np.finfo(np.float32).max
    expect(bool(held), "eps", eps, "a number that float32 can hold, as 1e-3")
    weight_decay = number("weight_decay", weight_decay, least=0)
    function("decays", decays, "(a parameter's path, the parameter) -> whether it decays")
    expect_one_of("rounding", rounding, "stochastic", "nearest")
    count = whole("directions", directions, 1)
    return Mezo(eps, rate("lr", lr), count, weight_decay, decays, rounding)
