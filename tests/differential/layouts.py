"""Draw a layout for a drawn step: mesh axes on named dims, as nobody in his senses would."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from jax.sharding import AxisType

from jaxoverlap._jax import explicit, jits
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import dots
from jaxoverlap.passes.layouts import moved_first
from jaxoverlap.passes.layouts.layout import by_size, spec_of
from jaxoverlap.passes.layouts.pins import pinnable
from jaxoverlap.plan.edits import MovedFirst, MoveFirst, Pin
from tests.differential.case import Case


def drawn_layouts(case: Case) -> tuple[Pin | MoveFirst, ...]:
    """Pin about three of four matmuls of a case, drawn from its name; of some a dim comes first."""
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
    moved = tuple(_moved(jaxpr, rng))
    first = (MoveFirst(axes=tuple(sizes), matmuls=moved),) if moved else ()
    return (*pins, *first)


def _moved(jaxpr, rng: np.random.Generator) -> Iterator[MovedFirst]:
    """Draw a dim of an operand, or a contracted one of both, of about half of the matmuls."""
    for dot in dots(jaxpr):
        (contracted, batch), (lhs, rhs) = dot.eqn.params["dimension_numbers"], dot.eqn.invars
        if batch != ((), ()) or rng.random() < 0.5:
            continue
        choices = [(pair[0], pair[1]) for pair in zip(*contracted, strict=True)]
        choices += [(d, None) for d in range(lhs.aval.ndim) if d not in contracted[0]]
        choices += [(None, d) for d in range(rhs.aval.ndim) if d not in contracted[1]]
        one, other = choices[rng.integers(len(choices))]
        move = MovedFirst(site=dot.index, lhs=one, rhs=other)
        if moved_first._fits(dot, move):
            yield move


def _traced(case: Case):
    """Return the flattened jaxpr of the case's first call, without types if all axes are explicit."""

    def given(*args, **kwargs):
        return jits.infer(case.fn, args, kwargs), None

    (call, _), _ = case.call(given, case.first_state(), 0)
    jaxpr = flatten(call.params["jaxpr"])
    if set(case.mesh.axis_types) == {AxisType.Explicit}:
        return explicit.automatic(jaxpr, case.mesh, inferred=True)
    return jaxpr  # on a mesh of both kinds types may stay, which rules out pins
