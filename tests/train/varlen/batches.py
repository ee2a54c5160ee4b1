"""Batches of lengths, plans with rings of any size, and dense attention to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.costs import Hop
from jaxoverlap.train.varlen.packing import Packing, packing_prices
from jaxoverlap.train.varlen.rings import costs_in

# Numbers of about an H100's, so that few tokens are worth splitting.
COSTS = varlen.AttentionCosts(
    blocks=(16, 131072),
    pair_s=(1e-9, 3e-11),
    launch_s=1e-6,
    token_bytes=64.0,
    remap_bytes=128.0,
    linear_s=5e-7,
    intra=Hop(1e-6, 270e9),
    network=Hop(2e-6, 48e9),
    rails=2,
)


def real_lengths(name: str) -> np.ndarray:
    """Return token lengths of real documents, or skip."""
    places = [p / "shared/data/lengths" for p in Path(__file__).parents]
    for place in places:
        if (place / f"{name}.txt").exists():
            return np.loadtxt(place / f"{name}.txt", dtype=int)
    pytest.skip(f"no list of lengths {name}.txt under any shared/data/lengths above this checkout")


def random_plan(planner: varlen.Planner, rng: np.random.Generator) -> varlen.BatchPlan:
    """Plan a random batch with groups of random sizes, full up to the planner's only program."""
    (bounds,), nodes = planner.programs, planner.nodes
    costs = costs_in(bounds, planner.costs)
    rows: list[tuple[int, int, int]] = []
    best = None
    for _ in range(rng.integers(1, 40)):
        at = int(rng.choice([i for i, g in enumerate(nodes.ring_sizes) if bounds.width(g)]))
        g = nodes.ring_sizes[at]
        length = int(rng.integers(1, max(2, g * bounds.width(g) // int(rng.integers(1, 6)))))
        row = length, at, int(rng.integers(nodes.total // g))
        plan = _plan_of(planner, costs, bounds, [*rows, row])
        if plan is not None:
            best = plan
            rows.append(row)
    return best or _plan_of(planner, costs, bounds, [(1, 0, 0)])  # type: ignore[return-value]


def _plan_of(planner, costs, bounds, rows) -> varlen.BatchPlan | None:
    lengths = np.array([length for length, _, _ in rows])
    price = packing_prices(lengths, planner.nodes, costs)
    packing = Packing(lengths, planner.nodes, costs, price, bounds=bounds)
    for index, (_, at, ring) in enumerate(rows):
        packing.put(index, at, ring)
    try:
        return planner.plan_of(packing)
    except varlen.Infeasible:
        return None


def dense(lengths: np.ndarray, q, k, v, to_out) -> list[np.ndarray]:
    """Return block-diagonal causal attention and its gradients in float64.

    q, to_out: [tokens, heads, head]; k, v: [tokens, kv heads, head].
    """
    q, k, v, to_out = (np.asarray(x, np.float64) for x in (q, k, v, to_out))
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    out, to_q, to_k, to_v = (
        np.zeros(q.shape),
        np.zeros(q.shape),
        np.zeros(k.shape),
        np.zeros(k.shape),
    )
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        at = slice(end - length, end)
        keys, values = (np.repeat(x[at], group, axis=1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[at], keys) * scale
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[at] = np.einsum("hqk,khd->qhd", p, values)
        to_p = np.einsum("qhd,khd->hqk", to_out[at], values)
        to_scores = p * (to_p - (p * to_p).sum(-1, keepdims=True)) * scale
        to_q[at] = np.einsum("hqk,khd->qhd", to_scores, keys)
        grouped = (length, k.shape[1], group, k.shape[2])
        to_k[at] = np.einsum("hqk,qhd->khd", to_scores, q[at]).reshape(grouped).sum(2)
        to_v[at] = np.einsum("hqk,qhd->khd", p, to_out[at]).reshape(grouped).sum(2)
    return [out, to_q, to_k, to_v]
