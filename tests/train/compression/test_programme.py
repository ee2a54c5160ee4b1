"""The dynamic programme of L-GreCo is optimal: against enumeration and against scipy's milp."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxoverlap.train.compression.programme import BUCKETS, solve


def instance(rng, layers, count):
    """Costs rise and errors fall with the setting, as ranks' do; or neither."""
    costs = [rng.integers(1, 1000, count) * int(rng.integers(1, 50)) for _ in range(layers)]
    errors = [rng.gamma(2.0, 1.0, count) * rng.gamma(1.0, 3.0) for _ in range(layers)]
    if rng.random() < 0.7:
        costs, errors = [np.sort(c) for c in costs], [np.sort(e)[::-1] for e in errors]
    uniform = int(rng.integers(count))
    return costs, errors, sum(float(e[uniform]) for e in errors), uniform


def in_buckets(errors, budget, buckets):
    return [np.ceil(np.minimum(e / budget, 2) * buckets).astype(int) for e in errors]


def total(values, chosen):
    return sum(v[i] for v, i in zip(values, chosen, strict=True))


def test_it_equals_enumeration_on_a_thousand_small_instances():
    rng, unsolved = np.random.default_rng(0), 0
    for _ in range(1000):
        layers, count = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        buckets = int(rng.integers(5, 200))
        costs, errors, budget, _ = instance(rng, layers, count)
        steps = in_buckets(errors, budget, buckets)
        choices = itertools.product(range(count), repeat=layers)
        fitting = [total(costs, c) for c in choices if total(steps, c) <= buckets]
        chosen = solve(costs, errors, budget=budget, buckets=buckets)
        if chosen is None:
            assert not fitting
            unsolved += 1
            continue
        assert total(costs, chosen) == min(fitting)
        assert total(steps, chosen) <= buckets
        assert total(errors, chosen) <= budget * (1 + 1e-12)
    assert unsolved < 400  # coarse buckets leave some without a solution


@pytest.mark.parametrize("seed", range(4))
def test_it_is_milp_s_optimum_to_one_bucket_a_layer(seed):
    rng = np.random.default_rng(seed)
    layers, count = 40, 8
    costs, errors, budget, _ = instance(rng, layers, count)
    chosen = solve(costs, errors, budget=budget)
    assert chosen is not None

    def optimum(limit):
        one = np.kron(np.eye(layers), np.ones(count))
        found = milp(
            np.concatenate(costs),
            constraints=[
                LinearConstraint(one, 1, 1),
                LinearConstraint(np.concatenate(errors)[None], -np.inf, limit),
            ],
            integrality=np.ones(layers * count),
            bounds=Bounds(0, 1),
            options=dict(mip_rel_gap=0),
        )
        assert found.success
        return found.fun

    # Rounded up, an error gains less than a bucket.
    least, most = optimum(budget), optimum(budget * (1 - layers / BUCKETS))
    assert least - 1e-6 <= total(costs, chosen) <= most + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 7))
def test_the_error_is_never_above_the_budget_and_costs_may_be_of_any_size(seed, layers, count):
    rng = np.random.default_rng(seed)
    costs, errors, budget, uniform = instance(rng, layers, count)
    large = [c * 10**8 + rng.integers(0, 2, count) for c in costs]  # more than 32 bits
    chosen = solve(large, errors, budget=budget)
    if chosen is not None:
        assert total(errors, chosen) <= budget * (1 + 1e-12)
        one_bucket_a_layer = total(errors, [uniform] * layers) * (1 + 2 * layers / BUCKETS)
        roomier = solve(large, errors, budget=one_bucket_a_layer)
        assert roomier is not None
        assert total(large, roomier) <= total(large, [uniform] * layers)


def test_no_layers_no_budget_and_no_solution():
    assert solve([], [], budget=1.0) == []
    costs, errors = [np.array([5, 1])], [np.array([0.0, 2.0])]
    assert solve(costs, errors, budget=0.0) == [0]
    assert solve(costs, [np.array([1.0, 2.0])], budget=0.0) is None


@pytest.mark.parametrize(
    ("costs", "errors", "budget", "says"),
    (
        ([[1]], [[1.0]], float("nan"), "budget"),
        ([[1]], [[1.0]], -1.0, "budget"),
        ([[1]], [[float("nan")]], 1.0, "undefined"),
        ([[1, 2]], [[1.0]], 1.0, "2 bytes and 1 errors"),
        ([[1]], [], 1.0, "expected equal"),
    ),
)
def test_bad_input_is_named(costs, errors, budget, says):
    with pytest.raises(ValueError, match=says):
        solve([np.array(c) for c in costs], [np.array(e) for e in errors], budget=budget)
