"""Correct the simulation by the candidates that were timed on the devices that are here.

A simulated step is compute and exposed communication. On the devices each takes some factor longer
(or shorter); both factors are fitted to the candidates that were timed, and predict what the others
would take. Contention counts as compute here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxoverlap.plan.evaluation import Times


@dataclass(frozen=True)
class Correction:
    """The measured seconds for each simulated one, as two factors.

    Attributes:
        compute: the factor of kernels, slowed by the collectives that overlap with them.
        exposed: the factor of waiting for collectives.
    """

    compute: float
    exposed: float

    def step_s(self, times: Times) -> float:
        """Predict the seconds that a simulated step would take here."""
        busy_s, exposed_s = _parts(times)
        return self.compute * busy_s + self.exposed * exposed_s


def correction(timed: Sequence[tuple[Times, float]]) -> Correction:
    """Fit the factors by least squares of relative errors.

    There is one factor for both, the median of all, where two cannot be told apart: a single step
    was timed, or all split alike, or a fitted factor would be negative.

    Args:
        timed: steps as simulated, each with its measured seconds; at least one.
    """
    parts = np.array([_parts(times) for times, _ in timed])
    measured_s = np.array([seconds for _, seconds in timed])
    factors, _, rank, _ = np.linalg.lstsq(parts / measured_s[:, None], np.ones(len(timed)), _ALIKE)
    if rank == 2 and min(factors) > 0:
        return Correction(*map(float, factors))
    ratio = statistics.median(measured_s / parts.sum(axis=1))
    return Correction(float(ratio), float(ratio))


_ALIKE = 1e-3  # of the larger singular value: clocks are no better than that


def _parts(times: Times) -> tuple[float, float]:
    return times.step_s - times.exposed_s, times.exposed_s
