"""One device's part of a group of matmuls: its rings, and matmuls between plain collectives.

What a matmul without a ring lacks of its operands, XLA moves before the operation, and what it
gives otherwise than wanted, XLA moves after it, as it would around a `dot_general`. Only partial
sums are added up here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxoverlap._jax.operations.question import Wish
from jaxoverlap.passes.analysis.einsum import SIDES, Side, Spec
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.matmuls import matmul_of
from jaxoverlap.passes.planning.ring_plan import BodyRings, Member, Ring, Value
from jaxoverlap.passes.planning.splits import ShardedMatmul, shared_letter
from jaxoverlap.passes.rewriting.ring_functions import dot_on, ring_body

Values = dict[Any, Array]  # by variable, or by `Value` where a ring keeps one
Step = Callable[[Values, Sequence[Array]], None]


@dataclass(frozen=True)
class LocalGroup:
    """One device's part of a group; call it with the local operands, two for each matmul.

    Attributes:
        operands, results: the shardings of the operands and the results.
        fulfilled: the wishes of later operations that it fulfils.
        outputs: the values of the results, and of fulfilled wishes; an index among the operands for
            one that comes gathered.
        steps: what is done, in order.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    fulfilled: tuple[Wish, ...]
    outputs: tuple[Any, ...]
    steps: tuple[Step, ...]

    def __call__(self, *operands: Array) -> list[Array]:
        """Compute the local results."""
        values: Values = {}
        for step in self.steps:
            step(values, operands)
        return [operands[v] if isinstance(v, int) else values[v] for v in self.outputs]


class _Apart(Exception):
    """Raised where the terms of a sum would be sharded differently."""


def local_group(
    body: Body,
    told: Mapping[int, Shardings],
    body_rings: BodyRings,
    wishes: Sequence[Wish],
    mesh: Mesh,
) -> LocalGroup:
    """Lay out one device's part of a group of matmuls, as decided.

    Args:
        body: the group's jaxpr: `dot_general`s, and the sums of some.
        told: the shardings of each matmul's sides around the operation.
        body_rings: the rings of the body.
        wishes: what later operations would read gathered: a ring that gathers it keeps it.
        mesh: the mesh.
    """
    try:
        return _Writer(body, told, body_rings, mesh).group(wishes)
    except _Apart:
        no_rings = BodyRings(EquationOrder(body.eqns))
        return _Writer(body, told, no_rings, mesh, owner=True).group(wishes)


class _Writer:
    """The steps of a group, written in the order of its body."""

    def __init__(
        self,
        body: Body,
        told: Mapping[int, Shardings],
        body_rings: BodyRings,
        mesh: Mesh,
        owner: bool = False,
    ):
        self.body, self.told, self.body_rings, self.mesh, self.owner = (
            body,
            told,
            body_rings,
            mesh,
            owner,
        )
        self.dot = dot_on(mesh)
        self.operands: list[Spec] = [()] * (2 * len(body.dots))
        self.specs: dict[Any, Spec] = {}  # of results, by variable
        self.kept: set[Value] = set()
        self.steps: list[Step] = []

    def group(self, wishes: Sequence[Wish]) -> LocalGroup:
        wished = {wish: self.ring_that_keeps(wish) for wish in wishes}
        dots = {dot.position: dot for dot in self.body.dots}
        for step in self.body_rings.in_order(self.body):
            if isinstance(step, Ring):
                self.ring(step)
            elif isinstance(step, Member):
                self.matmul(step.dot, step)
            elif step in dots:
                self.matmul(dots[step], None)
            else:
                self.sum(self.body.eqns[step])
        results = tuple(self.specs[v] for v in self.body.outvars)
        # A wish is fulfilled by a ring, or where XLA gathers the operand for this operation too.
        given = {w: r.gathered if r else w.operand for w, r in wished.items()}
        fulfilled = tuple(w for w in wishes if wished[w] or self.operands[w.operand] == w.spec)
        outputs = (*self.body.outvars, *(given[w] for w in fulfilled))
        return LocalGroup(tuple(self.operands), results, fulfilled, outputs, tuple(self.steps))

    def ring_that_keeps(self, wish: Wish) -> Ring | None:
        """Return the ring that gathers an operand as a later operation wants it, and keeps it."""
        dot = self.body.dots[wish.operand // 2]
        whole = Value(dot.eqn.invars[wish.operand % 2], wish.spec)
        for ring in self.body_rings.arriving(whole):
            if ring in self.body_rings.rings and ring.can_keep():
                ring.keep = True
                return ring
        return None

    def ring(self, ring: Ring) -> None:
        """Run the matmuls of a ring under its hops."""
        run, results = ring_body(ring, self.dot), list(ring.results)
        for member in ring.members:
            i, layout = member.dot.index, member.ring_layout
            self.operands[2 * i], self.operands[2 * i + 1] = layout.lhs, layout.rhs
        for result, member in zip(results, ring.members, strict=False):
            self.specs[result] = member.ring_layout.out
        if ring.keep:
            self.kept.add(ring.gathered)
            results.append(ring.gathered)
        reads = [2 * member.dot.index + SIDES.index(side) for member, side in ring.reads]

        def step(values: Values, operands: Sequence[Array]) -> None:
            values.update(zip(results, run(*(operands[n] for n in reads)), strict=True))

        self.steps.append(step)

    def matmul(self, dot: Dot, reader: Member | None) -> None:
        """Add a matmul without a ring; a ring's reader uses the operands that the ring gathered."""
        i, dtype = dot.index, dot.eqn.outvars[0].aval.dtype
        member = reader or _member(dot)
        matmul = self.known(dot)
        if reader is not None:
            matmul = _with(matmul, reader.lhs.spec, reader.rhs.spec)
        plan = alone(matmul, owner=self.owner)
        self.operands[2 * i], self.operands[2 * i + 1] = plan.lhs, plan.rhs
        self.specs[dot.eqn.outvars[0]] = plan.out
        kept: list[Value | None] = [
            value if value in self.kept and value.spec == spec else None
            for value, spec in ((member.lhs, plan.lhs), (member.rhs, plan.rhs))
        ]

        def step(values: Values, operands: Sequence[Array]) -> None:
            lhs, rhs = (
                operands[2 * i + n] if value is None else values[value]
                for n, value in enumerate(kept)
            )
            out = self.dot(member, lhs, rhs, dtype)
            out = out.astype(int) if dtype == jnp.bool_ else out  # where any is, not how many
            for axis, dim in plan.scattered:
                out = lax.psum_scatter(out, axis, scatter_dimension=dim, tiled=True)
            out = lax.psum(out, plan.summed) if plan.summed else out
            values[dot.eqn.outvars[0]] = out.astype(dtype)

        self.steps.append(step)

    def sum(self, eqn: Any) -> None:
        """Add up two results, unless a ring has."""
        (end,), terms = eqn.outvars, eqn.invars
        if end in self.specs or any(v not in self.specs for v in terms):
            return
        if self.specs[terms[0]] != self.specs[terms[1]]:
            raise _Apart
        self.specs[end] = self.specs[terms[0]]

        def step(values: Values, _: Sequence[Array]) -> None:
            values[end] = lax.add(values[terms[0]], values[terms[1]])

        self.steps.append(step)

    def known(self, dot: Dot) -> ShardedMatmul:
        """Return a matmul with its shardings; a side of unknown sharding counts as replicated."""
        told = self.told[dot.index]
        ndims = [v.aval.ndim for v in (*dot.eqn.invars, dot.eqn.outvars[0])]
        specs = [((),) * n if s is None else s for s, n in zip(told[:3], ndims, strict=True)]
        lhs, rhs, out = specs
        matmul = matmul_of(dot, Shardings(lhs, rhs, out), dict(self.mesh.shape))
        assert isinstance(matmul, ShardedMatmul)
        return matmul


def _member(dot: Dot) -> Member:
    lhs, rhs = dot.eqn.invars
    return Member(dot, Value(lhs, ()), Value(rhs, ()), None)


def _with(matmul: ShardedMatmul, lhs: Spec, rhs: Spec) -> ShardedMatmul:
    return ShardedMatmul(matmul.einsum, lhs, rhs, matmul.out, matmul.itemsize, matmul.axis_sizes)


@dataclass
class Alone:
    """A matmul between plain collectives.

    Attributes:
        lhs, rhs: the operands, as they are wanted.
        out: the result, as it is given.
        scattered: axes over which its partial sums are scattered, each with the dim, in order.
        summed: axes over which they are all-reduced.
    """

    lhs: Spec = ()
    rhs: Spec = ()
    out: Spec = ()
    scattered: list[tuple[str, int]] = field(default_factory=list)
    summed: tuple[str, ...] = ()


def alone(matmul: ShardedMatmul, *, owner: bool = False) -> Alone:
    """Shard a matmul without a ring: each axis along the letter for which the fewest bytes move.

    Args:
        matmul: the matmul, with its shardings around the operation.
        owner: give the result as it is wanted, whatever that moves.
    """
    held = _held(matmul, owner)
    axes = {letter: _ordered(matmul, letter, on) for letter, on in held.items()}
    specs = {side: tuple(axes.get(c, ()) for c in matmul.einsum.side(side)) for side in SIDES}
    partial = [a for c, on in axes.items() if c not in matmul.einsum.out for a in on]
    plan = Alone(specs["lhs"], specs["rhs"])
    out = list(specs["out"])
    for dim, (letter, wanted) in enumerate(zip(matmul.einsum.out, matmul.out, strict=True)):
        scattered = [a for a in wanted if a in partial]
        given = (*out[dim], *scattered)
        # Scattered one after the other, the parts lie as wanted only if these axes are the minor
        # ones. (Axes of one device are in no `held`.)
        if given == _real(matmul, wanted) and _divides(matmul, letter, given):
            out[dim] = given
            plan.scattered += [(a, dim) for a in scattered]
            partial = [a for a in partial if a not in scattered]
    plan.out, plan.summed = tuple(out), tuple(partial)
    return plan


def _held(matmul: ShardedMatmul, owner: bool) -> dict[str, list[str]]:
    """Return the axes that share the work along each letter, as far as they divide it."""
    held: dict[str, list[str]] = {}
    for axis in matmul.axes():
        letter = matmul.letter_of("out", axis) if owner else shared_letter(matmul, axis)
        if letter is not None and _divides(matmul, letter, [*held.get(letter, ()), axis]):
            held.setdefault(letter, []).append(axis)
    return held


def _ordered(matmul: ShardedMatmul, letter: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Order the axes on a letter as the result has them, else as an operand does."""
    sides: tuple[Side, ...] = ("out", "lhs", "rhs")
    given = [a for side in sides for a in matmul.axes_of(side, letter) if a in axes]
    return tuple(dict.fromkeys((*given, *axes)))


def _real(matmul: ShardedMatmul, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for a in axes if matmul.axis_sizes[a] > 1)


def _divides(matmul: ShardedMatmul, letter: str, axes: Sequence[str]) -> bool:
    parts = math.prod(matmul.axis_sizes[a] for a in axes)
    return matmul.einsum.sizes[letter] % parts == 0
