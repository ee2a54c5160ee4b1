"""Leave out of training a step that is infinite or not a number, and report it."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.train.finite import all_fine, kept_if, stays_fine

_PARTS = "loss", "gradients", "optimizer's update"


class NonFiniteStepError(ValueError):
    """A step was infinite or not a number, and was left out.

    Attributes:
        step: its number, which the state's "step" was.
        parts: what was not finite, of "loss", "gradients" and "optimizer's update".
    """

    def __init__(self, step: int, parts: list[str]):
        self.step, self.parts = step, parts
        super().__init__(
            f"step {step}: {' and '.join(parts)} infinite or not a number. The step was left out: "
            "parameters and optimizer are as before it. Look at its batch or lower the learning "
            "rate, and go on from the state you have"
        )


def kept_if_finite(
    loss: jax.Array, gradients: Any, after: Any, before: Any, step: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the values after a step, or those before it if something of it is not finite.

    Elements that were not finite before (a mask of -inf) do not count.

    Returns:
        The values; and what `StepReports` reads, int32 [4]: the step's number, and 1 for each of
        its loss, gradients and update that is finite.
    """
    fine = jnp.stack([all_fine(loss), all_fine(gradients), stays_fine(before, after)])
    report = jnp.concatenate([jnp.reshape(step, 1).astype(jnp.int32), fine.astype(jnp.int32)])
    return kept_if(fine.all(), after, before), report


class StepReports(deque[jax.Array]):
    """The reports of the last steps, which the host reads late, so as not to wait for devices."""

    def check(self, unread: int) -> None:
        """Read all but the last `unread` reports.

        Raises:
            NonFiniteStepError: for the first step that was left out.
        """
        while len(self) > unread:
            step, *fine = np.asarray(self.popleft()).tolist()
            bad = [part for part, ok in zip(_PARTS, fine, strict=True) if not ok]
            if bad:
                raise NonFiniteStepError(step, bad)
