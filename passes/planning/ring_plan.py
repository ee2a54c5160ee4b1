"""The rings of a body, their matmuls, and the values that they read.

A ring is the same for a collective that XLA would make and for one that a user wrote in a
`shard_map`; `Ring.written` has the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxoverlap.passes.analysis.einsum import Side, Spec
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, Dot, Manual
from jaxoverlap.passes.analysis.reshards import End
from jaxoverlap.passes.planning.layout import Layout
from jaxoverlap.passes.planning.manual.collective import WrittenCollective
from jaxoverlap.passes.planning.splits import ShardedMatmul
from jaxoverlap.plan.collectives import Kind
from jaxoverlap.plan.decisions import Reason, Variant


@dataclass(frozen=True)
class Value:
    """A value of a body with its sharding: the one it was made with, or one gathered since."""

    var: Any
    spec: Spec

    def moved(self, axis: str, dim: int, to: int | None = None) -> Value:
        """Return the value with a mesh axis removed from a dim, and added to dim `to` if given."""
        spec = list(self.spec)
        spec[dim] = tuple(a for a in spec[dim] if a != axis)
        if to is not None:
            spec[to] = (*spec[to], axis)
        return Value(self.var, tuple(spec))


@dataclass(frozen=True)
class Hoist:
    """A gather or an exchange that is done before any ring, once for all that read its result.

    Attributes:
        kind: all_gather or all_to_all.
        before, after: the value, and the value with its sharding after the collective.
        axis: the mesh axis.
        bytes_moved: bytes that each device sends.
    """

    kind: Kind
    before: Value
    after: Value
    axis: str
    bytes_moved: int


@dataclass(frozen=True)
class Member:
    """A matmul that is rewritten.

    Attributes:
        dot: the matmul.
        lhs, rhs: the values that it reads.
        layout: its layout as a ring; None if nothing moves any more, as others gathered it.
        hoists: the gathers that come before it, also those shared with others.
        end: its own result, or the value that this is resharded to.
        views: the equations between the matmul and a collective that the user wrote, in order; they
            are done chunk by chunk.
    """

    dot: Dot
    lhs: Value
    rhs: Value
    layout: Layout | None
    hoists: tuple[Hoist, ...] = ()
    end: End = End(None)  # noqa: RUF009, it is a tuple
    views: tuple[Any, ...] = ()

    @property
    def ring_layout(self) -> Layout:
        """The layout of a matmul that is in a ring."""
        assert self.layout is not None
        return self.layout

    @property
    def matmul(self) -> ShardedMatmul:
        """The matmul and its shardings, as the ring's layout has them."""
        return self.ring_layout.matmul

    def value(self, side: Side) -> Value:
        """Return one operand."""
        return {"lhs": self.lhs, "rhs": self.rhs}[side]


@dataclass
class Ring:
    """Matmuls that share a ring: they read one gathered value, or their partial sums are added.

    Attributes:
        members: the matmuls; the first names the ring.
        keep: whether the ring also returns the full gathered value, for matmuls that come later.
        total: the variable of the sum of all results, where several are added up, or of the result
            of the user's collective.
        variant: how the pieces travel.
        why: the reason if they do not travel as requested.
        written: the user's collective that the ring carries out; None for one that XLA would make.
        between: of a written one, the indices of the equations between it and the matmuls.
        again: those of `between` that others read: they are done behind the ring too.
    """

    members: list[Member]
    keep: bool = False
    total: Any = None
    variant: Variant = Variant()  # noqa: RUF009, it is frozen
    why: str = ""
    written: WrittenCollective | None = None
    between: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()

    @property
    def first(self) -> Layout:
        """The layout of the first matmul: kind and axis of the ring are the same for all."""
        return self.members[0].ring_layout

    @property
    def site(self) -> int:
        """The number of the first matmul."""
        return self.members[0].dot.index

    @property
    def position(self) -> int:
        """The index of the first matmul's equation in the body."""
        return self.members[0].dot.position

    @property
    def kind(self) -> Kind:
        """The kind of collective that the ring decomposes."""
        return self.first.collective.kind

    @property
    def axis(self) -> str:
        """The mesh axis of the ring."""
        return self.first.ring.axis

    @property
    def axis_size(self) -> int:
        """The devices along its axis."""
        return self.first.ring.axis_size

    @property
    def side(self) -> Side:
        """The side that moves, seen from the first matmul."""
        return self.first.collective.side

    @property
    def dim(self) -> int:
        """The dim, of the gathered value or of the result, that is split into chunks."""
        return self.first.matmul.einsum.side(self.side).index(self.first.letter)

    @property
    def shard(self) -> Value:
        """The value that is gathered."""
        return self.members[0].value(self.side)

    @property
    def gathered(self) -> Value:
        """The gathered or exchanged value, as it has arrived."""
        return self.shard.moved(self.axis, self.dim, self.other_dim)

    @property
    def other_dim(self) -> int | None:
        """The other dim of an exchange: sharded then, of an operand; gathered, of a result."""
        collective = self.first.collective
        if collective.to is None:
            return None
        letter = collective.to if collective.side != "out" else collective.letter
        return self.first.matmul.einsum.side(self.side).index(letter)

    @property
    def arrives(self) -> bool:
        """Return whether an operand moves, and not results."""
        return self.side != "out"

    @property
    def reads(self) -> list[tuple[Member, Side]]:
        """The operands in its function's order: what moves once, then each matmul's others."""
        if not self.arrives:
            return [(member, side) for member in self.members for side in ("lhs", "rhs")]
        return [(self.members[0], self.side), *((m, m.ring_layout.other) for m in self.members)]

    @property
    def results(self) -> list[Any]:
        """The variables that it computes: each matmul's result, or the sum of all."""
        return [m.end.var for m in self.members] if self.total is None else [self.total]

    def can_keep(self) -> bool:
        """Return whether the step can read the full gathered value as another result of the ring.

        Its blocks have to be contiguous, and nothing else may have been done to it.
        """
        layout, axis = self.first, self.first.ring.axis
        spec = layout.matmul.spec(self.side)
        inside = any(s.collective and s.collective.side == self.side for s in layout.others)
        return spec == layout.spec(self.side) and not inside and spec[self.dim][-1] == axis


@dataclass
class BodyRings:
    """How the matmuls of one body share collectives: its rings, and why other matmuls have none.

    Attributes:
        order: the order in which the body's equations then stand.
        rings: the rings.
        readers: matmuls that only read what others gathered.
        hoisted: the gathers that come before the rings, by what they give.
        skipped: why each other matmul is not rewritten, by its id.
        costs: the cost of a byte along each mesh axis, in any unit; 1 by default.
        read: the variables that placed matmuls read.
        absorbed: the variables that are gone, as a ring gives what they are resharded to.
        manual: the user's shard_maps around the body, where its rings are of written collectives.
        late: there, the matmuls that read what a ring gathered, each with the ring; they stay.
        left: there, the collectives next to a matmul that stay, by the matmul's id.
    """

    order: EquationOrder
    rings: list[Ring] = field(default_factory=list)
    readers: list[Member] = field(default_factory=list)
    hoisted: dict[Value, Hoist] = field(default_factory=dict)
    skipped: dict[int, Reason] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    read: set[Any] = field(default_factory=set)
    absorbed: set[Any] = field(default_factory=set)
    manual: Manual | None = None
    late: list[tuple[Dot, Ring]] = field(default_factory=list)
    left: dict[int, list[str]] = field(default_factory=dict)
    _arriving: dict[Value, list[Ring]] = field(default_factory=dict)

    def add(self, ring: Ring) -> None:
        """Add a ring."""
        self.rings.append(ring)
        if ring.arrives:
            self._arriving.setdefault(ring.gathered, []).append(ring)

    def in_order(self, body: Body) -> Iterator[Ring | Member | int]:
        """Yield what the body computes in order: rings, readers, and indices of other equations."""
        made: dict[int, Ring | Member] = {m.dot.position: m for m in self.readers}
        made |= {self.order.first(ring.position): ring for ring in self.rings}
        for position in self.order.positions():
            yield made.get(position, position)

    def arriving(self, gathered: Value) -> Sequence[Ring]:
        """Return the rings that gather a value."""
        return self._arriving.get(gathered, ())

    def cost(self, axis: str) -> float:
        """Return the cost of a byte along a mesh axis."""
        return self.costs.get(axis, 1.0)
