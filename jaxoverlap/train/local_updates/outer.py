"""Outer optimizers: values that say what happens between the rounds of local updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import optax

from jaxoverlap._util.limits import AtLeast0, AtLeast1, checked, number, whole
from jaxoverlap.train.arguments import transformation


@dataclass(frozen=True, kw_only=True)
@checked
class Outer:
    """An outer optimizer: one optax transformation, a delay, and where the next round begins.

    In a round each worker takes `every` steps from its start. The outer gradient is where the round
    began, less the average of where the workers ended; `transform` makes the update of it. Worker i
    then begins the next round at begin' + keep · (end_i - begin'), with begin' the updated value.

    Attributes:
        every: steps of a round.
        transform: what turns outer gradients into updates, in optax's convention (updates are
            added, so that gradient descent has a negative factor).
        delay: 1 sends a round's outcome during the next round and applies it at that one's end; 0
            sends it at the round's own end, where nothing hides it (but see `lag`).
        keep: the share of its own parameters that a worker keeps when a round begins, in [0, 1].
        sends_start: whether what is sent is where the next round begins, less the updated value,
            and not how far the worker came (Overlap-Local-SGD).
        eager: whether a worker's own outcome is applied at once, and that of the others with the
            delay. The updated values then differ between workers.
        share: of its own outer gradient, that an eager worker applies at once, in (0, 1]; the rest
            comes with the average. None for 1 / workers, its part of the average.
        fragments: parts of the parameters, each sent in its own part of the round.
        lag: steps between the start of a fragment's average and its use; needs delay 0.
        waits_first, waits_from: rounds, the first so many and all from a number on, that wait for
            their own average and begin the next round at it, as LocalSGD's; needs delay 1.
        waits: whether every round does.
        of_workers: makes `transform` for a number of workers, where it depends on that.
        name: the algorithm's, for people.
    """

    every: AtLeast1
    transform: Annotated[optax.GradientTransformation, transformation]
    delay: Annotated[int, partial(whole, least=0, most=1)] = 0
    keep: Annotated[float, partial(number, least=0, most=1)] = 0.0
    sends_start: bool = False
    eager: bool = False
    share: Annotated[float, partial(number, above=0, most=1)] | None = None
    fragments: AtLeast1 = 1
    lag: AtLeast0 = 0
    waits_first: AtLeast0 = 0
    waits_from: AtLeast0 | None = None
    waits: bool = False
    of_workers: Callable[[int], optax.GradientTransformation] | None = None
    name: str = "an outer optimizer"

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise ValueError(
                f"every={self.every} with fragments={self.fragments}: every fragment gets an equal "
                "part of the round, so every must be a multiple of fragments; change one of them"
            )
        if self.lag > self.every // self.fragments:
            raise ValueError(
                f"lag={self.lag}: a fragment's part of the round has {self.every // self.fragments}"
                f" steps (every={self.every}, fragments={self.fragments}); expected at most these"
            )
        if self.delay and (self.fragments > 1 or self.lag):
            raise ValueError(
                f"delay=1 with fragments={self.fragments} and lag={self.lag}: all parameters are a "
                "round late together; leave out either"
            )
        if (self.eager or self.sends_start) and not self.delay:
            raise ValueError("eager or sends_start without delay=1: nothing is late there")
        if self.share is not None and not self.eager:
            raise ValueError(f"share={self.share} without eager=True: nothing is applied at once")
        if self.has_waits and (not self.delay or self.keep or self.sends_start):
            raise ValueError(
                "waits, waits_first or waits_from: expected delay=1, keep=0 and sends_start=False, "
                "as rounds that wait begin the next one at their own average; leave out either"
            )

    def shortened(self, steps: int) -> Outer:
        """Return the same with fewer steps in a round.

        Raises:
            ValueError: if these are more, or fragments or a lag need full rounds.
        """
        steps = whole("steps", steps, 1, self.every)
        if steps < self.every and (self.fragments > 1 or self.lag):
            raise ValueError(
                f"steps={steps} with fragments={self.fragments} and lag={self.lag}: each fragment "
                f"has its part of a whole round; give all every={self.every} steps"
            )
        return replace(self, every=steps)

    def of_round(self, index: int) -> Outer:
        """Return the same for one round, in which all or none `waits`."""
        return replace(self, waits=True) if self.waits_in(index) else self

    def for_workers(self, workers: int) -> Outer:
        """Return the same with the transform for a number of workers."""
        if self.of_workers is None:
            return self
        return replace(self, transform=self.of_workers(workers))

    def waits_in(self, index: Any) -> Any:
        """Return whether a round waits for its own average; of an int or an array of them."""
        late = False if self.waits_from is None else index >= self.waits_from
        return self.waits | (index < self.waits_first) | late

    def left(self, workers: int) -> float:
        """Return the share of its own outer gradient that a worker still applies a round late."""
        if not self.eager:
            return 1.0
        return 1 - (1 / workers if self.share is None else self.share)

    @property
    def has_waits(self) -> bool:
        """Return whether any round waits for its own average despite the delay."""
        return self.waits or self.waits_first > 0 or self.waits_from is not None

    @property
    def kind(self) -> str:
        """Return the algorithm as its states record it: name, and what changes their meaning."""
        options = dict(delay=0, eager=False, share=None, sends_start=False, fragments=1)
        given = {name: getattr(self, name) for name in options}
        text = ", ".join(f"{name}={x}" for name, x in given.items() if x != options[name])
        return f"{self.name}({text})"

    @property
    def part(self) -> int:
        """Return the steps of a fragment's part of the round."""
        return self.every // self.fragments

    @property
    def same_start(self) -> bool:
        """Return whether all workers begin a round with the same parameters."""
        return self.keep == 0 and not self.eager and self.fragments == 1


def momentum_in_range(momentum: Any) -> float:
    """Return a momentum: 0 (none) or more, and less than 1, from where on it never forgets."""
    return number("momentum", momentum, least=0, below=1, why=", from where on it never forgets")
