"""Draw a layout for a drawn step: mesh axes on named dims, as nobody in his senses would."""

from __future__ import annotations

import zlib

import numpy as np

from jaxoverlap._jax import jits
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.layouts.layout import by_size, spec_of
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.plan.edits import Pin
from tests.differential.case import Case


def drawn_layouts(case: Case) -> tuple[Pin, ...]:
    """Pin about three of four matmuls of a case to a layout drawn from its name."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    jaxpr, sizes = _traced(case.built(False)), dict(case.mesh.shape)
    matmuls, dims = list(pinnable(jaxpr)), DimNames(jaxpr)
    names = by_size([dot.eqn.outvars[0] for dot in matmuls], dims)
    layout = {axis: tuple(rng.permutation(names)[: rng.integers(1, 4)]) for axis in sizes}
    pins = []
    for dot in matmuls:
        out = dot.eqn.outvars[0]
        spec = spec_of(dims.of(out), out.aval.shape, layout, sizes)
        if rng.random() < 0.75:
            pins.append(Pin(site=dot.index, spec=spec))
    return tuple(pins)


def _traced(case: Case):
    """Return the flattened jaxpr of the case's first call."""

    def given(*args, **kwargs):
        return jits.infer(case.fn, args, kwargs), None

    (call, _), _ = case.call(given, case.first_state(), 0)
    return flatten(call.params["jaxpr"])
