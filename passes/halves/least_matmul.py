"""Find the smallest matmul that every batch part repeats with a shared weight.

XLA's dot merger fuses small matmuls that share an operand (by default where one of the two reads
and writes less than 64 MiB), as those of queries, keys and values. The matmuls of two parts would
become one again, which waits for the collectives of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import SIDES
from jaxoverlap.passes.analysis.jaxprs import Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.halves.shardings import matmuls_of_parts
from jaxoverlap.passes.planning.matmuls import matmul_of
from jaxoverlap.passes.planning.profit import local_sizes
from jaxoverlap.passes.planning.splits import ShardedMatmul


def least_matmul(
    jaxpr: Any,
    cut: Any,
    shardings: Mapping[Any, Shardings],
    parts: int,
    axis_sizes: Mapping[str, int],
) -> int | None:
    """Return the bytes that the smallest such matmul of one part reads and writes on one device.

    Args:
        jaxpr, cut, parts: the step, the step in parts, and their number.
        shardings: of the matmuls of the step in parts.
        axis_sizes: devices along each mesh axis.

    Returns:
        The bytes; None if parts share no operand of a matmul.
    """
    return min(
        (
            _local_bytes(copies[0], shardings.get(copies[0].index), axis_sizes)
            for copies in _sharing(jaxpr, cut, parts)
        ),
        default=None,
    )


def _sharing(jaxpr: Any, cut: Any, parts: int) -> Iterator[list[Dot]]:
    """Yield the copies of a matmul, one for each part, if they share an operand."""
    for _, copies in matmuls_of_parts(jaxpr, cut, parts):
        read = [set(compat.variables(part.eqn.invars)) for part in copies]
        if len(copies) > 1 and set.intersection(*read):
            yield copies


def _local_bytes(dot: Dot, shardings: Shardings | None, axis_sizes: Mapping[str, int]) -> int:
    """Return the bytes of a matmul's three sides on one device; global ones if unknown."""
    avals = [v.aval for v in (*dot.eqn.invars, *dot.eqn.outvars)]
    matmul = matmul_of(dot, shardings, axis_sizes) if shardings else None
    if not isinstance(matmul, ShardedMatmul):
        return sum(aval.size * aval.dtype.itemsize for aval in avals)
    sizes = local_sizes(matmul)
    return sum(
        math.prod(sizes[letter] for letter in matmul.einsum.side(side)) * itemsize
        for side, itemsize in zip(SIDES, matmul.itemsize, strict=True)
    )
