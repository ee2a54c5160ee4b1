"""Give each device unsharded matrices of an optimizer in turn, where each matrix is sharded.

    for each of n matrices:   g: [i@fsdp, i] = dot_general m m  ;  ...  ;  u: [i@fsdp, j] = ...

->  ms: [n@fsdp, i, j] = stack of the matrices  ;  us = the same of all at once  ;  u = us[k]

Muon's iterations, and the products of Shampoo and SOAP, multiply weight-sized matrices with each
other: on sharded ones every product gathers. Stacked, and sharded along the stack, each device
computes some matrices alone, and two exchanges are all that moves. It is how distributed Muon and
Shampoo are written by hand (Liu et al., arXiv 2502.16982; Shi et al., arXiv 2309.06497). Matrices
are found by what is computed of them: chains of equations that are alike, read no value with a dim
of the batch, and do not need each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.def_use import DefUse
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import has_matmul
from jaxoverlap.passes.analysis.mesh import explicit_axes
from jaxoverlap.passes.edited import EditedStep, check_named, misfit
from jaxoverlap.passes.layouts.layout import weights_of
from jaxoverlap.passes.planning.entries import line_of
from jaxoverlap.passes.rewriting.pin_results import dims_of
from jaxoverlap.plan.edits import StackMatrices

_MATRIX_DIMS = 2


@dataclass(frozen=True)
class _Chain:
    """These equations compute something of one matrix.

    Attributes:
        positions: the indices of its equations in the step.
        part: these as a jaxpr.
        inputs: the variables that they read.
        outputs: the variables that others read.
    """

    positions: tuple[int, ...]
    part: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, uses: DefUse, positions: Sequence[int]) -> _Chain:
        eqns = [uses.eqns[position] for position in positions]
        made = [v for eqn in eqns for v in eqn.outvars]
        inputs = dict.fromkeys(v for eqn in eqns for v in compat.variables(eqn.invars))
        inputs = tuple(v for v in inputs if v not in {*made})
        outputs = tuple(v for v in made if not {*uses.readers(v)} <= {*positions})
        return cls(tuple(positions), compat.jaxpr_of(inputs, outputs, eqns), inputs, outputs)


def proposals(step: EditedStep) -> Iterator[tuple[StackMatrices, ...]]:
    """Yield edits that give devices unsharded matrices: over all mesh axes, or over one of them."""
    if explicit_axes(step.mesh):
        return
    groups = _groups(step.jaxpr)
    axes = [axis for axis, size in step.mesh.shape.items() if size > 1]
    for over in dict.fromkeys([tuple(axes), *((axis,) for axis in axes)]) if groups else ():
        yield tuple(
            StackMatrices(
                source=line_of(step.jaxpr.eqns[chains[0].positions[0]], ()),
                first=tuple(chain.positions[0] for chain in chains),
                axes=over,
            )
            for chains in groups
        )


def run(step: EditedStep, edits: Sequence[StackMatrices]) -> EditedStep:
    """Stack the matrices that edits name."""
    groups = {tuple(c.positions[0] for c in chains): chains for chains in _groups(step.jaxpr)}
    eqns = {id(eqn): [eqn] for eqn in step.jaxpr.eqns}  # what stands for each equation
    for edit in edits:
        check_named(step.mesh, edit, edit.axes)
        if (chains := groups.get(edit.first)) is None:
            raise misfit(edit, "no such matrices are computed alike")
        every = [step.jaxpr.eqns[p] for chain in chains for p in chain.positions]
        at_once = _at_once(step, chains, edit.axes, every[0])
        eqns |= {id(eqn): at_once for eqn in every}
    return step.to(step.jaxpr.replace(eqns=_in_order(step.jaxpr, eqns)))


# -- which matrices -------------------------------------------------------------------------------


def _groups(jaxpr: Any) -> list[list[_Chain]]:
    """Return the chains of equations that are alike, and compute the same of other matrices."""
    if any(compat.ordered_effects(eqn) for eqn in jaxpr.eqns):
        return []
    alike: dict[Any, list[_Chain]] = {}
    uses = DefUse(jaxpr.eqns, jaxpr.outvars)
    for positions in _chains(jaxpr, uses):
        chain = _Chain.of(uses, positions)
        types = tuple(map(compat.type_text, chain.inputs))
        (text,) = compat.jaxpr_texts([chain.part])
        alike.setdefault((types, text), []).append(chain)
    return [chains for chains in alike.values() if len(chains) > 1]


def _chains(jaxpr: Any, uses: DefUse) -> list[list[int]]:
    """Return the indices of the equations of each chain.

    A chain is matmuls that need each other, and the equations between them.
    """
    matmuls = _of_optimizer(jaxpr)
    before = _needed(jaxpr.eqns, matmuls, lambda eqn: map(uses.made.get, _variables(eqn)))
    after = _needed(
        jaxpr.eqns,
        matmuls,
        lambda eqn: (n for v in eqn.outvars for n in uses.readers(v)),
        backward=True,
    )
    chain_of = {position: {position} for position in matmuls}
    between: dict[int, int] = {}
    for position in range(len(jaxpr.eqns)):
        joined = before[position] | after[position]
        if position in matmuls:
            joined |= {position}
        elif not before[position] or not after[position]:
            continue
        between[position] = next(iter(joined))
        whole = set[int]().union(*(chain_of[p] for p in joined))
        chain_of |= dict.fromkeys(whole, whole)
    found: dict[int, list[int]] = {}
    for position, one in between.items():
        found.setdefault(min(chain_of[one]), []).append(position)
    return list(found.values())


def _variables(eqn: Any) -> Iterator[Any]:
    return compat.variables(eqn.invars)


def _needed(
    eqns: Sequence[Any], matmuls: set[int], neighbours: Any, *, backward: bool = False
) -> list[frozenset[int]]:
    """Return for each equation the matmuls that it needs; backward: that need it."""
    found = [frozenset[int]()] * len(eqns)
    for position in reversed(range(len(eqns))) if backward else range(len(eqns)):
        others = {n for n in neighbours(eqns[position]) if n is not None}
        reached = (found[n] | ({n} & matmuls) for n in others)
        found[position] = frozenset[int]().union(*reached)
    return found


def _of_optimizer(jaxpr: Any) -> set[int]:
    """Return the indices of the equations with matmuls that read nothing with a batch's dim."""
    of_matrices = {
        position
        for position, eqn in enumerate(jaxpr.eqns)
        if has_matmul(eqn) and all(_is_matrix(v) for v in eqn.outvars if v.aval.ndim)
    }
    if len(of_matrices) <= 1:
        return set()
    dims, weights = DimNames(jaxpr), weights_of(jaxpr)
    others = {name for v in jaxpr.invars if v not in weights for name in dims.of(v)}
    others -= {name for v in weights for name in dims.of(v)}

    def is_free(eqn: Any) -> bool:
        return others.isdisjoint(n for v in (*_variables(eqn), *eqn.outvars) for n in dims.of(v))

    return {position for position in of_matrices if is_free(jaxpr.eqns[position])}


def _is_matrix(var: Any) -> bool:
    """Return whether a value is one matrix; several that are stacked can be sharded as they are."""
    return sum(size > 1 for size in var.aval.shape) == _MATRIX_DIMS


# -- all at once ----------------------------------------------------------------------------------


def _at_once(
    step: EditedStep, chains: Sequence[_Chain], axes: tuple[str, ...], like: Any
) -> list[Any]:
    """Return the equations that compute some chains at once."""
    columns = list(zip(*(chain.inputs for chain in chains), strict=True))
    shared = [all(v is column[0] for v in column) for column in columns]
    given = list(dict.fromkeys(v for column in columns for v in column))
    place = {v: number for number, v in enumerate(given)}
    results = [v for chain in chains for v in chain.outputs]
    specs = _specs(step, results)
    stacked = NamedSharding(step.mesh, PartitionSpec(axes))

    def compute(*values: Any) -> list[Any]:
        operands = [
            values[place[column[0]]]
            if same
            else _sharded(jnp.stack([values[place[v]] for v in column]), stacked)
            for column, same in zip(columns, shared, strict=True)
        ]
        whole = jax.vmap(
            lambda *of_one: compat.evaluate(chains[0].part, of_one),
            in_axes=tuple(None if same else 0 for same in shared),
        )(*operands)
        whole = [_sharded(value, stacked) for value in whole]
        made = [value[number] for number in range(len(chains)) for value in whole]
        return [_laid(v, spec, step.mesh) for v, spec in zip(made, specs, strict=True)]

    return inlining.inline(compute, given, results, like)


def _sharded(value: Any, sharding: NamedSharding) -> Any:
    return lax.with_sharding_constraint(value, sharding)


def _laid(value: Any, spec: Spec | None, mesh: Mesh) -> Any:
    if spec is None:
        return value
    return _sharded(value, NamedSharding(mesh, PartitionSpec(*dims_of(spec))))


def _specs(step: EditedStep, results: Sequence[Any]) -> list[Spec | None]:
    """Return the sharding of the weight that has the dims of each result; None without one."""
    dims, weights = DimNames(step.jaxpr), weights_of(step.jaxpr)
    known = {
        (dims.of(var), var.aval.shape): spec
        for var, spec in zip(step.jaxpr.invars, step.arguments, strict=True)
        if var in weights and spec is not None
    }
    return [known.get((dims.of(v), v.aval.shape)) for v in results]


def _in_order(jaxpr: Any, instead: dict[int, list[Any]]) -> list[Any]:
    """Return a step's equations, some replaced by others, each after those that it needs."""
    groups = {id(instead[id(eqn)]): instead[id(eqn)] for eqn in jaxpr.eqns}
    maker = {v: key for key, eqns in groups.items() for eqn in eqns for v in eqn.outvars}
    made, done = list[Any](), set[int]()

    def emit(key: int) -> None:
        stack = [key]
        while stack:
            now = stack[-1]
            reads = (v for eqn in groups[now] for v in compat.variables(eqn.invars))
            makers = (maker[v] for v in reads if v in maker)
            waits = [key for key in makers if key != now and key not in done]
            if waits and now not in done:
                stack += waits
                continue
            stack.pop()
            if now not in done:
                done.add(now)
                made.extend(groups[now])

    for key in groups:
        emit(key)
    return made
