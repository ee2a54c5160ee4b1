"""Choose settings from measured errors: the dynamic programme's, or the switch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxoverlap.train.compression.compressors.compressor import sent
from jaxoverlap.train.compression.layers import Layer
from jaxoverlap.train.compression.programme import solve
from jaxoverlap.train.compression.sync import Sync


class Choice(NamedTuple):
    """Settings, as indices into each layer's candidates, and the errors they were chosen by.

    Attributes:
        settings: int32 [layers].
        reference: those whose error is the budget, int32 [layers].
        guarded: whether `never_worse_than_uniform` returned the reference.
    """

    settings: np.ndarray
    reference: np.ndarray
    guarded: bool


def choose(
    sync: Sync,
    layers: Sequence[Layer],
    workers: int,
    *,
    errors: np.ndarray,
    norms: np.ndarray,
    norms_before: np.ndarray,
) -> Choice:
    """Choose a setting for each layer.

    Args:
        sync: how.
        layers: those that are compressed.
        workers: how many there are.
        errors: [layers, most candidates], what each setting would lose.
        norms, norms_before: of the layers' gradients now and at the last choice (NaN if none).
    """
    reference = _reference(sync, layers, norms, norms_before)
    if not sync.by_error:
        return Choice(reference, reference, False)
    costs = [cost_bytes(sync, layer, workers) for layer in layers]
    layer_errors = [errors[i, : len(c)].astype(np.float64) for i, c in enumerate(costs)]
    budget = total(layer_errors, reference)
    found = solve(costs, layer_errors, budget=budget)
    settings = reference if found is None else np.array(found, np.int32)
    return never_worse_than_uniform(settings, reference, costs, layer_errors)


def never_worse_than_uniform(
    settings: np.ndarray,
    reference: np.ndarray,
    costs: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
) -> Choice:
    """Keep the reference unless other settings have no more error and fewer bytes.

    The programme rounds errors up, so it may miss the reference itself by a bucket a layer.
    """
    better = total(errors, settings) <= total(errors, reference) and total(costs, settings) < total(
        costs, reference
    )
    if better:
        return Choice(settings, reference, False)
    return Choice(reference, reference, not np.array_equal(settings, reference))


def cost_bytes(sync: Sync, layer: Layer, workers: int) -> np.ndarray:
    """Return the bytes of each candidate of a layer, all workers together, as integers."""
    of_one = [sent(sync.compressor, layer, s, workers) for s in sync.candidates(layer)]
    return np.array([round(b * workers) * layer.count for b in of_one], np.int64)


def total(values: Sequence[np.ndarray], settings: np.ndarray) -> float:
    """Return the sum of the layers' values at some settings."""
    return float(sum(v[s] for v, s in zip(values, settings.tolist(), strict=True)))


def _reference(
    sync: Sync, layers: Sequence[Layer], norms: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """Return the default settings, or those that the switch chooses."""
    if sync.accordion is None:
        return np.array([sync.default(layer) for layer in layers], np.int32)
    chosen = []
    for layer, now, last in zip(layers, norms, before, strict=True):
        low, high = sync.accordion.ends(sync.compressor, layer)
        steady = abs(now - last) < sync.accordion.threshold * last  # not if last is NaN
        chosen.append(sync.candidates(layer).index(low if steady else high))
    return np.array(chosen, np.int32)
