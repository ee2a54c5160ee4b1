"""Leave out of a round what is infinite or not a number, and report it.

A worker whose steps end in a train state that is not finite goes back to where they began, its
inner optimizer included, and sends that it did not move. An outer step that is not finite is left
out. Elements that were not finite before the steps do not count, and -inf counts only in parameters
and in what is like them (moments): elsewhere a running maximum begins there, and masks hold it.
Workers report with the average that they take part in, so that nothing waits for a report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoverlap.train.finite import stays_fine


class NonFiniteRoundError(ValueError):
    """Some of a round was infinite or not a number, and was left out.

    Attributes:
        round: its number, from 0.
        workers: the numbers of the workers that went back to where the round began.
        outer: whether the outer step that ended the round was left out.
    """

    def __init__(self, number: int, workers: list[int], outer: bool):
        self.round, self.workers, self.outer = number, workers, outer
        found = list[str]()
        if workers:
            found.append(
                f"the steps of worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))} "
                "ended in a train state that is infinite or not a number. They went back to where "
                "the round began, inner optimizer included, and count as not moved"
            )
        if outer:
            found.append(
                "the outer step was infinite or not a number. It was left out: the next round "
                "began where this one did"
            )
        super().__init__(
            f"round {number}: {'; '.join(found)}. Look at its batches or lower the learning rate, "
            "and go on from the state you have, which is finite"
        )


class RoundReport(NamedTuple):
    """What a round's program reports, the same on all devices.

    Attributes:
        number: of the round, int32 [].
        last, this: 1 for each worker whose steps were finite: in the last round, as far as that one
            could not report it yet, and in this one; float32 [workers].
        outer: whether all outer steps were finite, bool [].
    """

    number: jax.Array
    last: jax.Array
    this: jax.Array
    outer: jax.Array

    @classmethod
    def new(cls, number: jax.Array, workers: int) -> RoundReport:
        """Return the report of a round in which all was finite so far."""
        return cls(
            number,
            jnp.ones(workers, jnp.float32),
            jnp.ones(workers, jnp.float32),
            jnp.ones((), bool),
        )

    def joined(self, told: jax.Array | None, outer: jax.Array) -> RoundReport:
        """Return the report with another average's [2, workers] and outer step's."""
        assert told is not None
        return self._replace(
            last=self.last * told[0], this=self.this * told[1], outer=self.outer & outer
        )


class Reports(deque[RoundReport]):
    """The reports of rounds, which the host reads late, so as not to wait for devices."""

    _named = -1  # the last round whose workers were named

    def check(self, unread: int) -> None:
        """Read all but the last `unread` reports; raise for the first that names something.

        Raises:
            NonFiniteRoundError: naming the round, and what was left out.
        """
        while len(self) > unread:
            seen = self.popleft()
            number, outer = int(seen.number), bool(seen.outer)
            workers = _not_fine(seen.this)
            if number > self._named + 1 and (late := _not_fine(seen.last)):
                if workers or not outer:  # to be raised by the next call
                    self.appendleft(seen)
                self.name(number - 1, late)
            if workers or not outer:
                self.name(number, workers, outer)

    def check_unsent(self, rounds: int, finite: jax.Array) -> None:
        """Raise if workers of the last round were not finite, and did not send that yet.

        Args:
            rounds: how many were run.
            finite: `LocalState.finite`, replicated on each device.
        """
        if rounds > self._named + 1 and (workers := _not_fine(finite)):
            self.name(rounds - 1, workers)

    def name(self, number: int, workers: list[int], outer: bool = True) -> None:
        """Raise for a round; its workers are not named again.

        Raises:
            NonFiniteRoundError: always.
        """
        self._named = max(self._named, number)
        raise NonFiniteRoundError(number, workers, not outer)


def _not_fine(flags: Any) -> list[int]:
    """Return the numbers of workers whose flag is below 1."""
    return np.flatnonzero(np.asarray(flags) < 1).tolist()


def each_worker(before: Any, after: Any, strict: Sequence[bool] | None = None) -> jax.Array:
    """Return 1 for each worker whose elements are as they may be; float32 [workers].

    The arguments are those of `stays_fine`.
    """
    return stays_fine(before, after, strict, dims=1).astype(jnp.float32)


def mirrors(state: Any, params: Any) -> list[bool]:
    """Return for each leaf of a train state whether it is a parameter, or like one, as a moment.

    Such a leaf has a parameter's shape, and its path ends with the parameter's.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    shapes = {path: leaf.shape for path, leaf in flat}
    return [
        any(shapes.get(path[begin:]) == leaf.shape for begin in range(len(path) + 1))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def one_hot(fine: Any, axis: str, workers: int) -> jax.Array:
    """Return a worker's flags in its own column, float32 [2, workers], to be summed over workers.

    Args:
        fine: two arrays [1], in a shard_map over the workers.
        axis: the workers'.
        workers: how many there are.
    """
    return (
        jnp.zeros((2, workers), jnp.float32).at[:, lax.axis_index(axis)].set(jnp.concatenate(fine))
    )
