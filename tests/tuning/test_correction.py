"""Corrections of a simulation find known factors, and none that make no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.plan.evaluation import Times
from jaxoverlap.tuning.correction import Correction, correction

SECONDS = st.floats(1e-3, 1.0)
FACTORS = st.floats(0.2, 5.0)


def trial(busy_s: float, exposed_s: float) -> Times:
    parts = {"compute_s": busy_s, "communication_s": 0.0, "bound_s": 0.0}
    return Times(step_s=busy_s + exposed_s, exposed_s=exposed_s, **parts)


@given(SECONDS, FACTORS, FACTORS)
def test_two_factors_are_found_again(busy_s: float, compute: float, exposed: float):
    was = Correction(compute, exposed)
    steps = [trial(busy_s, 0.1 * busy_s), trial(busy_s, 0.9 * busy_s), trial(2 * busy_s, busy_s)]
    fitted = correction([(step, was.step_s(step)) for step in steps])
    assert (fitted.compute, fitted.exposed) == pytest.approx((compute, exposed))


@given(SECONDS, st.lists(FACTORS, min_size=1, max_size=5))
def test_steps_that_split_alike_have_one_factor(busy_s: float, factors: list[float]):
    step = trial(busy_s, busy_s / 2)
    fitted = correction([(step, f * step.step_s) for f in factors])
    assert fitted.compute == fitted.exposed and min(factors) <= fitted.compute * (1 + 1e-9)


def test_no_factor_is_below_zero():
    """The step that waits longest is fastest: by least squares waiting would take negative time."""
    fitted = correction([(trial(1.0, 0.1), 3.0), (trial(1.0, 2.0), 1.0)])
    assert fitted.compute == fitted.exposed > 0
