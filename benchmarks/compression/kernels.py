"""Time the arithmetic of compression on this machine: QR and Gram-Schmidt, and the programme.

python -m benchmarks.compression.kernels
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.train.compression.compressors.orthogonal import orthonormal
from jaxoverlap.train.compression.programme import solve


def main() -> None:
    sheet = Table("4096 rows", "QR ms", "Gram-Schmidt ms", "compile s: QR", "Gram-Schmidt")
    for columns in (1, 2, 4, 8, 16, 32):
        timed = [orthonormal_ms(columns, method) for method in ("qr", "gram-schmidt")]
        cells = (*(run for run, _ in timed), *(make for _, make in timed))
        sheet.add_row(str(columns), *(f"{c:.2f}" for c in cells))
    Console().print(sheet)
    sheet = Table("layers x settings", "ms", "of uniform's bytes", title="10,000 buckets")
    for layers, settings in ((125, 32), (250, 32), (500, 8), (500, 16), (500, 32), (1000, 32)):
        ms, share = programme_ms(layers, settings)
        sheet.add_row(f"{layers} x {settings}", f"{ms:.0f}", f"{share:.2f}")
    Console().print(sheet)


def orthonormal_ms(columns: int, method: Any) -> tuple[float, float]:
    """Return the milliseconds of a run, and the seconds of compiling."""
    x = jax.random.normal(jax.random.key(columns), (4096, columns))
    began = time.perf_counter()
    made = jax.jit(lambda x: orthonormal(x, method)).lower(x).compile()
    compiling = time.perf_counter() - began
    return median_ms(lambda: jax.block_until_ready(made(x))), compiling


def programme_ms(layers: int, settings: int) -> tuple[float, float]:
    """Return the milliseconds of a solution, and its bytes over uniform's."""
    rng, middle = np.random.default_rng(0), settings // 2
    ranks = np.arange(1, settings + 1)
    costs = [4 * ranks * int(rng.integers(512, 9000)) for _ in range(layers)]
    errors = [np.sort(rng.gamma(2, 1, settings))[::-1] * rng.gamma(1, 2) for _ in range(layers)]
    budget = sum(float(e[middle]) for e in errors)
    found = list[Any]()
    ms = median_ms(lambda: found.append(solve(costs, errors, budget=budget)))
    least = sum(int(c[i]) for c, i in zip(costs, found[-1], strict=True))
    return ms, least / sum(int(c[middle]) for c in costs)


def median_ms(call: Callable[[], object], runs: int = 7) -> float:
    call()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    main()
