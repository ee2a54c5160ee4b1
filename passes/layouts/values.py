"""Pin values that are no matmul's result: arguments, and what loops and slices read.

    parts = reshape batch            # the batch's sharding is on the dim that a loop indexes

->  p = reshape batch ;  parts = sharding_constraint[None, fsdp, None] p

XLA's partitioner moves a value that a loop indexes along a sharded dim in each iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.edited import EditedStep, check_rank, misfit
from jaxoverlap.passes.rewriting.pin_results import constrained, dims_of, with_results_pinned
from jaxoverlap.plan.edits import PinArgument, PinValue


def run(step: EditedStep, edits: Sequence[PinArgument | PinValue]) -> EditedStep:
    """Pin the values that edits name."""
    arguments = [edit for edit in edits if isinstance(edit, PinArgument)]
    values = [edit for edit in edits if isinstance(edit, PinValue)]
    by_index = {body.index: body for body in bodies(step.jaxpr)}
    for edit in values:
        body = by_index.get(edit.body)
        if body is None or body.opaque or edit.position not in range(len(body.eqns)):
            raise misfit(edit, "no such value is in the step")
        check_rank(edit, edit.spec, body.eqns[edit.position].outvars[0])

    def visit(body: Body) -> list[Any] | None:
        here = {edit.position: edit.spec for edit in values if edit.body == body.index}
        return with_results_pinned(body.eqns, here, step.mesh)

    jaxpr = map_bodies(step.jaxpr, visit) if values else step.jaxpr
    return step.to(_with_arguments(jaxpr, arguments, step))


def _with_arguments(jaxpr: Any, edits: Sequence[PinArgument], step: EditedStep) -> Any:
    """Constrain arguments of the step, for all that reads them."""
    pinned, first = dict[Any, Any](), list[Any]()
    for edit in edits:
        if not 0 <= edit.argument < len(jaxpr.invars):
            raise misfit(edit, f"the step has {len(jaxpr.invars)} arguments")
        var = jaxpr.invars[edit.argument]
        check_rank(edit, edit.spec, var)
        reader = next((eqn for eqn in jaxpr.eqns if var in compat.variables(eqn.invars)), None)
        if reader is None:
            raise misfit(edit, "nothing reads that argument")
        pinned[var] = compat.like_var(var)
        like = compat.in_no_context(reader)
        first += constrained(var, pinned[var], dims_of(edit.spec), step.mesh, like)
    if not pinned:
        return jaxpr

    def read(eqn: Any) -> Any:
        invars = [v if compat.is_literal(v) else pinned.get(v, v) for v in eqn.invars]
        return eqn.replace(invars=invars)

    return jaxpr.replace(eqns=[*first, *map(read, jaxpr.eqns)])
