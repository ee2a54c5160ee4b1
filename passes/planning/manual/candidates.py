"""Find candidate rings in shard_map bodies: a collective that the user wrote, and its matmuls.

    x = all_gather x ;  t = transpose x ;  y = dot_general t w      # one operand moves
    p = dot_general h w ;  q = dot_general g v ;  s = add p q ;  z = psum s     # a sum moves

A ring does a collective in chunks by permutes, each of which overlaps with a part of its matmuls.
A `Neighbour` is a matmul and the equations between it and its collective; `BodyCollectives` finds
them. In a `Ring` each is a `Member`: it reads two `Value`s (a variable and its sharding), and its
`Layout` is the sharding of each side and the dim that is split into chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import SIDES, Einsum, Side, Spec, einsum_of
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, Manual
from jaxoverlap.passes.analysis.reshards import End
from jaxoverlap.passes.planning.layout import Layout
from jaxoverlap.passes.planning.manual.collective import WrittenCollective, written_collective
from jaxoverlap.passes.planning.matmuls import why_unfit
from jaxoverlap.passes.planning.ring_plan import Member, Ring, Value
from jaxoverlap.passes.planning.splits import ImpliedCollective, ShardedMatmul, Split
from jaxoverlap.plan.decisions import Reason


def is_chunkwise(eqn: Any) -> bool:
    """Return whether an equation can run on each chunk, and on each term of a sum or on the sum."""
    if eqn.primitive.name == "convert_element_type":
        return jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
    return eqn.primitive.name in ("transpose", "pvary")


def is_sum(eqn: Any) -> bool:
    """Return whether an equation adds two values."""
    return eqn.primitive.name in ("add", "add_any")


class Neighbour(NamedTuple):
    """A matmul that reads a collective's result, or whose result a collective reads.

    Attributes:
        dot: the matmul.
        side: the operand that moves, or "out".
        views: the equations between the two, in order: floating-point casts, transposes, pvary.
    """

    dot: Dot
    side: Side
    views: tuple[Any, ...] = ()

    @property
    def einsum(self) -> Einsum:
        """The einsum of the matmul; the moving side has the moving value's order of dims."""
        shapes = [v.aval.shape for v in self.dot.eqn.invars]
        einsum = einsum_of(self.dot.eqn.params["dimension_numbers"], *shapes)
        letters = list(einsum.side(self.side))
        orders = [e.params["permutation"] for e in self.views if e.primitive.name == "transpose"]
        for order in orders if self.side == "out" else reversed(orders):
            if self.side == "out":
                letters = [letters[d] for d in order]
            else:
                letters = [letters[order.index(d)] for d in range(len(order))]
        return dataclasses.replace(einsum, **{self.side: "".join(letters)})

    def member(self, collective: WrittenCollective, dim: int) -> Member:
        """Return the matmul as a member of a ring.

        Args:
            collective: the ring's collective.
            dim: the dim, of the value that moves, that is split into chunks.
        """
        end = End(self.dot.eqn.outvars[0])  # its own result: no reshard follows
        layout = self._layout(collective, dim)
        lhs, rhs = self.dot.eqn.invars
        lhs = collective.eqn.invars[0] if self.side == "lhs" else lhs
        rhs = collective.eqn.invars[0] if self.side == "rhs" else rhs
        values = Value(lhs, layout.lhs), Value(rhs, layout.rhs)
        return Member(self.dot, *values, layout, end=end, views=self.views)

    @property
    def fits(self) -> bool:
        """Whether the matmul can be in a ring."""
        return why_unfit(dataclasses.replace(self.dot, inside=None)) is None

    def _layout(self, collective: WrittenCollective, dim: int) -> Layout:
        """Shard the matmul over the ring's axis alone, as its collective says."""
        einsum, axis, n = self.einsum, collective.axis, collective.axis_size
        letters = einsum.side(self.side)
        specs: dict[Side, Spec] = {side: ((),) * len(einsum.side(side)) for side in SIDES}
        if collective.kind != "all_reduce":
            specs[self.side] = tuple((axis,) * (d == dim) for d in range(len(letters)))
        avals = [v.aval for v in (*self.dot.eqn.invars, self.dot.eqn.outvars[0])]
        itemsize = tuple(np.dtype(a.dtype).itemsize for a in avals)
        matmul = ShardedMatmul(einsum, *specs.values(), itemsize, {axis: n})  # type: ignore[arg-type]
        letter = letters[dim if collective.dim is None else collective.dim]
        to = None if collective.wanted is None else letters[collective.wanted]
        implied = ImpliedCollective(collective.kind, self.side, letter, collective.bytes_moved, to)
        split = Split(axis, n, None, None, None, implied)  # its sides: only `lay_out` reads them
        return Layout(matmul, split, letters[dim], (), **specs)


class BodyCollectives:
    """The matmuls and collectives of one manual body, and the views and sums between them.

    Attributes:
        eqns: the equations of the body.
        dots: its `dot_general`s, by the index of the equation.
        collectives: by the index of each, what it is, or why no ring can do it.
        uses: the makers and readers of the body's values.
    """

    def __init__(self, body: Body, manual: Manual):
        self.eqns = body.eqns
        dots = (dot for dot in body.dots if dot.eqn.primitive.name == "dot_general")
        self.dots = {dot.position: dot for dot in dots}
        self.uses = body.uses
        self.collectives = {
            position: written_collective(position, eqn, manual.axes)
            for position, eqn in enumerate(body.eqns)
            if compat.is_collective(eqn)
        }

    def matmuls_reading(self, position: int) -> tuple[list[Neighbour], set[int]]:
        """Return the matmuls that read a collective's result, and the indices of all its views.

        Args:
            position: the index of the collective's equation.
        """
        found: list[Neighbour] = []
        positions: set[int] = set()
        views: list[tuple[Any, tuple[Any, ...]]] = [(self.eqns[position].outvars[0], ())]
        for var, above in views:  # it grows
            for reader in dict.fromkeys(self.uses.readers(var)):
                eqn = None if reader is None else self.eqns[reader]
                if eqn is not None and reader in self.dots:
                    sides = [s for s, v in zip(("lhs", "rhs"), eqn.invars, strict=True) if v is var]
                    found += [Neighbour(self.dots[reader], side, above) for side in sides]  # type: ignore[arg-type]
                elif eqn is not None and reader is not None and is_chunkwise(eqn):
                    positions.add(reader)
                    views.append((eqn.outvars[0], (*above, eqn)))
        return sorted(found, key=lambda one: one.dot.index), positions

    def matmuls_summed_into(self, position: int) -> tuple[list[Neighbour], set[int]] | None:
        """Return the matmuls whose sum a collective reads, and the indices of equations in between.

        None if others read a part of the sum, or one of its terms comes from no matmul.

        Args:
            position: the index of the collective's equation.
        """
        terms = self._terms(self.eqns[position].invars[0])
        return terms and (sorted(terms[0], key=lambda one: one.dot.index), terms[1])

    def _terms(self, var: Any) -> tuple[list[Neighbour], set[int]] | None:
        if self.uses.maker(var) is None or len(self.uses.readers(var)) != 1:
            return None
        position = self.uses.made[var]
        eqn = self.eqns[position]
        if position in self.dots:
            return [Neighbour(self.dots[position], "out")], set()
        if not is_chunkwise(eqn) and not is_sum(eqn):
            return None
        parts = [part for v in eqn.invars if (part := self._terms(v))]
        if len(parts) != len(eqn.invars):
            return None
        found = [one for summands, _ in parts for one in summands]
        if is_chunkwise(eqn):
            found = [one._replace(views=(*one.views, eqn)) for one in found]
        return found, {position}.union(*(positions for _, positions in parts))

    def unread(self, views: frozenset[int], ring: set[int]) -> set[int]:
        """Return the views that nobody reads but a ring's matmuls and other such views."""
        dead: set[int] = set()
        for position in sorted(views, reverse=True):
            if not self.read_beyond(position, ring | dead):
                dead.add(position)
        return dead

    def read_beyond(self, position: int, positions: set[int]) -> bool:
        """Return whether any equation not in `positions` reads the result of `position`."""
        return any(r not in positions for r in self.uses.readers(self.eqns[position].outvars[0]))


def possible_rings(found: BodyCollectives) -> Iterator[Ring]:
    """Yield a ring for the fitting matmuls that read a collective, and one for those before it.

    Those before it have the value that it moves, or add up to it; all of them have to fit. Matmuls
    such as x @ x.T, which read a collective's result twice, are left out.
    """
    for position, collective in found.collectives.items():
        if isinstance(collective, Reason):
            continue
        if collective.kind in ("all_gather", "all_to_all"):
            reading, views = found.matmuls_reading(position)
            met = [one.dot.index for one in reading]
            once = [one for one in reading if met.count(one.dot.index) == 1]  # not x @ x.T
            fit = [one for one in once if one.fits]
            assert collective.dim is not None
            if fit:
                yield _ring(collective, fit, collective.dim, views)
        if collective.kind != "all_gather" and (summed := found.matmuls_summed_into(position)):
            dim = collective.dim_of_sum
            if dim is not None and all(one.fits for one in summed[0]):
                yield _ring(collective, summed[0], dim, summed[1])


def _ring(
    collective: WrittenCollective, found: list[Neighbour], dim: int, between: set[int]
) -> Ring:
    members = [one.member(collective, dim) for one in found]
    total = collective.eqn.outvars[0] if found[0].side == "out" else None
    return Ring(members, total=total, written=collective, between=frozenset(between))
