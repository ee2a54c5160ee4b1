"""CO2: local updates whose average is a round late, with its penalty, clip and further options."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax.numpy as jnp
import optax

from jaxoverlap._util.expect import expect_one_of
from jaxoverlap._util.limits import number, whole
from jaxoverlap.train.local_updates.algorithms import scaled
from jaxoverlap.train.local_updates.outer import Outer, momentum_in_range
from jaxoverlap.train.local_updates.transforms import (
    Over,
    Penalty,
    clipped_momentum,
    penalized,
    rate_by_leaf,
    ratio,
)

# (workers at most, momentum): defaults of the released code (fairseq-CO2), as SlowMo's.
RELEASED_MOMENTUM = ((16, 0.0), (32, 0.2), (64, 0.5))
MOST_MOMENTUM = 0.6  # of more workers


def co2(
    *,
    every: int,
    momentum: float | None = None,
    learning_rate: float | optax.Schedule | Literal["leaf"] = 1.0,
    staleness: Literal["ratio"] | float | Penalty = "ratio",
    over: Over = "all",
    clip: float | None = 1.0,
    delay: Literal[0, 1] = 1,
    eager: bool | float = False,
    rounds: int | None = None,
    start: float = 0.1,
    end: float = 1 / 6,
) -> Outer:
    """Hide each round's average behind the next round's steps.

    With x_t where round t began and Λ the penalty of staleness:

        m_t = clip(momentum · m_{t-1} + (x_{t-1} - average of round t-1's ends) / Λ_t)
        x_{t+1} = x_t - learning_rate · m_t

    Source: Sun et al., CO2 (arXiv 2401.16265). This is a reconstruction from the paper's abstract,
    its reviews and the released code: the formula of Λ was not found (`transforms.ratio`). `over`,
    `eager`, `rounds` and the rate "leaf" are this project's own additions.

    Args:
        every: steps of a round.
        momentum: of the outer gradient, in [0, 1); None for the released code's by workers: 0 up to
            16 of them, 0.2 up to 32, 0.5 up to 64, then 0.6.
        learning_rate: the outer one; or a schedule of it by the number of the round; or "leaf", at
            most 1 and of each leaf its own (`transforms.rate_by_leaf`), with staleness=1, without
            momentum and eager.
        staleness: "ratio"; a constant, 1 or more (1, no penalty, is what the released code has); or
            a function of the norms of the last update and of the gradient, taken as 1 where below.
        over: whether the penalty is one for all parameters, of each leaf its norms, or of each
            element the moduli.
        clip: the most that an element of the momentum may be, either sign; None for no clip.
        delay: 0 waits for each average, to see what the delay costs.
        eager: True applies a worker's own part of the average at once, a number in (0, 1] that
            share of its own outer gradient (`Outer.share`), and the rest a round late. With a share
            w the modes z of `rate_by_leaf` obey z² - (1 - w c) z + (1 - w) c = 0, and how far
            workers are apart is multiplied by -w c a round: at c = 1 both decay fastest at
            w = 0.62.
        rounds: of the whole run. With it the first rounds, the share `start`, and the last ones,
            the share `end`, wait for their own average, and begin the next round at it, as
            LocalSGD's do; no average is hidden there.
        start, end: in [0, 1), without effect unless `rounds` is given.

    Raises:
        ValueError: for options that do not go together.
    """
    expect_one_of("over", over, "all", "leaf", "element")
    if clip is not None:
        clip = number("clip", clip, above=0)
    penalty = _penalty(staleness)
    plain = not callable(staleness) and staleness == 1
    share = None if isinstance(eager, bool) else number("eager", eager, above=0, most=1)
    by_leaf = isinstance(learning_rate, str) and learning_rate == "leaf"
    if by_leaf:
        _check_by_leaf(momentum, plain, eager)
        momentum = 0.0
    waits_first, waits_from = _waits(rounds, start, end, whole("delay", delay, 0, 1))

    def of_workers(workers: int) -> optax.GradientTransformation:
        decay = released_momentum(workers) if momentum is None else momentum_in_range(momentum)
        rate: Any = 1.0 if by_leaf else learning_rate
        transform = optax.chain(clipped_momentum(decay, clip), scaled("learning_rate", rate, -1))
        if by_leaf:
            return rate_by_leaf(transform, delay=delay)
        return transform if plain else penalized(transform, penalty, over)

    return Outer(
        every=every,
        transform=of_workers(1),
        of_workers=of_workers,
        delay=delay,
        eager=eager if isinstance(eager, bool) else True,
        share=share,
        waits_first=waits_first,
        waits_from=waits_from,
        name="co2",
    )


def released_momentum(workers: int) -> float:
    """Return the default outer momentum of CO2's released code for a number of workers."""
    found = (momentum for most, momentum in RELEASED_MOMENTUM if workers <= most)
    return next(found, MOST_MOMENTUM)


def _check_by_leaf(momentum: Any, plain: bool, eager: Any) -> None:
    if momentum or not plain or eager is not False:
        raise ValueError(
            f"learning_rate='leaf' with momentum={momentum!r}, eager={eager!r} and "
            f"{'no' if plain else 'a'} penalty: expected momentum=0, eager=False and staleness=1, "
            "as the rates are derived without them"
        )


def _waits(rounds: Any, start: Any, end: Any, delay: int) -> tuple[int, int | None]:
    """Return how many rounds wait at first, and from which on they do; None for none."""
    start, end = (number(n, x, least=0, below=1) for n, x in (("start", start), ("end", end)))
    if rounds is None:
        return 0, None
    rounds = whole("rounds", rounds, 1)
    if not delay:
        raise ValueError(
            f"rounds={rounds} with delay=0: every round waits anyway; leave out either"
        )
    return round(rounds * start), rounds - round(rounds * end)


def _penalty(staleness: Any) -> Penalty:
    if callable(staleness):
        return cast(Penalty, staleness)
    if isinstance(staleness, str) and staleness == "ratio":
        return ratio
    others = ", or 'ratio', or a function of the norms of the last update and of the outer gradient"
    constant = number("staleness", staleness, least=1, why=others)
    return lambda moved, gradient: jnp.asarray(constant, jnp.float32)
