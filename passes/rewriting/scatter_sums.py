"""Split an all-reduce into a scatter and a gather, where matmuls read the gathered sum.

    y: [s, d] = h w2, summed over model ;  z = norm(x + y) ;  q = z w3

->  y: [s@model, d], reduce-scattered in a ring ;  z: [s@model, d] ;  q = all_gather(z) w3 in a ring

The ring of an all-reduce hides its scatter half alone: its gather half runs between the matmul
and what reads the sum. Where everything up to the next matmuls goes row by row, the sum may as well
stay scattered, and those matmuls gather it in rings of their own: as sequence parallelism has it
(Korthikanti et al., arXiv 2205.05198), but found without a user's request.

XLA's partitioner knows what goes row by row. The sums are constrained to be scattered, the step is
partitioned again, the rings are chosen again, and `exposure` decides which of the two is better. It
counts bytes twice that no matmul hides: a value that was saved in full for the backward pass is
gathered again there, in a ring, so that bytes alone would favour the all-reduce whose half nothing
hides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from jax.sharding import Mesh, PartitionSpec

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Einsum
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.planning.layout import Layout, traffic
from jaxoverlap.passes.planning.ring_plan import BodyRings, Ring
from jaxoverlap.passes.rewriting.embedding_gradients import Scattered
from jaxoverlap.passes.rewriting.pin_results import constrained, dims_of, is_even
from jaxoverlap.plan.decisions import Decision, Remaining, Skip
from jaxoverlap.plan.edits import Edit


class Point(NamedTuple):
    """The dim and mesh axes along which a sum could stay scattered.

    Attributes:
        dim: the dim of the matmul's result.
        axes: the mesh axes on that dim then, major to minor; the last is the one summed over.
    """

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """The decisions for a step.

    Attributes:
        entries: the decision on each matmul.
        rings_by_body: the rings of each body, by its number.
        edits: the edits that make these rings, and scatter the gradients of lookups.
        sums: the sums of activations that stay scattered, by the number of the matmul.
    """

    entries: tuple[Decision | Skip, ...]
    rings_by_body: Mapping[int, BodyRings]
    edits: tuple[Edit, ...]
    sums: Mapping[int, Point] = field(default_factory=dict)


def explained(scattered: Decided, first: Decided) -> Decided | None:
    """Add to the entries why there are scatters and gathers that the step does not ask for.

    Args:
        scattered: the decisions for the step with some of its sums scattered.
        first: the decisions for the step as it is.

    Returns:
        The former, explained; None if no ring scatters such a sum.
    """
    where = scattered.sums
    if not any(entry.site in where and _is_scatter(entry) for entry in scattered.entries):
        return None

    def with_reason(now: Decision | Skip, then: Decision | Skip) -> Decision | Skip:
        if isinstance(now, Skip) or not now.bytes_moved:
            return now  # one that shares a ring says whose
        why = ""
        if now.site in where and _is_scatter(now):
            why = "an all-reduce, scattered"
        elif now.kind == "all_gather_matmul" and (isinstance(then, Skip) or then.axis != now.axis):
            why = "gathers what is scattered"
        return msgspec.structs.replace(now, why=", ".join(filter(None, (why, now.why))))

    entries = tuple(map(with_reason, scattered.entries, first.entries))
    return dataclasses.replace(scattered, entries=entries)


def _is_scatter(entry: Decision | Skip) -> bool:
    return isinstance(entry, Decision) and entry.kind == "matmul_reduce_scatter"


def points(rings_by_body: Iterable[BodyRings]) -> dict[int, Point]:
    """Find where the sums of a step could stay scattered, by the number of the matmul.

    These are the sums of all-reduce rings, but for gradients of weights, and for those that the
    user's own constraint wants replicated.
    """
    rings = (
        ring
        for body_rings in rings_by_body
        for ring in body_rings.rings
        if ring.kind == "all_reduce"
    )
    members = (member for ring in rings for member in ring.members if not member.end.positions)
    point_of = {m.dot.index: _point(m.layout) for m in members if m.layout is not None}
    return {index: point for index, point in point_of.items() if point is not None}


def _point(layout: Layout) -> Point | None:
    """Choose the dim over which to scatter a sum: one that no axis shards, then the largest."""
    matmul, ring = layout.matmul, layout.ring
    letters, sizes = _token_letters(matmul.einsum), matmul.einsum.sizes
    if any(s.collective and s.collective.side == "out" for s in layout.others):
        return None  # summed over two axes

    def parts(letter: str) -> int:
        return math.prod(matmul.axis_sizes[a] for a in matmul.axes_of("out", letter))

    fits = [c for c in letters if sizes[c] % (parts(c) * ring.axis_size) == 0]
    if not fits:
        return None
    best = max(fits, key=lambda c: (parts(c) == 1, sizes[c]))
    axes = (*matmul.axes_of("out", best), ring.axis)
    return Point(matmul.einsum.out.index(best), axes)


def _token_letters(einsum: Einsum) -> str:
    """Return the letters of the result's token dims, from the activation; empty if it has none.

    The activation is the operand with more dims. Its token dims come first; a matmul with a weight
    keeps them; the gradient of a weight sums over them.
    """
    activation = einsum.rhs if len(einsum.rhs) > len(einsum.lhs) else einsum.lhs
    letters = [c for c in activation if einsum.role(c) != "batch"]
    if not letters or einsum.role(letters[0]) == "contracted":
        return ""
    return "".join(c for c in activation if c in einsum.out)


def partitioned_scattered(
    partition: Callable[[Any], SpmdProgram],
    jaxpr: Any,
    where: Mapping[int, Point],
    shardings: Mapping[Any, Shardings],
    mesh: Mesh,
) -> SpmdProgram:
    """Ask XLA what it would make of a step with some of its sums scattered.

    All other matmuls keep the shardings of their results, so that scattered rows do not change the
    way in which a matmul shares its work.

    Args:
        partition: partitions a jaxpr of the step, and finds the shardings of its matmuls.
        jaxpr: the step.
        where: the matmuls whose sums are scattered, by their number, from `points`.
        shardings: of the matmuls, as they are now.
        mesh: the step's mesh.

    Raises:
        RewriteError: if XLA does not partition the step.
    """
    shapes = {
        d.index: d.eqn.outvars[0].aval.shape
        for body in bodies(jaxpr)
        for d in body.dots
        if not compat.stated_axes(d.eqn)  # there the types say how it lies
    }
    dims = {
        i: dims_of(read.out)
        for i, read in shardings.items()
        if i in shapes and read.out is not None and is_even(shapes[i], read.out, mesh)
    }
    for index, point in where.items():
        dims[index] = [PartitionSpec.UNCONSTRAINED] * len(shapes[index])
        dims[index][point.dim] = point.axes

    positions: dict[tuple[int, int], int] = {}  # the equations' old places in a body

    def constrain(body: Body) -> list[Any] | None:
        wanted = {d.position: dims[d.index] for d in body.dots if d.index in dims and not d.inside}
        eqns: list[Any] = []
        for position, eqn in enumerate(body.eqns):
            positions[body.index, len(eqns)] = position
            eqns += _summed(eqn, wanted[position], mesh) if position in wanted else [eqn]
        return eqns if wanted else None

    spmd = partition(map_bodies(jaxpr, constrain))
    # The first sink of each result is our own constraint, which the step does not have.
    shardings = {
        (key[0], positions[key]) if isinstance(key, tuple) else key: (
            read._replace(out=read.out_sinks[0], out_sinks=read.out_sinks[1:])
            if key in dims and read.out_sinks
            else read
        )
        for key, read in spmd.shardings.items()
    }
    return dataclasses.replace(spmd, shardings=shardings)


def _summed(eqn: Any, dims: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Return a matmul, and a constraint on its result."""
    (out,) = eqn.outvars
    result = compat.like_var(out)
    return [eqn.replace(outvars=[result]), *constrained(result, out, dims, mesh, eqn)]


# -- which is better ------------------------------------------------------------------------------


def exposure(
    rings_by_body: Iterable[BodyRings],
    others: Iterable[Remaining | Scattered],
    costs: Mapping[str, float],
) -> float:
    """Price the collectives of a step: all their bytes, and once more those that no matmul hides.

    Args:
        rings_by_body: its rings.
        others: the collectives that XLA still runs, and the gradients of lookups.
        costs: the cost of a byte along each mesh axis.
    """
    total = 0.0
    for ring in (ring for body_rings in rings_by_body for ring in body_rings.rings):
        total += _ring_cost(ring, costs)
    for other in others:
        total += 2 * other.bytes_moved * max(costs.get(a, 1.0) for a in other.axes)
    return total


def _ring_cost(ring: Ring, costs: Mapping[str, float]) -> float:
    """Return the cost of a ring, and of its matmuls' collectives on other axes."""
    total = 0.0
    for member in ring.members:
        layout, leads = member.layout, member is ring.members[0]
        assert layout is not None
        sent = traffic(layout)
        if leads:
            half = 1.5 if ring.kind == "all_reduce" else 1.0  # nothing hides what is gathered
            total += (
                half * sent[layout.ring.axis] * costs.get(layout.ring.axis, 1.0) * member.dot.runs
            )
        if leads or ring.arrives:
            axes = [s.axis for s in layout.others if s.collective]
            total += sum(2 * sent[a] * costs.get(a, 1.0) for a in axes) * member.dot.runs
    return total
