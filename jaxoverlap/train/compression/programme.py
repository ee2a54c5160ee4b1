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
_INFINITE = 2**62  # bytes: more than any choice sends


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
    rows = [np.zeros(buckets + 1, np.int64)]  # the least bytes of the first layers, by buckets
    for _, costs, taken in layers:
        before, now = rows[-1], np.full(buckets + 1, _INFINITE)
        for cost, step in zip(costs.tolist(), taken.tolist(), strict=True):
            np.minimum(now[step:], before[: buckets + 1 - step] + cost, out=now[step:])
        rows.append(now)
    return None if rows[-1][-1] >= _INFINITE else _walked_back(rows, layers, buckets)


def _walked_back(rows: list[np.ndarray], layers: list, buckets: int) -> list[int]:
    """Read the settings off the table, from the last layer to the first."""
    bucket, chosen = buckets, list[int]()
    for before, now, (kept, costs, taken) in zip(
        rows[-2::-1], rows[:0:-1], layers[::-1], strict=True
    ):
        fits = (taken <= bucket) & (before[bucket - taken] + costs == now[bucket])
        first = int(fits.argmax())
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
