"""Known algorithms of local updates but CO2, each a value of `Outer` with its source."""

from __future__ import annotations

from typing import Any, Literal

import optax

from jaxoverlap._util.limits import flag, number, whole
from jaxoverlap.train.arguments import rate
from jaxoverlap.train.local_updates.outer import Outer, momentum_in_range
from jaxoverlap.train.local_updates.transforms import clipped_momentum, per_inner_rate


def local_sgd(*, every: int) -> Outer:
    """Begin each round at the average of where the last one ended.

    Source: Stich, Local SGD Converges Fast and Communicates Little (arXiv 1805.09767).
    """
    return Outer(every=every, transform=optax.sgd(1.0), name="local_sgd")


def slowmo(
    *,
    every: int,
    inner_learning_rate: float | optax.Schedule,
    momentum: float = 0.2,
    learning_rate: float | optax.Schedule = 1.0,
) -> Outer:
    """Step along a slow momentum of the outer gradient over the inner learning rate.

    m = momentum · m + (begin - average) / γ; begin' = begin - learning_rate · γ · m, with γ the
    inner learning rate. Source: Wang et al., SlowMo (arXiv 1910.00643), algorithm 1.

    Args:
        every: steps of a round.
        inner_learning_rate: γ, or a schedule of it by the number of the round. In a round whose
            γ is 0, as the first of a warm-up, workers do not move, and neither does this.
        momentum: in [0, 1).
        learning_rate: the outer one, of γ · m; or a schedule of it by the number of the round.
    """
    inner_learning_rate = rate("inner_learning_rate", inner_learning_rate)
    transform = optax.chain(
        per_inner_rate(inner_learning_rate),
        clipped_momentum(momentum_in_range(momentum)),
        optax.scale_by_learning_rate(inner_learning_rate),
        scaled("learning_rate", learning_rate),
    )
    return Outer(every=every, transform=transform, name="slowmo")


def bmuf(
    *,
    every: int,
    momentum: float = 0.9,
    learning_rate: float | optax.Schedule = 1.0,
    nesterov: bool = False,
) -> Outer:
    """Filter the blocks' updates: Δ = momentum · Δ + learning_rate · (average - begin).

    Source: Chen and Huo, Scalable training of deep learning machines by incremental block training
    with intra-block parallel optimization and blockwise model-update filtering (ICASSP 2016), its
    classical block momentum, or its Nesterov one. Formulas as recalled: the paper was not at hand.
    """
    transform = _sgd(learning_rate, momentum, nesterov)
    return Outer(every=every, transform=transform, name="bmuf")


def overlap_local_sgd(*, every: int, pullback: float = 0.6, momentum: float = 0.7) -> Outer:
    """Pull workers towards an anchor that is averaged during the round.

    At a round's end x_i = (1 - pullback) · x_i + pullback · z, and the average of these is sent for
    the next anchor: v = momentum · v + (average - z); z' = z + v. Source: Wang, Liang and Joshi,
    Overlap Local-SGD (arXiv 2002.09539); the defaults are those of its code.
    """
    pullback = number("pullback", pullback, above=0, most=1)
    return Outer(
        every=every,
        transform=_sgd(1.0, momentum, False),
        delay=1,
        keep=1 - pullback,
        sends_start=True,
        name="overlap_local_sgd",
    )


def diloco(
    *,
    every: int,
    learning_rate: float | optax.Schedule = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    delay: Literal[0, 1] = 0,
) -> Outer:
    """Take an outer step of SGD with Nesterov momentum.

    Source: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1 and its best outer rate and
    momentum. delay=1 is the naive delayed outer gradient of Kale et al., Eager Updates for
    Overlapped Communication and Computation in DiLoCo (arXiv 2502.12996).
    """
    transform = _sgd(learning_rate, momentum, nesterov)
    return Outer(every=every, transform=transform, delay=delay, name="diloco")


def eager_diloco(
    *,
    every: int,
    learning_rate: float | optax.Schedule = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
) -> Outer:
    """Take an outer step with a worker's own outer gradient at once, the others' a round late.

    g_i = (own - own of the last round) / workers + average of the last round. Source: Kale et al.
    (arXiv 2502.12996). Where rounds begin differs between workers, and so does the momentum.
    """
    transform = _sgd(learning_rate, momentum, nesterov)
    return Outer(every=every, transform=transform, delay=1, eager=True, name="eager_diloco")


def streaming_diloco(
    *,
    every: int,
    fragments: int,
    delay: int,
    alpha: float = 0.5,
    learning_rate: float | optax.Schedule = 0.4,
    momentum: float = 0.9,
    nesterov: bool = True,
) -> Outer:
    """Send one fragment of the parameters after another, each hidden behind `delay` steps.

    A round of `every` steps has a part for each fragment. `delay` steps before its part ends the
    fragment's average sets off; at its end it is applied, and a worker goes on from
    alpha · own + (1 - alpha) · updated. Source: Douillard et al., Streaming DiLoCo with overlapping
    communication (arXiv 2501.18512), algorithm 2, and its outer rate and alpha.

    Args:
        every: steps between two averages of one fragment.
        fragments: leaves of the parameters, in order, in parts of about equal bytes. (The
            paper's are layers, spread with a stride; layers stacked by a scan are one leaf.)
        delay: steps, at most every / fragments.
        alpha: the worker's own share, in [0, 1].
        learning_rate, momentum, nesterov: of the outer SGD. Here and in the other algorithms a
            rate may be an optax schedule, by the number of the round.
    """
    alpha = number("alpha", alpha, least=0, most=1)
    every, fragments = whole("every", every, 1), whole("fragments", fragments, 1)
    if (delay := whole("delay", delay, 0)) > every / fragments:
        raise ValueError(
            f"delay={delay}: a fragment's part of the round has every / fragments = "
            f"{every / fragments:g} steps; expected at most these"
        )
    return Outer(
        every=every,
        transform=_sgd(learning_rate, momentum, nesterov),
        keep=alpha,
        fragments=fragments,
        lag=delay,
        name="streaming_diloco",
    )


def scaled(name: str, learning_rate: Any, sign: int = 1) -> optax.GradientTransformation:
    """Return what multiplies by a learning rate or a schedule of it, and a sign."""
    found = rate(name, learning_rate)
    return optax.scale_by_learning_rate(found, flip_sign=sign < 0)


def _sgd(learning_rate: Any, momentum: Any, nesterov: Any) -> optax.GradientTransformation:
    decay = momentum_in_range(momentum)
    found = rate("learning_rate", learning_rate)
    return optax.sgd(found, decay or None, nesterov=flag("nesterov", nesterov))
