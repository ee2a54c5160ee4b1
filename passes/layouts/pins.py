"""Pin the results of matmuls to a layout, by constraints that the user did not write.

    scores = dot_general q k

->  s = dot_general q k ;  scores = sharding_constraint[fsdp, tp, None, None] s

The step is differentiated already: the matmuls of the backward pass, and those that it computes
again, are pinned like the others, and no user can reach them. A result that the user constrains
himself stays as he said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, dots, map_bodies
from jaxoverlap.passes.analysis.reshards import Reshards
from jaxoverlap.passes.edited import EditedStep, check_rank, check_sites
from jaxoverlap.passes.rewriting.pin_results import with_results_pinned
from jaxoverlap.plan.edits import Pin

Pins = Mapping[int, Spec]
"""The mesh axes on each dim of matmuls' results, by the number of the matmul."""


def run(step: EditedStep, edits: Sequence[Pin]) -> EditedStep:
    """Pin the results that edits name."""
    matmuls = {dot.index: dot for dot in dots(step.jaxpr)}
    check_sites(matmuls, ((edit.site, edit) for edit in edits))
    for edit in edits:
        check_rank(edit, edit.spec, matmuls[edit.site].eqn.outvars[0])
    return step.to(pinned(step.jaxpr, {edit.site: edit.spec for edit in edits}, step.mesh))


def pinnable(jaxpr: Any) -> Iterator[Dot]:
    """Yield the matmuls of a step whose results may be pinned: those that the partitioner splits.

    Those in manual code are not among them, nor those that the user constrains, nor those whose
    types state their shardings, as in `jax.sharding.explicit_axes`.
    """
    for body in bodies(jaxpr):
        if not body.opaque and body.dots:
            reshards = Reshards(body)
            for dot in body.dots:
                free = dot.inside is None and not compat.stated_axes(dot.eqn)
                if free and not reshards.end(dot.eqn.outvars[0]).reshards:
                    yield dot


def pinned(jaxpr: Any, pins: Pins, mesh: Mesh) -> Any:
    """Constrain the results of matmuls.

    Args:
        jaxpr: the step.
        pins: the sharding of each pinned result; others are left to the partitioner.
        mesh: the step's mesh.
    """

    def visit(body: Body) -> list[Any] | None:
        here = {dot.position: pins[dot.index] for dot in body.dots if dot.index in pins}
        return with_results_pinned(body.eqns, here, mesh)

    return map_bodies(jaxpr, visit)
