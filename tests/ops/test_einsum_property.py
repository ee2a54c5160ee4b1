"""Any einsum, sharded in any way, under any transformation: values, gradients and shardings."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings

import jaxoverlap
from tests.ops.drawn import Case, cases, check

AT_ONCE = 20  # einsums that are compiled as one program: a compilation has a price of its own


def by_rule(spec: str, x: Any, ws: Any) -> Any:
    return jaxoverlap.einsum(spec, x, ws)


def options(count: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(
        max_examples=count // AT_ONCE, deadline=None, derandomize=True, suppress_health_check=checks
    )


@options(30)
@given(cases(AT_ONCE))
def test_values_gradients_and_shardings_are_plains(case: Case):
    check(case, by_rule)


@options(2 * AT_ONCE)
@given(cases(AT_ONCE))
def test_the_decorator_takes_them_over(case: Case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in some programs nothing can be overlapped
        check(case, by_rule, lambda fn: jaxoverlap.overlap(jax.jit(fn)))


@pytest.mark.nightly
@options(2000)
@given(cases(AT_ONCE))
def test_values_gradients_and_shardings_of_more(case: Case):
    check(case, by_rule)
