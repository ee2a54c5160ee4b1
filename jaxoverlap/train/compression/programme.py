"""The exact dynamic programme of L-GreCo: settings of least bytes within a budget of error.

Minimise sum of bytes[l, s_l] subject to sum of errors[l, s_l] <= budget, one setting a layer. The
budget is divided into buckets and every error rounded up to full buckets, so that a solution of
the programme always meets the budget; of the rounded problem it is an optimum. Source: Markov et
al., L-GreCo (arXiv 2210.17357), algorithm 1, and its released code (10,000 buckets).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BUCKETS = 10_000


def solve(
    cost_bytes: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
    *,
    budget: float,
    buckets: int = BUCKETS,
) -> list[int] | None:
    """Return the setting of each layer, or None if no choice meets the budget after rounding.

    Args:
        cost_bytes: for each layer the bytes of each setting, integers of 0 or more.
        errors: for each layer the error of each setting, 0 or more.
        budget: the most that the chosen errors may sum to.
        buckets: into which the budget is divided. Time and memory grow with it.

    Raises:
        ValueError: if sizes differ, an error is negative or not a number, or the budget is not
            finite and 0 or more.
    """
    _check(cost_bytes, errors, budget)
    steps = [_in_buckets(np.asarray(e, np.float64), budget, buckets) for e in errors]
    layers = [
        _undominated(np.asarray(c), s, buckets) for c, s in zip(cost_bytes, steps, strict=True)
    ]
    if any(not len(kept) for kept, _, _ in layers):
        return None
    least = np.array([layer[2].min() for layer in layers])
    below = np.cumsum(least)  # buckets that the first l + 1 layers take at least
    above = below[-1] - below if len(layers) else below
    most = np.cumsum([layer[2].max() for layer in layers])  # more than this changes nothing
    if len(layers) and below[-1] > buckets:
        return None
    every_cost = np.concatenate([costs for _, costs, _ in layers] or [np.zeros(1, np.int64)])
    unit = max(int(np.gcd.reduce(every_cost)), 1)  # of all costs
    total = sum(int(costs.max()) // unit for _, costs, _ in layers)
    kind, infinite = (np.int32, 2**30) if total < 2**30 else (np.int64, 2**62)
    before = np.zeros(buckets + 1, kind)
    rows = [before]
    room = np.empty(buckets + 1, kind)
    for (_, costs, taken), low, after, enough in zip(layers, below, above, most, strict=True):
        now = np.full(buckets + 1, infinite, kind)
        end = buckets - after + 1  # what the layers after this one leave
        high = min(end, enough + 1)
        for cost, step in zip((costs // unit).tolist(), taken.tolist(), strict=True):
            first = max(low, step)
            if first < high:
                part, into = room[: high - first], now[first:high]
                np.add(before[first - step : high - step], cost, out=part)
                np.minimum(into, part, out=into)
        np.minimum(now[:high], infinite, out=now[:high])
        now[high:end] = now[high - 1]
        rows.append(now)
        before = now
    return _walked_back(rows, layers, unit, buckets)


def _walked_back(rows: list[np.ndarray], layers: list, unit: int, buckets: int) -> list[int]:
    """Read the settings off the table, from the last layer to the first."""
    bucket, chosen = buckets, list[int]()
    for number in range(len(layers) - 1, -1, -1):
        kept, costs, taken = layers[number]
        before, value = rows[number], int(rows[number + 1][bucket])
        fits = [
            i
            for i, step in enumerate(taken.tolist())
            if step <= bucket and int(before[bucket - step]) + int(costs[i]) // unit == value
        ]
        first = fits[0]
        chosen.append(int(kept[first]))
        bucket -= int(taken[first])
    return chosen[::-1]


def _in_buckets(errors: np.ndarray, budget: float, buckets: int) -> np.ndarray:
    """Round errors up to buckets of the budget; buckets + 1 is more than there is."""
    if budget == 0:
        return np.where(errors > 0, buckets + 1, 0).astype(np.int64)
    capped = np.minimum(errors / budget, 2.0) * buckets
    return np.minimum(np.ceil(capped), buckets + 1).astype(np.int64)


def _undominated(
    costs: np.ndarray, steps: np.ndarray, buckets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the settings that no other one beats in both cost and error; number, cost, buckets."""
    order = np.lexsort((steps, costs))
    kept, best = [], buckets + 1
    for number in order.tolist():
        if steps[number] < best:
            kept.append(number)
            best = int(steps[number])
    chosen = np.array(kept, np.int64)
    return chosen, costs[chosen].astype(np.int64), steps[chosen]


def _check(costs: Sequence[np.ndarray], errors: Sequence[np.ndarray], budget: float) -> None:
    if not (math.isfinite(budget) and budget >= 0):
        raise ValueError(f"budget={budget!r}: expected a finite error, 0 or more")
    if len(costs) != len(errors):
        raise ValueError(
            f"bytes of {len(costs)} layers and errors of {len(errors)}: expected equal"
        )
    for layer, (c, e) in enumerate(zip(costs, errors, strict=True)):
        if len(c) != len(e) or not len(c):
            raise ValueError(
                f"layer {layer} has {len(c)} bytes and {len(e)} errors: expected one of each for "
                "every setting, and at least one setting"
            )
        if not (np.asarray(e) >= 0).all() or not (np.asarray(c) >= 0).all():
            raise ValueError(f"layer {layer} has a negative or undefined error or size")
