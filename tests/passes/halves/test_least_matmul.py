"""The smallest matmul of parts is found that XLA could make one of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.halves.least_matmul import least_matmul
from tests.support.halves import halved, values

ROWS, IN, OUT = 8, 4, 16


def layer(x, wide, narrow):
    return (x @ wide).sum(1) + (x @ narrow).sum(1) + jnp.einsum("bd,bd->b", x, x)


def args():
    return values(ROWS, IN, seed=1), values(IN, OUT, seed=2), values(IN, 2, seed=3)


def test_it_is_the_smallest_of_those_with_one_weight():
    jaxpr, cut = halved(jax.jit(layer), args(), (ROWS, IN))
    rows, half = ((), ()), ROWS // 2
    whole = {dot.index: Shardings(rows, rows, rows) for dot in dots(cut.jaxpr)}
    narrow = 4 * (half * IN + IN * 2 + half * 2)
    assert least_matmul(jaxpr, cut.jaxpr, whole, 2, {"data": 2}) == narrow
    assert least_matmul(jaxpr, cut.jaxpr, {}, 2, {"data": 2}) == narrow


def test_only_what_a_device_does_counts():
    jaxpr, cut = halved(jax.jit(layer), args(), (ROWS, IN))
    by_rows = Shardings((("data",), ()), ((), ()), (("data",), ()))
    lies = {dot.index: by_rows for dot in dots(cut.jaxpr)}
    rows = ROWS // 2 // 2
    assert least_matmul(jaxpr, cut.jaxpr, lies, 2, {"data": 2}) == 4 * (
        rows * IN + IN * 2 + rows * 2
    )


def test_parts_that_share_no_operand_have_none():
    def alone(x):
        return jnp.einsum("bd,bd->b", x, x)

    jaxpr, cut = halved(jax.jit(alone), args()[:1], (ROWS, IN))
    assert least_matmul(jaxpr, cut.jaxpr, {}, 2, {"data": 2}) is None
