"""Gather a tied embedding table once, for the lookup and for the logits.

    x = gather w ids ;  y = dot_general h (transpose w)

->  v = sharding_constraint[None, tp] w ;  x = gather v ids ;  y = dot_general h (transpose v)

Where an axis shards both the table and the batch (FSDP), XLA gathers the table over it for the
lookup, and once more for the matmul, since that reads the transpose. Each takes as long, and the
first has nothing to hide behind. The estimate decides, as with pins: the full table is in memory
from the lookup to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.edited import EditedStep, check_rank, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.layouts.layout import weights_of
from jaxoverlap.passes.rewriting.pin_results import constrained, dims_of
from jaxoverlap.plan.edits import GatherTable

_LOOKUP, _MATMUL = "gather", "dot_general"
_LEAST_BYTES = 1 << 25  # of a table: less is not worth a question


def run(step: EditedStep, edits: Sequence[GatherTable]) -> EditedStep:
    """Gather the tables that edits name."""
    for edit in edits:
        if not 0 <= edit.argument < len(step.jaxpr.invars):
            raise misfit(edit, f"the step has {len(step.jaxpr.invars)} arguments")
        check_rank(edit, edit.spec, step.jaxpr.invars[edit.argument])
    return step.to(with_tables_gathered(step.jaxpr, edits, step.mesh))


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to gather the tied tables of a step that axes of its batch shard."""
    unpinned = step.step.unpinned
    if edits := tuple(tied_tables(unpinned.jaxpr, unpinned.arguments, unpinned.mesh.shape)):
        yield Proposal(edits)


def tied_tables(
    jaxpr: Any, arguments: Sequence[Spec | None], sizes: Mapping[str, int]
) -> Iterator[GatherTable]:
    """Yield edits that gather the tied tables of a step that axes of its batch shard.

    Args:
        jaxpr: the flattened step.
        arguments: the sharding of each of its arguments; None where that is not known.
        sizes: devices along each mesh axis.
    """
    weights, uses = weights_of(jaxpr), _uses(jaxpr)
    given = list(zip(jaxpr.invars, arguments, strict=True))
    batch = {a for v, spec in given if v not in weights for axes in spec or () for a in axes}
    batch = {axis for axis in batch if sizes[axis] > 1}
    for number, (var, spec) in enumerate(given):
        if var not in weights or spec is None or batch.isdisjoint(a for axes in spec for a in axes):
            continue
        whole = tuple(tuple(a for a in axes if a not in batch) for axes in spec)
        for dtype, readers in _readers(jaxpr, var, uses).items():
            large = math.prod(var.aval.shape) * var.aval.dtype.itemsize >= _LEAST_BYTES
            if set(readers.values()) == {_LOOKUP, _MATMUL} and large:
                name = compat.argument_names(jaxpr)[number]
                yield GatherTable(argument=number, name=name, dtype=dtype, spec=whole)


def with_tables_gathered(jaxpr: Any, tables: Sequence[GatherTable], mesh: Mesh) -> Any:
    """Gather tables once: their lookups and matmuls read one value with the given sharding."""
    eqns, uses = list(jaxpr.eqns), _uses(jaxpr)
    before: dict[int, list[Any]] = {}  # by the place in front of which they go
    for table in tables:
        var = jaxpr.invars[table.argument]
        positions = _readers(jaxpr, var, uses)[table.dtype]
        copies = {v for v in _copies(jaxpr, var, uses) if str(v.aval.dtype) == table.dtype}
        first = min(positions)
        read = next(v for v in compat.variables(eqns[first].invars) if v in copies)
        whole = compat.like_var(read)
        gathered = constrained(read, whole, dims_of(table.spec), mesh, eqns[first])
        before.setdefault(first, []).extend(gathered)
        for position in positions:
            known = dict.fromkeys(copies, whole)
            invars = [v if compat.is_literal(v) else known.get(v, v) for v in eqns[position].invars]
            eqns[position] = eqns[position].replace(invars=invars)
    return jaxpr.replace(
        eqns=[eqn for position, own in enumerate(eqns) for eqn in (*before.get(position, ()), own)]
    )


_Uses = Mapping[Any, Sequence[int]]


def _uses(jaxpr: Any) -> _Uses:
    """Return the indices of the equations that read each variable."""
    uses: dict[Any, list[int]] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        for v in dict.fromkeys(compat.variables(eqn.invars)):
            uses.setdefault(v, []).append(position)
    return uses


def _readers(jaxpr: Any, var: Any, uses: _Uses) -> dict[str, dict[int, str]]:
    """Return the lookups and matmuls that read an argument: dtype -> equation index -> kind."""
    found: dict[str, dict[int, str]] = {}
    for copy in _copies(jaxpr, var, uses):
        kinds = {position: _kind(jaxpr, position, copy, uses) for position in uses.get(copy, ())}
        known = {position: kind for position, kind in kinds.items() if kind}
        if known:
            found.setdefault(str(copy.aval.dtype), {}).update(known)
    return found


def _copies(jaxpr: Any, var: Any, uses: _Uses) -> list[Any]:
    """Return an argument and what it is converted to."""
    readers = (jaxpr.eqns[position] for position in uses.get(var, ()))
    return [var, *(e.outvars[0] for e in readers if e.primitive.name == "convert_element_type")]


def _kind(jaxpr: Any, position: int, var: Any, uses: _Uses) -> str:
    """Return whether what reads a value is a lookup or a matmul; empty if it is something else.

    A transpose is what reads it, and an inner jit what reads it inside, as in `jnp.take`.
    """
    eqn = jaxpr.eqns[position]
    if eqn.primitive.name == "transpose":
        return _all_of(jaxpr, eqn.outvars, uses)
    if compat.is_plain_jit(eqn):
        inner = eqn.params["jaxpr"]
        given = [v for v, a in zip(inner.invars, eqn.invars, strict=True) if a is var]
        return _all_of(inner, given, _uses(inner))
    return eqn.primitive.name if eqn.primitive.name in (_LOOKUP, _MATMUL) else ""


def _all_of(jaxpr: Any, variables: Sequence[Any], uses: _Uses) -> str:
    """Return the kind of what reads some values, if all are of one."""
    kinds = {_kind(jaxpr, position, v, uses) for v in variables for position in uses.get(v, ())}
    return kinds.pop() if len(kinds) == 1 else ""
