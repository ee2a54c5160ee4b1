"""Make the shardings in the types of a step on an explicit mesh constraints.

    x: f32[8@data, 16] ;  y: f32[8@data, 32] = dot_general x w

->  x: f32[8, 16] ;  y: f32[8, 32] = dot_general x w ;  z = sharding_constraint[data, None] y

The other passes then need not care which kind of mesh a step is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxoverlap._jax import explicit
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.plan.edits import DropTypes


def run(step: EditedStep, edits: Sequence[DropTypes]) -> EditedStep:
    """Drop the types of a step; they are put back in `EditedStep.result`."""
    (edit,) = edits
    mesh = explicit.automatic_mesh(step.mesh)
    if step.edits or mesh == step.mesh:
        raise misfit(edit, "it is the first edit of a step on an explicit mesh, or none")
    jaxpr = explicit.automatic(
        step.jaxpr, step.mesh, inferred=not edit.inferred, partitions_itself=partitions_itself
    )
    return replace(step, jaxpr=jaxpr, mesh=mesh, untyped=step)
