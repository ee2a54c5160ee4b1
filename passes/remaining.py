"""The collectives that stay XLA's: what no ring does, with bytes and source lines."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax

from jaxoverlap import _shardy
from jaxoverlap._text import short_source
from jaxoverlap.plan import Remaining


def remaining(lowered: jax.stages.Lowered, axis_sizes: Mapping[str, int]) -> tuple[Remaining, ...]:
    """What a partitioner will add to a lowered step, most bytes first; nothing is compiled.

    These are Shardy's own answers to the step's shardings. XLA may do otherwise (combine several,
    move one out of a loop): `audit()` of the compiled step shows what it did.
    """
    sums: dict[tuple[str, tuple[str, ...], str], list[int]] = {}
    for implied in _shardy.implied_collectives(lowered):
        devices = math.prod(axis_sizes[a] for a in implied.axes)
        key = (implied.kind, implied.axes, short_source(implied.file, implied.line))
        total = sums.setdefault(key, [0, 0])
        total[0] += implied.runs
        total[1] += implied.runs * _sent(implied.kind, implied.local_bytes, devices)
    found = [
        Remaining(kind=kind, axes=axes, source=source, runs=runs, bytes_moved=sent)
        for (kind, axes, source), (runs, sent) in sums.items()
    ]
    return tuple(sorted(found, key=lambda r: (-r.bytes_moved, r.source)))


def _sent(kind: str, result: int, n: int) -> int:
    """Bytes that each device sends for a result of so many local bytes, by a ring."""
    if kind == "all_reduce":
        return 2 * result * (n - 1) // n
    if kind == "reduce_scatter":
        return result * (n - 1)
    return result if kind == "collective_permute" else result * (n - 1) // n
