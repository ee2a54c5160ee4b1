"""Turn the rings of a body into edits, which name matmuls by number, and find them again by those.

    Ring(members=[q, k], x: [b, s@model, d])  <->  MakeRing(all_gather over model, matmuls 0, 1)

`placed` checks what an edit asks for against the body: the matmuls are there, their shardings leave
a collective on the ring's axis, its chunks divide, and no equation has to wait for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.analysis.reshards import End, Reshards
from jaxoverlap.passes.edited import misfit
from jaxoverlap.passes.planning.layout import Layout, lay_out
from jaxoverlap.passes.planning.manual.candidates import possible_rings
from jaxoverlap.passes.planning.manual.share import add_written_ring, keep, started
from jaxoverlap.passes.planning.matmuls import matmul_of, variant_of, why_unfit
from jaxoverlap.passes.planning.ring_plan import BodyRings, Hoist, Member, Ring, Value
from jaxoverlap.passes.planning.share import same_sharding, sum_of
from jaxoverlap.passes.planning.splits import ShardedMatmul, Split
from jaxoverlap.plan.edits import EarlyMove, EditedMatmul, MakeRing, ReadGathered

RingEdit = MakeRing | ReadGathered


def edits_of(body_rings: BodyRings) -> Iterator[RingEdit]:
    """Yield the edits that make the rings of a body."""
    for ring in body_rings.rings:
        matmuls = [_edited(member, body_rings) for member in ring.members]
        if ring.written:  # the collective says how values are sharded
            matmuls = [EditedMatmul(site=matmul.site) for matmul in matmuls]
        yield MakeRing(
            kind=ring.kind,
            axis=ring.axis,
            variant=ring.variant,
            matmuls=tuple(matmuls),
            keep=ring.keep and not ring.written,
            written=ring.written and ring.written.position,
        )
    for member in body_rings.readers:
        gathering = (ring for v in (member.lhs, member.rhs) for ring in body_rings.arriving(v))
        kept_by = dict.fromkeys(ring.site for ring in gathering if ring.keep)
        yield ReadGathered(matmul=_edited(member, body_rings), rings=tuple(kept_by))


def _edited(member: Member, body_rings: BodyRings) -> EditedMatmul:
    values = member.lhs, member.rhs
    pairs = zip(values, member.dot.eqn.invars, strict=True)
    through = [side for side, (value, operand) in enumerate(pairs) if value.var is not operand]
    return EditedMatmul(
        site=member.dot.index,
        lhs=member.lhs.spec,
        rhs=member.rhs.spec,
        out=member.layout.matmul.out if member.layout else (),
        through=(*through, 2) if member.end.positions else tuple(through),
        moves=(*_moves(0, member.lhs, body_rings), *_moves(1, member.rhs, body_rings)),
    )


def _moves(operand: Literal[0, 1], value: Value, body_rings: BodyRings) -> list[EarlyMove]:
    """List what was done to an operand before a matmul reads it, for it or for another."""
    if compat.is_literal(value.var) or (hoist := body_rings.hoisted.get(value)) is None:
        return []
    move = EarlyMove(
        operand=operand,
        kind=hoist.kind,
        axis=hoist.axis,
        before=hoist.before.spec,
        after=hoist.after.spec,
        bytes_moved=hoist.bytes_moved,
    )
    return [*_moves(operand, hoist.before, body_rings), move]


def placed(body: Body, edits: Iterable[RingEdit], axis_sizes: Mapping[str, int]) -> BodyRings:
    """Find what edits name in a body, and the order of its equations after them.

    Args:
        body: the body.
        edits: those for its matmuls.
        axis_sizes: devices along each mesh axis.

    Raises:
        UserError: if an edit does not fit the body.
    """
    edits = list(edits)
    written = [e for e in edits if isinstance(e, MakeRing) and e.written is not None]
    if not written:
        return _Placing(body, axis_sizes).body_rings(edits)
    if len(written) < len(edits) or body.dots[0].manual is None:
        raise misfit(written[0], "it names a collective of the user's outside of a shard_map")
    return _placed_written(body, written)


def _placed_written(body: Body, edits: Iterable[MakeRing]) -> BodyRings:
    body_rings, found = started(body)
    possible = list(possible_rings(found))
    for edit in edits:
        named = {matmul.site for matmul in edit.matmuls}
        for ring in possible:
            members = [member for member in ring.members if member.dot.index in named]
            assert ring.written is not None
            if ring.written.position == edit.written and len(members) == len(named):
                break
        else:
            raise misfit(edit, "no collective of the user's is next to these matmuls")
        if (ring.kind, ring.axis) != (edit.kind, edit.axis):
            raise misfit(edit, f"the collective there is {ring.kind} over {ring.axis}")
        check_variant(edit, ring.first.chunk())
        ring = dataclasses.replace(ring, members=members, variant=edit.variant)
        if add_written_ring(body_rings, ring, ()) is None:
            raise misfit(edit, "one of them waits for another")
    for ring in filter(lambda ring: ring.arrives, body_rings.rings):
        keep(found, ring)
    return body_rings


class _Placing:
    def __init__(self, body: Body, axis_sizes: Mapping[str, int]):
        self.body, self.axis_sizes = body, axis_sizes
        self.dots = {dot.index: dot for dot in body.dots}
        self.chains = Reshards(body)
        self.placed = BodyRings(EquationOrder(body.eqns))

    def body_rings(self, edits: Iterable[RingEdit]) -> BodyRings:
        for edit in edits:
            if isinstance(edit, MakeRing):
                self.placed.add(self.ring(edit))
            else:
                self.placed.readers.append(self.reader(edit))
        members = [*(m for ring in self.placed.rings for m in ring.members), *self.placed.readers]
        for member in members:
            self.order_after_keeping_rings(member)
        return self.placed

    def reader(self, edit: ReadGathered) -> Member:
        if not edit.matmul.moves and not edit.rings:
            raise misfit(edit, "nothing has moved what it reads")
        return self.member(edit, edit.matmul)

    def ring(self, edit: MakeRing) -> Ring:
        members = [self.member(edit, matmul) for matmul in edit.matmuls]
        ring = Ring(members, keep=edit.keep, variant=edit.variant)
        if ring.kind != edit.kind:
            raise misfit(edit, f"they wait for {ring.kind} along {edit.axis}")
        if not same_sharding(members):
            raise misfit(
                edit, "the value that they would share has another sharding for some of them"
            )
        if edit.keep and not (ring.arrives and ring.can_keep()):
            raise misfit(edit, "the value that it gathers cannot be kept")
        check_variant(edit, ring.first.chunk())
        together = [member.dot.position for member in members]
        if not ring.arrives and len(members) > 1:
            ring.total, added = sum_of(self.body, [member.end.var for member in members])
            if ring.total is None:
                raise misfit(edit, "their results are not added up, or others read them too")
            together += added
        if not self.placed.order.merge(*together):
            raise misfit(edit, "one of them waits for another")
        return ring

    def member(self, edit: RingEdit, matmul: EditedMatmul) -> Member:
        dot = self.dots.get(matmul.site)
        if dot is None:
            raise misfit(edit, f"matmul {matmul.site} is not in the body of matmul {_first(edit)}")
        ends = self.chains.end(dot.eqn.outvars[0]) if 2 in matmul.through else None
        end = ends or End(dot.eqn.outvars[0])
        values = [self.value(edit, dot, matmul, operand) for operand in (0, 1)]
        hoists = tuple(_hoist(values[move.operand].var, move) for move in matmul.moves)
        self.placed.hoisted |= {h.after: h for h in hoists if h.after not in self.placed.hoisted}
        if not self.placed.order.merge(dot.position, *end.positions):
            raise misfit(edit, f"the result of matmul {matmul.site} is read before its reshard")
        layout = self.layout(edit, dot, matmul) if isinstance(edit, MakeRing) else None
        return Member(dot, values[0], values[1], layout, hoists, end)

    def value(self, edit: RingEdit, dot: Dot, matmul: EditedMatmul, operand: int) -> Value:
        var, spec = dot.eqn.invars[operand], (matmul.lhs, matmul.rhs)[operand]
        if len(spec) != var.aval.ndim:
            dims = f"operand {operand} of matmul {matmul.site} has {var.aval.ndim} dims"
            raise misfit(edit, f"{dims}, and its sharding {len(spec)}")
        return Value(self.chains.origin(var)[0] if operand in matmul.through else var, spec)

    def layout(self, edit: MakeRing, dot: Dot, matmul: EditedMatmul) -> Layout:
        if (why := why_unfit(dot)) is not None:
            raise misfit(edit, f"matmul {matmul.site}: {why}")
        sharded = matmul_of(dot, Shardings(matmul.lhs, matmul.rhs, matmul.out), self.axis_sizes)
        assert isinstance(sharded, ShardedMatmul)
        shared = [split for split in sharded.splits if isinstance(split, Split)]
        split = next((s for s in shared if s.axis == edit.axis and s.collective), None)
        if split is None or len(shared) < len(sharded.splits):
            raise misfit(edit, f"matmul {matmul.site} does not wait for it alone on {edit.axis}")
        layout = lay_out(sharded, shared, split)
        if isinstance(layout, str):
            raise misfit(edit, f"matmul {matmul.site}: {layout}")
        return layout

    def order_after_keeping_rings(self, member: Member) -> None:
        """Put a matmul that reads what a ring keeps after that ring."""
        for value in (member.lhs, member.rhs):
            if compat.is_literal(value.var) or value in self.placed.hoisted:
                continue
            for ring in self.placed.arriving(value):
                if ring.keep and not any(member is other for other in ring.members):
                    self.placed.order.put_after(ring.position, member.dot.position)


def check_variant(edit: MakeRing, chunk: int) -> None:
    """Refuse a ring whose variant does not fit its chunk size."""
    fits, why = variant_of(edit.kind, chunk, edit.variant)
    if fits != edit.variant:
        raise misfit(edit, why or f"its pieces can travel as {fits}")


def _hoist(var: Any, move: EarlyMove) -> Hoist:
    before, after = Value(var, move.before), Value(var, move.after)
    return Hoist(move.kind, before, after, move.axis, move.bytes_moved)


def _first(edit: RingEdit) -> int:
    return edit.site if isinstance(edit, MakeRing) else edit.matmul.site
