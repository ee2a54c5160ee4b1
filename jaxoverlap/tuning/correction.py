"""How far the simulation is off on the devices that are here, and what it says when that is mended.

A simulated step is compute and what is exposed. On the devices each takes so many times longer (or
shorter); both factors are fitted to the candidates that were timed, and say what the others would
take. Contention is compute's here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxoverlap.step.trial import Trial


@dataclass(frozen=True)
class Correction:
    """Measured seconds for each simulated one.

    Attributes:
        compute: of kernels, with what collectives beside them slow them by.
        exposed: of waiting for collectives.
    """

    compute: float
    exposed: float

    def step_s(self, trial: Trial) -> float:
        """Seconds that a simulated step would take here."""
        busy_s, exposed_s = _parts(trial)
        return self.compute * busy_s + self.exposed * exposed_s


def correction(timed: Sequence[tuple[Trial, float]]) -> Correction:
    """The factors with the least squares of relative errors.

    One factor for both, the median of all, where two cannot be told apart: a single step was timed,
    or all split alike, or the fit would have waiting or computing take less than no time.

    Args:
        timed: steps as simulated, each with its measured seconds; at least one.
    """
    parts = np.array([_parts(trial) for trial, _ in timed])
    measured_s = np.array([seconds for _, seconds in timed])
    factors, _, rank, _ = np.linalg.lstsq(parts / measured_s[:, None], np.ones(len(timed)), _ALIKE)
    if rank == 2 and min(factors) > 0:
        return Correction(*map(float, factors))
    ratio = statistics.median(measured_s / parts.sum(axis=1))
    return Correction(float(ratio), float(ratio))


_ALIKE = 1e-3  # of the larger singular value: clocks are no better than that


def _parts(trial: Trial) -> tuple[float, float]:
    return trial.step_s - trial.exposed_s, trial.exposed_s
