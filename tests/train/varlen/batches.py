"""Batches of lengths, plans with rings of any size, and dense attention to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxoverlap.train import varlen
from jaxoverlap.train.varlen.costs import Hop
from jaxoverlap.train.varlen.partition import Sharing, prices_of

LENGTHS = Path(__file__).parents[4] / "shared" / "data" / "lengths"

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
    places = [LENGTHS, *(p / "shared/data/lengths" for p in Path(__file__).parents)]
    for place in places:
        if (place / f"{name}.txt").exists():
            return np.loadtxt(place / f"{name}.txt", dtype=int)
    pytest.skip(f"no list of lengths {name}.txt under any shared/data/lengths above this checkout")


def random_plan(planner: varlen.Planner, rng: np.random.Generator) -> varlen.BatchPlan:
    """Plan a random batch with rings of random sizes, full up to the planner's bounds."""
    bounds, nodes = planner.bounds, planner.nodes
    assert bounds is not None
    room = {g: np.full(nodes.total // g, bounds.width(g)) for g in nodes.ring_sizes}
    left, rows = nodes.total * bounds.tokens, []
    for _ in range(rng.integers(1, 40)):
        at = int(rng.integers(len(nodes.ring_sizes)))
        g = nodes.ring_sizes[at]
        most = min(left, g * bounds.width(g))
        if most < 1:
            continue
        length = int(rng.integers(1, max(2, most // int(rng.integers(1, 6)))))
        need = length if g == 1 else 2 * -(-length // (2 * g))
        ring = int(rng.integers(len(room[g])))
        if room[g][ring] >= need:
            room[g][ring] -= need
            left -= length
            rows.append((length, at, ring))
    rows = rows or [(1, 0, 0)]
    lengths = np.array([length for length, _, _ in rows])
    shared = Sharing(lengths, nodes, planner.costs, planner.capacity)
    price = prices_of(lengths, nodes, planner.costs)
    for index, (_, at, ring) in enumerate(rows):
        shared.put(index, at, ring, price)
    plan = planner.plan_of(shared)
    assert bounds.fits(plan.bounds)
    return replace(plan, bounds=bounds)


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
