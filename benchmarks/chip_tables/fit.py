"""Fit what published rows alone are enough for: attention, permutes, and knots for matmuls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import minimize

from jaxoverlap.calibrate.fit import (
    CollectiveRow,
    MatmulRows,
    error,
    fit_factor,
    hats,
    held_back,
    short,
)
from jaxoverlap.cost import nccl
from jaxoverlap.cost.collective_tables import Permutes
from jaxoverlap.cost.tables import AttentionTable

# A finer table (11 x 9 x 9 knots) gained 0.3 to 0.6 points of mean error at 3.5 times the size. A
# model of waves under this table, over six shapes of tiles, gained 0.8 on the A100, else nothing.
M_KNOTS = (1, 16, 64, 256, 1024, 4096, 32768)
NK_KNOTS = (32, 256, 1024, 2048, 4096, 16384, 65536)
LENGTH_KNOTS = (64, 128, 512, 2048, 8192, 16384)
HEADS_KNOTS = (1, 8, 32, 128, 512, 4096)
HEAD_SIZE_KNOTS = (64, 128, 256)


def fit_attention(
    rows: MatmulRows, full: MatmulRows | None, bytes_per_s: float, source: str
) -> AttentionTable:
    """Fit kernels of attention, as matmuls are: four fifths of the rows for the error, then all.

    Args:
        rows: under a causal mask; m is the length, n the heads of all the batch, k their size.
        full: the same without a mask, which only the second error is of.
        bytes_per_s: the memory's rate.
    """
    held, knots = held_back(len(rows)), (LENGTH_KNOTS, HEADS_KNOTS, HEAD_SIZE_KNOTS)
    flops = 2.0 * rows.n * rows.m**2 * rows.k
    launch_s = short(float(np.percentile(rows.seconds, 0.1)))
    rate = short(float(np.percentile(flops / np.maximum(rows.seconds - launch_s, 1e-9), 99)))
    base = launch_s + flops / rate + 8.0 * rows.n * rows.m * rows.k / bytes_per_s
    matrix = hats(rows[held], knots)
    predicted = base[held] * np.exp(matrix @ fit_factor(base[~held], rows[~held], knots))
    fitted = AttentionTable(
        launch_s=launch_s,
        flops_per_s=rate,
        bytes_per_s=bytes_per_s,
        length=LENGTH_KNOTS,
        heads=HEADS_KNOTS,
        head_size=HEAD_SIZE_KNOTS,
        log_factor=tuple(fit_factor(base, rows, knots).tolist()),
        source=source,
        error=error(predicted, rows.seconds[held]),
    )
    if full is None:
        return fitted
    dims = zip(full.m.tolist(), full.n.tolist(), full.k.tolist(), strict=True)
    twice = np.array([fitted.seconds(*row, times=2.0) for row in dims])
    return msgspec.structs.replace(fitted, error_full=error(twice, full.seconds))


def fit_permutes(rows: Sequence[CollectiveRow], source: str) -> Permutes:
    """Fit latency, a channel's rate and the link's, by least absolute error of log seconds."""
    moved = np.array([r.bytes_moved for r in rows])
    seconds = np.array([r.seconds for r in rows])
    channels = np.array([nccl.permute_rate(r.bytes_moved, _channels(r), 1.0) for r in rows])

    def predicted(log_rates: np.ndarray) -> np.ndarray:
        latency_s, channel, link = np.exp(log_rates)
        return latency_s + moved / np.minimum(channels * channel, link)

    def loss(log_rates: np.ndarray) -> float:
        return float(np.abs(np.log(predicted(log_rates) / seconds)).mean())

    link = float((moved / seconds).max())
    start = np.log([seconds.min(), link / 20, link])
    optimum = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
    latency_s, channel, link = (short(x) for x in np.exp(optimum.x))
    return Permutes(latency_s, channel, link, source, error(predicted(optimum.x), seconds))


def _channels(row: CollectiveRow) -> int:
    return nccl.permute_channels(row.bytes_moved, row.size)
