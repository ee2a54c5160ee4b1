"""Pin the results of a step to the shardings that XLA gives them in the plain step.

    g: [d@data, f@model] = dot_general x dy        # out_shardings leave it open

->  r: [d, f] = <ring> x dy ;  g = sharding_constraint[data, model] r

XLA chooses where a result lies that the jit leaves open. A ring says where its own results lie, so
without a constraint the choice could change: parameters would come back in another layout, could
not be donated, and the next call would compile again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.edited import EditedStep, misfit
from jaxoverlap.plan.edits import PinResults


def run(step: EditedStep, edits: Sequence[PinResults]) -> EditedStep:
    """Pin the results that edits name."""
    jaxpr = step.jaxpr
    for edit in edits:
        wanted = dict(edit.specs)
        if strange := wanted.keys() - set(range(len(jaxpr.outvars))):
            raise misfit(edit, f"the step has no result {min(strange)}")
        specs = [wanted.get(number) for number in range(len(jaxpr.outvars))]
        jaxpr = pin_results(jaxpr, specs, step.mesh)
    return step.to(jaxpr)


def pinned_results(
    params: dict[str, Any], specs: Sequence[Spec | str], mesh: Mesh
) -> list[PinResults]:
    """Return the edit that pins the results that a jit leaves open; none if it leaves none.

    Args:
        params: the jit equation's parameters.
        specs: the sharding of each result of the plain step, from `partitioned`.
        mesh: the step's mesh.
    """
    if explicit_axes(mesh):  # there a result's type says how it lies
        return []
    outvars = params["jaxpr"].outvars
    left_open = [
        (number, spec)
        for number, (v, said, spec) in enumerate(
            zip(outvars, params["out_shardings"], specs, strict=True)
        )
        if not isinstance(said, jax.sharding.Sharding)
        and not isinstance(spec, str)
        and is_even(v.aval.shape, spec, mesh)
    ]
    return [PinResults(specs=tuple(left_open))] if left_open else []


def is_even(shape: Sequence[int], spec: Spec, mesh: Mesh) -> bool:
    """Return whether a sharding divides arrays of this shape evenly, as a constraint must."""
    if not shape or len(shape) != len(spec):  # a random key is an array of words
        return False
    parts = (math.prod(mesh.shape[a] for a in axes) for axes in spec)
    return all(size % n == 0 for size, n in zip(shape, parts, strict=True))


def pin_results(jaxpr: Any, results: Sequence[Spec | None], mesh: Mesh) -> Any:
    """Constrain a jaxpr's results to their shardings in the step before it was edited.

    Args:
        jaxpr: the jaxpr of a step.
        results: the sharding of each of its results; None for one that need not be pinned.
        mesh: the step's mesh.
    """
    uses = DefUse(jaxpr.eqns, jaxpr.outvars)
    eqns, outvars, pinned = list(jaxpr.eqns), [], dict[Any, Any]()
    for var, spec in zip(jaxpr.outvars, results, strict=True):
        if spec is None or uses.maker(var) is None:
            outvars.append(var)
            continue
        if var not in pinned:
            pinned[var] = compat.like_var(var)
            like = compat.in_no_context(uses.maker(var))
            eqns += constrained(var, pinned[var], dims_of(spec), mesh, like)
        outvars.append(pinned[var])
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def with_results_pinned(
    eqns: Sequence[Any], specs: Mapping[int, Spec], mesh: Mesh
) -> list[Any] | None:
    """Constrain the first results of some equations of a body; None if there are none.

    Args:
        eqns: the equations of the body.
        specs: the sharding of each such result, by the position of its equation.
        mesh: the step's mesh.
    """
    if not specs:
        return None
    made: list[Any] = []
    for position, eqn in enumerate(eqns):
        if (spec := specs.get(position)) is None:
            made.append(eqn)
            continue
        out, *others = eqn.outvars
        free = compat.like_var(out)
        made.append(eqn.replace(outvars=[free, *others]))
        made += constrained(free, out, dims_of(spec), mesh, eqn)
    return made


def dims_of(spec: Spec) -> list[Any]:
    """Return the entries of a `PartitionSpec`."""
    return [axes or None for axes in spec]


def constrained(value: Any, result: Any, dims: Sequence[Any], mesh: Mesh, like: Any) -> list[Any]:
    """Make the equation that gives a value another sharding."""
    sharding = NamedSharding(mesh, PartitionSpec(*dims))
    constraint = functools.partial(lax.with_sharding_constraint, shardings=sharding)
    return inlining.inline(lambda x: [constraint(x)], [value], [result], like, alike=sharding)
