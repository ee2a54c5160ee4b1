"""Compute matmuls with the dim that a collective moves as the first one.

    x: [b, s@model, d] ;  y = sharding_constraint[None, None] x ;  h = dot_general y w   # [b, s, f]

->  t = transpose x: [s@model, b, d] ;  y = sharding_constraint[None, None] t
    h = transpose (dot_general y w: [s, b, f])

NCCL's blocks are contiguous. So where a device has several sequences, and their positions are
sharded, XLA:GPU copies every gathered value behind its gather, and every sum before its scatter.
With the positions first both are contiguous; the transposes around them join the element-wise
kernels next to them, or become layouts. Megatron's sequence parallelism keeps its activations as
[s, b, d] for the same reason (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap._jax import compat, inlining
from jaxoverlap.passes.analysis.dims import DimNames
from jaxoverlap.passes.analysis.einsum import einsum_of
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, bodies, dots, map_bodies
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.analysis.reshards import Reshards
from jaxoverlap.passes.edited import EditedStep, check_sites, misfit
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.planning.matmuls import why_unfit
from jaxoverlap.passes.rewriting.pin_results import dims_of, is_even
from jaxoverlap.plan.edits import MovedFirst, MoveFirst, Spec

_View = tuple[Any, int, Spec | None]  # a value, its dim that comes first, its sharding after that


def run(step: EditedStep, edits: Sequence[MoveFirst]) -> EditedStep:
    """Put the dims that edits name first."""
    named = {one.site: (one, edit.axes) for edit in edits for one in edit.matmuls}
    sites = ((one.site, edit) for edit in edits for one in edit.matmuls)
    every = bodies(step.jaxpr)
    check_sites({dot.index for body in every for dot in body.dots}, sites)
    for dot in (dot for body in every for dot in body.dots if dot.index in named):
        if not _fits(dot, named[dot.index][0]):
            raise misfit(edits[0], f"matmul {dot.index} has no such dims")
    return step.to(with_dims_first(step.jaxpr, named, step.mesh))


def propose(step: Evaluated) -> Iterator[Proposal]:
    """Propose to put the dims first that collectives move in blocks that are not contiguous."""
    if edits := tuple(moves_first(step.step, step.program)):
        yield Proposal(edits)


def moves_first(step: EditedStep, program: SpmdProgram) -> Iterator[MoveFirst]:
    """Yield an edit for each named dim that collectives move in blocks that are not contiguous."""
    names = DimNames(step.jaxpr)
    for name, axes in sorted(_moving(step, program, names).items()):
        found: list[MovedFirst] = []
        for body in bodies(step.jaxpr):
            if not body.opaque and body.dots:
                chains = Reshards(body)
                for dot in body.dots:
                    shardings = program.shardings.get(dot.index)
                    if shardings is not None and _movable(dot):
                        found += _with_dim(dot, name, names, shardings, chains)
        if found:
            yield MoveFirst(axes=axes, matmuls=tuple(found))


def _moving(step: EditedStep, program: SpmdProgram, names: DimNames) -> dict[int, tuple[str, ...]]:
    """Return the named dims that collectives move behind another dim of which a device has some.

    Such a dim is sharded for some matmuls and not so for others. The last dim of a value is left
    alone: the matmul reads or writes it transposed.

    Returns:
        The mesh axes that shard each, where it is sharded most.
    """
    sizes, seen, behind = step.mesh.shape, dict[int, set[tuple[str, ...]]](), set[int]()
    for dot in step.matmuls:
        if (s := program.shardings.get(dot.index)) is None or not _movable(dot):
            continue
        sides = (s.lhs, *s.lhs_sources), (s.rhs, *s.rhs_sources), (s.out, *s.out_sinks)
        for var, specs in zip((*dot.eqn.invars, *dot.eqn.outvars), sides, strict=True):
            for spec in specs:
                parts = [math.prod(sizes[a] for a in axes) for axes in spec or ()]
                of_var = names.of(var) if len(parts) == var.aval.ndim else ()
                for dim, name in enumerate(of_var):
                    assert spec is not None
                    seen.setdefault(name, set()).add(tuple(a for a in spec[dim] if sizes[a] > 1))
                    before = zip(var.aval.shape[:dim], parts, strict=False)
                    if dim < len(parts) - 1 and math.prod(n // p for n, p in before) > 1:
                        behind.add(name)
    return {name: max(seen[name], key=len) for name in behind if len(seen[name]) > 1}


def _movable(dot: Dot) -> bool:
    if why_unfit(dot) or dot.manual is not None or compat.stated_axes(dot.eqn):
        return False
    return dot.eqn.params["dimension_numbers"][1] == ((), ())


def _with_dim(
    dot: Dot, name: int, names: DimNames, shardings: Shardings, chains: Reshards
) -> list[MovedFirst]:
    """Return which dims of a matmul come first, so that a named dim does; none if it has none."""
    dims, specs = list[int | None](), list[Spec | None]()
    for var, spec in zip(dot.eqn.invars, shardings[:2], strict=True):
        of_var = () if compat.is_literal(var) else names.of(var)
        dim = of_var.index(name) if list(of_var).count(name) == 1 else None
        through = dim is not None and chains.origin(var)[0] is not var
        dims.append(dim)
        specs.append(spec if through else None)
    one = MovedFirst(site=dot.index, lhs=dims[0], rhs=dims[1], lhs_spec=specs[0], rhs_spec=specs[1])
    return [one] if dims != [None, None] and _fits(dot, one) else []


def first_dims(step: EditedStep, names: DimNames) -> set[int]:
    """Return the named dims that edits have put first in matmuls of a step.

    Args:
        step: the step after its last such edit.
        names: its named dims.
    """
    edits = (edit for edit in step.edits if isinstance(edit, MoveFirst))
    moved = {one.site: one for edit in edits for one in edit.matmuls}
    return {
        names.of(var)[0]
        for dot in dots(step.jaxpr)
        if (one := moved.get(dot.index)) is not None
        for var, dim in zip(dot.eqn.invars, (one.lhs, one.rhs), strict=True)
        if dim is not None
    }


def _fits(dot: Dot, one: MovedFirst) -> bool:
    """Return whether a matmul has such dims: a contracted one of both operands, or one of one."""
    if not _movable(dot):
        return False
    (contracted, _), dims = dot.eqn.params["dimension_numbers"], (one.lhs, one.rhs)
    for v, dim in zip(dot.eqn.invars, dims, strict=True):
        if dim is not None and not 0 <= dim < v.aval.ndim:
            return False
    if None not in dims:
        return dims in zip(*contracted, strict=True)
    ours = [(d, c) for d, c in zip(dims, contracted, strict=True) if d is not None]
    return len(ours) == 1 and ours[0][0] not in ours[0][1]


def with_dims_first(
    jaxpr: Any, moved: Mapping[int, tuple[MovedFirst, tuple[str, ...]]], mesh: Mesh
) -> Any:
    """Compute matmuls with one of their dims first, and transpose their results back.

    Args:
        jaxpr: the step.
        moved: the dims of the operands, by the number of the matmul; and the mesh axes that shard
            these dims, where they are sharded.
        mesh: the step's mesh.
    """

    def visit(body: Body) -> list[Any] | None:
        here = {dot.position: moved[dot.index] for dot in body.dots if dot.index in moved}
        if not here:
            return None
        chains, views = Reshards(body), dict[_View, Any]()
        eqns: list[Any] = []
        for position, eqn in enumerate(body.eqns):
            if position in here:
                eqns += _matmul(eqn, *here[position], chains, views, mesh)
            else:
                eqns.append(eqn)
        return eqns

    return map_bodies(jaxpr, visit)


def _matmul(
    eqn: Any,
    one: MovedFirst,
    axes: tuple[str, ...],
    chains: Reshards,
    views: dict[_View, Any],
    mesh: Mesh,
) -> list[Any]:
    """Return the equations of a matmul, and those of transposed operands that are missing."""
    made, operands = [], []
    sides = zip(eqn.invars, (one.lhs, one.rhs), (one.lhs_spec, one.rhs_spec), strict=True)
    for var, dim, spec in sides:
        if dim is None or dim == 0 or compat.is_literal(var):
            operands.append(var)
            continue
        key = (var if spec is None else chains.origin(var)[0]), dim, spec
        if key not in views:
            order = _first(dim, var.aval.ndim)
            views[key] = compat.shaped_var(var, [var.aval.shape[d] for d in order])
            specs = _on_the_way(tuple(spec[d] for d in order), axes) if spec is not None else ()
            specs = [spec for spec in specs if is_even(views[key].aval.shape, spec, mesh)]
            view = functools.partial(_view, order, specs, mesh)
            made += inlining.inline(view, [key[0]], [views[key]], eqn)
        operands.append(views[key])
    matmul = functools.partial(_dot, eqn, (one.lhs or 0, one.rhs or 0))
    return [*made, *inlining.inline(matmul, operands, eqn.outvars, eqn)]


def _first(dim: int, ndim: int) -> list[int]:
    return [dim, *(d for d in range(ndim) if d != dim)]


def _on_the_way(spec: Spec, axes: tuple[str, ...]) -> list[Spec]:
    """Return the shardings of an operand, before and after the gather of its first dim.

    XLA may have gathered the value already before it was transposed, if nothing says otherwise.
    """
    used = {axis for on in spec for axis in on}
    before = [] if used & {*axes} else [((*spec[0], *axes), *spec[1:])]
    return [*before, spec]


def _view(order: Sequence[int], specs: Sequence[Spec], mesh: Mesh, x: jax.Array) -> list[jax.Array]:
    x = jnp.transpose(x, order)
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*dims_of(spec)))
        x = lax.with_sharding_constraint(x, sharding)
    return [x]


def _dot(eqn: Any, dims: tuple[int, int], lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
    """Multiply operands of which one dim each comes first, into a result in the usual order."""
    numbers, shapes = eqn.params["dimension_numbers"], [v.aval.shape for v in eqn.invars]
    einsum = einsum_of(numbers, *shapes)
    left, right = (
        "".join(letters[d] for d in _first(dim, len(letters)))
        for letters, dim in zip((einsum.lhs, einsum.rhs), dims, strict=True)
    )
    contracted = sorted((einsum.lhs[d] for d in numbers[0][0]), key=left.index)
    pairs = tuple(tuple(map(letters.index, contracted)) for letters in (left, right))
    params = {**eqn.params, "dimension_numbers": (pairs, ((), ()))}
    out = [c for c in left + right if c not in contracted]
    product = lax.dot_general_p.bind(lhs, rhs, **params)
    return [jnp.transpose(product, [out.index(c) for c in einsum.out])]
