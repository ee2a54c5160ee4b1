"""Rings that the rules plan, on H100s."""

from __future__ import annotations

import jax

from jaxoverlap.cost.find import cost_model
from jaxoverlap.cost.groups import Group
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.partitioned import Shardings as Read
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.ring_plan import Ring
from tests.support.reads import NO, M, matmul
from tests.support.terms import terms_of

AXES = {"model": 8}


H100 = cost_model("h100-sxm:8x8")


NVLINK = RingCosts(H100, {"model": Group(8, by_copy=True)})


GATHER = ((M, NO), (NO, M), (NO, M))  # x [a, b], w [b, c] and y [a, c]


SCATTER = ((NO, M), (M, NO), (M, NO))


SUM = ((NO, M), (M, NO), (NO, NO))


def decided(
    specs,
    rows: int,
    width: int = 8192,
    *,
    inner=None,
    prices: RingCosts | None = NVLINK,
    dtype="bfloat16",
    **options,
):
    inner = inner or width
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, inner), (inner, width))]
    step_bodies = bodies(jax.make_jaxpr(matmul)(*shapes))
    (entry,), rings_by_body = decide(
        step_bodies, {0: Read(*specs)}, terms_of(AXES, prices=prices, **options)
    )
    return entry, [ring for body_rings in rings_by_body.values() for ring in body_rings.rings]


def ring_of(specs, rows: int, width: int = 8192, inner: int | None = None) -> Ring:
    _, (ring,) = decided(specs, rows, width, inner=inner, prices=None)
    return ring
