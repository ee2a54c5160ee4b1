"""Replace each collective and its matmuls by a ring, in the jaxpr.

    q = dot_general x wq ;  k = dot_general x wk

->  q, k = shard_map[in_specs=... out_specs=...] x wq wk
                                                            # in which one ring does both

A body (a jaxpr or sub-jaxpr) keeps its operands and results, so the jaxprs around it (scan, remat,
...) stay. Inside it equations may be reordered, as far as their operands allow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxoverlap._jax import compat, inlining
from jaxoverlap._jax.partitioner import many_processes_of_cpus
from jaxoverlap.passes.analysis.errors import RewriteError, could_not_rewrite
from jaxoverlap.passes.analysis.jaxprs import Body, bodies, map_bodies
from jaxoverlap.passes.analysis.mesh import auto_mesh, explicit_axes, partition_spec
from jaxoverlap.passes.edited import EditedStep, check_sites, misfit
from jaxoverlap.passes.planning.decide import decisions
from jaxoverlap.passes.planning.entries import source_of
from jaxoverlap.passes.planning.ring_edits import RingEdit, placed
from jaxoverlap.passes.planning.ring_plan import BodyRings, Hoist, Member, Ring, Value
from jaxoverlap.passes.rewriting.ring_functions import (
    dot_on,
    likeness,
    only,
    operands_of,
    ring_body,
    ringed,
    scope,
)
from jaxoverlap.passes.rings.chunks import without_ties
from jaxoverlap.plan.decisions import Decision
from jaxoverlap.plan.edits import MakeRing


@dataclass(frozen=True)
class Rings:
    """The rings of a step, as edits have made them.

    Attributes:
        rings_by_body: the rings of each body, by its number.
        gathered: the variables of values that are gathered before rings (hoisted), each with its
            bytes on one device.
    """

    rings_by_body: Mapping[int, BodyRings]
    gathered: Mapping[Any, int]

    @property
    def of_implied_collectives(self) -> tuple[Ring, ...]:
        """The rings of collectives that XLA would insert, not of those written in a shard_map."""
        every = (ring for body_rings in self.rings_by_body.values() for ring in body_rings.rings)
        return tuple(ring for ring in every if ring.written is None)

    @property
    def decisions(self) -> dict[int, Decision]:
        """The plan's `Decision` of each rewritten matmul, by the number of the matmul."""
        return {
            site: entry
            for body_rings in self.rings_by_body.values()
            for site, entry in decisions(body_rings).items()
        }


def run(step: EditedStep, edits: Sequence[RingEdit]) -> EditedStep:
    """Make the rings that edits name; the result's `facts[MakeRing]` is a `Rings`.

    Raises:
        UserError: if an edit does not fit the step.
        RewriteError: as `rewrite`.
    """
    named: dict[int, RingEdit] = {}
    for edit in edits:
        for matmul in edit.matmuls if isinstance(edit, MakeRing) else (edit.matmul,):
            if named.setdefault(matmul.site, edit) is not edit:
                raise misfit(edit, f"matmul {matmul.site} is in another edit too")
    every, sizes = bodies(step.jaxpr), dict(step.mesh.shape)
    check_sites({dot.index for body in every for dot in body.dots}, named.items())
    rings_by_body: dict[int, BodyRings] = {}
    for body in every:
        here = list({id(e): e for dot in body.dots if (e := named.get(dot.index))}.values())
        if here:
            rings_by_body[body.index] = placed(body, here, sizes)
    # ties: barriers that hold a hop and a matmul together
    with without_ties(many_processes_of_cpus(step.mesh.devices.flat)):
        jaxpr, gathered = rewrite(step.jaxpr, rings_by_body, step.mesh)
    return step.to(jaxpr, {MakeRing: Rings(rings_by_body, gathered)})


def rewrite(
    jaxpr: Any, rings_by_body: Mapping[int, BodyRings], mesh: Mesh
) -> tuple[Any, dict[Any, int]]:
    """Replace a jaxpr's matmuls by rings, as decided for each body (by its number).

    Returns:
        The jaxpr, and the variables of values gathered before rings, each with its bytes on one
        device.

    Raises:
        RewriteError: if a ring cannot be made, naming its matmuls and their source lines.
    """
    gathered: dict[Any, int] = {}

    def visit(body: Body) -> list[Any] | None:
        body_rings = rings_by_body.get(body.index)
        if body_rings is None or not (body_rings.rings or body_rings.readers):
            return None
        rewriter = _BodyRewriter(body, body_rings, mesh)
        eqns = rewriter.eqns()
        hoisted = ((value, v) for value, v in rewriter.made.items() if value in body_rings.hoisted)
        gathered.update((v, _local_bytes(value, mesh)) for value, v in hoisted)
        return eqns

    return map_bodies(jaxpr, visit), gathered


class _BodyRewriter:
    """Emits the equations of one body, and each gather just before the first that reads it."""

    def __init__(self, body: Body, body_rings: BodyRings, mesh: Mesh):
        self.body, self.body_rings = body, body_rings
        self.explicit = explicit_axes(mesh)
        self.auto_mesh = auto_mesh(mesh)
        self.dot = dot_on(mesh)
        self.made: dict[Value, Any] = {}  # the variables of hoisted and of kept values
        self.new: list[Any] = []

    def eqns(self) -> list[Any]:
        for item in self.body_rings.in_order(self.body):
            if isinstance(item, Ring):
                self.emit_ring(item)
            elif isinstance(item, Member):
                self.emit_reader(item)
            else:
                self.new.append(self.body.eqns[item])
        return self.new

    def var_of(self, value: Value, like: Any) -> Any:
        """Return the variable that holds a value; emit its gather if it is the first to ask."""
        if value in self.made:
            return self.made[value]
        hoist = self.body_rings.hoisted.get(value)
        if hoist is None:
            return value.var
        before = self.var_of(hoist.before, like)
        self.made[value] = self.moved(value)
        key = hoist.kind, hoist.axis, hoist.after.spec
        self.emit(_reshard(hoist, self.auto_mesh), [before], [self.made[value]], like, key)
        return self.made[value]

    def moved(self, value: Value) -> Any:
        """Make a new variable for a value with its sharding after a collective."""
        return compat.new_var(value.var.aval, partition_spec(only(value.spec, self.explicit)))

    def emit(
        self,
        fn: Callable[..., Any],
        operands: Sequence[Any],
        results: Sequence[Any],
        like: Any,
        key: Hashable,
        scope: str = "",
    ) -> None:
        """Emit the equations of a function of some variables, whose results are others.

        Args:
            fn: the function.
            operands, results: the variables that it reads, and those that it computes.
            like: the equation whose source line, name stack and context these get.
            key: of functions with equal keys, and operands of the same types, one is traced.
            scope: a name to put on the stack.
        """
        outs: list[Any] = []
        if self.explicit:  # our shardings are for the partitioner: the types keep the user's own
            outs = [compat.typed_spec(v) for v in results]
            fn = jax.sharding.auto_axes(fn, axes=self.explicit, out_sharding=outs)
        alike = (self.auto_mesh, self.explicit, *outs, key)
        self.new += inlining.inline(fn, operands, results, like, alike=alike, scope=scope)

    def emit_reader(self, member: Member) -> None:
        """Emit a matmul outside rings that reads a value gathered for it or for others."""
        eqn = member.dot.eqn
        operands = [self.var_of(value, eqn) for value in (member.lhs, member.rhs)]
        self.new.append(eqn.replace(invars=operands))

    def emit_ring(self, ring: Ring) -> None:
        eqn = ring.members[0].dot.eqn
        try:
            operands = [self.var_of(value, eqn) for value, _ in operands_of(ring)]
            results = [*ring.results, *([self.kept(ring)] if ring.keep else [])]
            if ring.written:
                self.emit_written_ring(ring, operands, results)
            else:
                fn = ringed(ring, self.auto_mesh, self.dot)
                self.emit(fn, operands, results, eqn, likeness(ring), scope(ring))
        except Exception as error:
            raise _failed(ring, error) from error

    def kept(self, ring: Ring) -> Any:
        """Make, or reuse, the variable of the full gathered value that a ring returns too.

        A ring does so (`Ring.keep`) where equations other than its matmuls read that value.
        """
        if ring.written:
            return ring.written.eqn.outvars[0]
        self.made[ring.gathered] = self.moved(ring.gathered)
        return self.made[ring.gathered]

    def emit_written_ring(
        self, ring: Ring, operands: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Emit the ring of a collective that the user wrote, whose axis is manual in the body."""
        manual = self.body_rings.manual
        assert manual is not None
        fn, eqn = ring_body(ring, self.dot, invarying=manual.checked), ring.members[0].dot.eqn
        with compat.in_shard_maps(manual.maps):
            self.new += inlining.inline(fn, operands, results, eqn, scope=scope(ring))
        # casts and transposes of the gathered value that other equations read too
        self.new += [self.body.eqns[again] for again in ring.again]


def _local_bytes(value: Value, mesh: Mesh) -> int:
    """Return the bytes that a device holds of a value."""
    aval, shards = value.var.aval, math.prod(mesh.shape[a] for axes in value.spec for a in axes)
    return aval.size * aval.dtype.itemsize // shards


def _failed(ring: Ring, error: Exception) -> RewriteError:
    dots = [member.dot for member in ring.members]
    what = f"({ring.first.matmul.einsum}, {dots[0].eqn})"
    if ring.written:
        what = f"next to {ring.written.eqn}"
    return could_not_rewrite([dot.index for dot in dots], what, map(source_of, dots), error)


def _reshard(hoist: Hoist, mesh: Mesh | AbstractMesh) -> Callable[[Array], list[Array]]:
    """Return the function of a hoisted collective, which XLA runs once for all readers."""
    sharding = NamedSharding(mesh, partition_spec(hoist.after.spec))
    gather = functools.partial(lax.with_sharding_constraint, shardings=sharding)
    return jax.named_call(lambda x: [gather(x)], name=f"{hoist.kind}_over_{hoist.axis}")
