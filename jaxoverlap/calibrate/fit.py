"""Fit the tables of the cost model to measurements. Deterministic: no clock, one seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.interpolate import NdBSpline
from scipy.sparse.linalg import spsolve

from jaxoverlap.cost.collective_tables import Collectives, Skew
from jaxoverlap.cost.interpolation import Curve, FitError
from jaxoverlap.cost.tables import MatmulTable

SEED = 20
HELD_BACK = 0.2  # of the rows: they say how good the fit is, and have no part in it

_SMOOTHNESS = 0.1  # weight of the table's second differences
_SLICES = 50  # of time, that are tried
_BEND = 0.02  # of log seconds: errors above it count by size, not by square


@dataclass(frozen=True)
class MatmulRows:
    """Measured matmuls, a row each: dims, and seconds."""

    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> MatmulRows:
        return MatmulRows(self.m[rows], self.n[rows], self.k[rows], self.seconds[rows])

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class CollectiveRow:
    """A measured collective: kind as HLO writes it, devices, bytes that each sends, seconds."""

    kind: str
    size: int
    bytes_moved: float
    seconds: float


@dataclass(frozen=True)
class Rates:
    """The rates behind a matmul's base time, over which a factor is fitted."""

    launch_s: float
    flops_per_s: float
    bytes_per_s: float
    element_bytes: float
    result_bytes: float


def held_back(count: int) -> np.ndarray:
    """Return a mask of the fifth of `count` measurements to hold back, by a fixed seed."""
    return np.random.default_rng(SEED).random(count) < HELD_BACK


def error(predicted: np.ndarray, measured: np.ndarray) -> FitError:
    """Return the mean, median and worst relative error of predictions; 0 if there are none."""
    if not len(measured):
        return FitError(0, 0.0, 0.0, 0.0)
    off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    mean, median, worst = (round(float(f(off)), 4) for f in (np.mean, np.median, np.max))
    return FitError(len(off), mean, median, worst)


# -- matmuls --------------------------------------------------------------------------------------


def fit_matmuls(
    rows: MatmulRows, rates: Rates, source: str, m: Sequence[int], nk: Sequence[int]
) -> MatmulTable:
    """Fit a matmul table's factor to all measurements; its error is from a fit to four fifths.

    Args:
        m, nk: the knots of the table's dims.
    """
    held, knots = held_back(len(rows)), (m, nk, nk)
    unseen = rows[held]
    base = _base(rates, rows)
    fitted = fit_factor(base[~held], rows[~held], knots)
    predicted = base[held] * np.exp(hats(unseen, knots) @ fitted)
    return MatmulTable(
        **vars(rates),
        m=tuple(m),
        n=tuple(nk),
        k=tuple(nk),
        log_factor=tuple(fit_factor(base, rows, knots).tolist()),
        source=source,
        error=error(predicted, unseen.seconds),
    )


def fit_factor(base: np.ndarray, rows: MatmulRows, knots: Sequence[Sequence[int]]) -> np.ndarray:
    """Fit the table of log factors over some seconds, flat.

    Least |predicted / measured - 1|, which is the error that is reported, by reweighted least
    squares of log seconds: a measurement that took too long counts for less than one that took too
    short, and disturbed measurements take too long. A penalty on the table's bends lets corners
    without measurements follow their neighbours.
    """
    matrix, bends = hats(rows, knots), _bends(knots)
    wanted = np.log(rows.seconds / base)
    weights, factor = np.ones(len(rows)), np.zeros(math.prod(map(len, knots)))
    for _ in range(20):
        weighted = matrix.T @ sp.diags_array(weights)
        normal = weighted @ matrix + _SMOOTHNESS * (bends.T @ bends)
        normal = normal + 1e-6 * sp.eye_array(len(factor))
        factor = np.asarray(spsolve(normal.tocsc(), weighted @ wanted))
        too_short = wanted - matrix @ factor  # log of measured / predicted
        weights = np.exp(-too_short).clip(0.1, 3.0) * _BEND / np.abs(too_short).clip(min=_BEND)
    return np.round(factor, 3)


def fit_rates(rows: MatmulRows, element_bytes: float, result_bytes: float) -> Rates:
    """Fit launch seconds, the bytes' rate by matmuls of small m, and the flops' by the fastest."""
    moved = element_bytes * (rows.m * rows.k + rows.k * rows.n) + result_bytes * rows.m * rows.n
    flops = 2.0 * rows.m * rows.n * rows.k
    launch_s = float(np.percentile(rows.seconds, 0.1))
    over_s = np.maximum(rows.seconds - launch_s, 1e-9)
    return Rates(
        launch_s=short(launch_s),
        flops_per_s=short(float(np.percentile(flops / over_s, 99))),
        bytes_per_s=short(_bytes_per_s(rows.m, moved, over_s)),
        element_bytes=element_bytes,
        result_bytes=result_bytes,
    )


def _bytes_per_s(m: np.ndarray, moved: np.ndarray, over_s: np.ndarray) -> float:
    """Return the memory's rate: the median over the largest tenth of matrix-vector products."""
    thin = m <= 16
    large = thin & (moved >= np.percentile(moved[thin], 90))
    return float(np.median(moved[large] / over_s[large]))


def _base(rates: Rates, rows: MatmulRows) -> np.ndarray:
    m, n, k = rows.m, rows.n, rows.k
    moved = rates.element_bytes * (m * k + k * n) + rates.result_bytes * m * n
    return rates.launch_s + 2.0 * m * n * k / rates.flops_per_s + moved / rates.bytes_per_s


def hats(rows: MatmulRows, knots: Sequence[Sequence[int]]) -> sp.csr_array:
    """Return the weights of the knots around each row, as `MatmulTable.seconds` has them."""
    grids = [np.log(np.asarray(grid, float)) for grid in knots]
    dims = zip((rows.m, rows.n, rows.k), grids, strict=True)
    points = np.column_stack([np.log(dim).clip(grid[0], grid[-1]) for dim, grid in dims])
    splines = tuple(np.r_[grid[0], grid, grid[-1]] for grid in grids)
    weights = NdBSpline.design_matrix(points, splines, 1)  # of degree one: linear between knots
    weights.resize(len(rows), math.prod(map(len, knots)))  # it ends at the last knot that is used
    return weights


def _bends(knots: Sequence[Sequence[int]]) -> sp.csr_array:
    """Return the second differences of a table along each of its dims."""
    bends = []
    for dim, grid in enumerate(knots):
        step = np.diff(np.log(np.asarray(grid, float)))
        left, right = 1 / step[:-1], 1 / step[1:]
        bend, row = np.zeros((len(grid) - 2, len(grid))), np.arange(len(grid) - 2)
        bend[row, row], bend[row, row + 1], bend[row, row + 2] = left, -left - right, right
        parts = [
            sp.csr_array(bend) if d == dim else sp.eye_array(len(k)) for d, k in enumerate(knots)
        ]
        bends.append(sp.kron(sp.kron(parts[0], parts[1]), parts[2]))
    return sp.csr_array(sp.vstack(bends))


# -- collectives ----------------------------------------------------------------------------------


def fit_collectives(rows: Sequence[CollectiveRow], source: str) -> Collectives:
    """Fit collectives' curves to all measurements; their errors are from fits to four fifths.

    The second error is of curves that lack all measurements of a fifth of the sizes (the smallest
    and the largest of each curve stay): what interpolation costs.
    """
    inner = sorted({_key(r) for r in rows} - _ends(rows))
    sizes = {key for key, out in zip(inner, held_back(len(inner)), strict=True) if out}
    return Collectives(
        curves=_curves(rows),
        source=source,
        error=_unseen_error(rows, held_back(len(rows)).tolist()),
        error_new_sizes=_unseen_error(rows, [_key(r) in sizes for r in rows]),
    )


Curves = dict[str, dict[int, Curve]]


def _curves(rows: Iterable[CollectiveRow]) -> Curves:
    """Fit a curve for each kind and number of devices: the geometric mean seconds of each size."""
    seen: dict[tuple[str, int], dict[float, list[float]]] = {}
    for row in rows:
        curve = seen.setdefault((row.kind, row.size), {})
        curve.setdefault(row.bytes_moved, []).append(math.log(row.seconds))
    curves: Curves = {}
    for (kind, size), points in sorted(seen.items()):
        moved = sorted(points)
        means = (short(math.exp(sum(points[b]) / len(points[b]))) for b in moved)
        curves.setdefault(kind, {})[size] = Curve(tuple(moved), tuple(means))
    return curves


def _unseen_error(rows: Sequence[CollectiveRow], held: Sequence[bool]) -> FitError:
    """Return the error on held-back measurements of curves that are fitted to the others."""
    curves = _curves(itertools.compress(rows, (not out for out in held)))
    test = list(itertools.compress(rows, held))
    predicted = [curves[r.kind][r.size].at(r.bytes_moved) for r in test]
    return error(np.array(predicted), np.array([r.seconds for r in test]))


def _key(row: CollectiveRow) -> tuple[str, int, float]:
    return row.kind, row.size, row.bytes_moved


def _ends(rows: Iterable[CollectiveRow]) -> set[tuple[str, int, float]]:
    """Return the smallest and the largest size of each curve."""
    moved: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        moved.setdefault((row.kind, row.size), []).append(row.bytes_moved)
    return {(*curve, end) for curve, sizes in moved.items() for end in (min(sizes), max(sizes))}


def fit_skew(
    computed_s: np.ndarray, waited_s: np.ndarray, sizes: Sequence[int], source: str
) -> Skew:
    """Fit the slice of time that all sizes have in common, and the longest wait of each.

    Least squares, the slice no shorter and no longer than what was computed.

    Args:
        computed_s: rising, of [points].
        waited_s: of [sizes, points], noise and all: below zero too.
        sizes: of the groups.
    """

    def shares(slice_s: float) -> np.ndarray:
        return -np.expm1(-computed_s / slice_s)

    def most_s(slice_s: float) -> np.ndarray:
        share = shares(slice_s)
        return np.maximum(waited_s @ share / (share @ share), 0.0)

    def loss(slice_s: float) -> float:
        predicted_s = np.outer(most_s(slice_s), shares(slice_s))
        return float(np.square(predicted_s - waited_s).sum())

    slice_s = min(np.geomspace(computed_s[0], computed_s[-1], _SLICES).tolist(), key=loss)
    most = {size: short(s) for size, s in zip(sizes, most_s(slice_s), strict=True)}
    return Skew(short(slice_s), most, source)


def short(x: float) -> float:
    """Round to four digits, which is more than any measurement here has."""
    return float(f"{x:.4g}")
