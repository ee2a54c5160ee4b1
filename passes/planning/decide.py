"""One `Decision` or `Skip` for each matmul, from its shardings.

Where several mesh axes of a matmul need a collective, one becomes the ring: of all orders the one
that sends least, and among equals the one whose ring carries most, for that is what hides. The
others stay XLA's, placed before the ring (a gathered operand) or after it (summed results), so that
they run once and not once a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from jaxoverlap._util.text import human_bytes
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.entries import (
    letters_of,
    module_of,
    names_of,
    reader_entry,
    skip_of,
    source_of,
)
from jaxoverlap.passes.planning.independent_matmuls import IndependentMatmuls
from jaxoverlap.passes.planning.layout import traffic
from jaxoverlap.passes.planning.manual.share import share_written
from jaxoverlap.passes.planning.matmuls import (
    explicit_axes_mismatch,
    matmul_of,
    refusal,
    variant_of,
    why_unfit,
)
from jaxoverlap.passes.planning.ring_plan import BodyRings, Member, Ring
from jaxoverlap.passes.planning.share import Specs, share
from jaxoverlap.passes.planning.splits import ShardedMatmul
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.plan.collectives import RING_PASSES
from jaxoverlap.plan.decisions import Decision, Reason, Skip, Variant


def decide(
    bodies: Sequence[Body], shardings: Mapping[int, Shardings], terms: Terms
) -> tuple[tuple[Decision | Skip, ...], Mapping[int, BodyRings]]:
    """Decide on every matmul of a step.

    Args:
        bodies: the step's bodies, from `jaxprs.bodies`.
        shardings: its matmuls' shardings, from `partitioned`.
        terms: to decide by.

    Returns:
        An entry for each matmul, and the rings of each body that has any matmul, by its number.

    Raises:
        ValueError: if a request names a line without a matmul, or an unknown matmul id.
    """
    step = _Step(bodies, shardings, terms)
    rings_by_body = {body.index: _shared(body, step) for body in bodies if body.dots}
    entries: dict[int, Decision | Skip] = {}
    for body_rings in rings_by_body.values():
        skipped = body_rings.skipped.items()
        entries |= {index: skip_of(step.matmuls[index], why) for index, why in skipped}
        entries |= decisions(body_rings)
    return tuple(entries[index] for index in sorted(entries)), rings_by_body


def _shared(body: Body, step: _Step) -> BodyRings:
    """Choose which matmuls of a body share which ring, and how the pieces of each ring travel.

    Where a ring is rejected, the others may be shared in another way: the body is decided on again.
    """
    rejected = step.terms.requests.rejections
    while True:
        body_rings = step.shared(body, rejected)
        lost: dict[int, Reason] = {}
        for ring in body_rings.rings:
            ring.variant, ring.why = step.chosen(body, ring)
            if ring.variant.style == "plain":
                lost |= {m.dot.index: Reason("not ringed", ring.why) for m in ring.members}
        if not lost:
            return body_rings
        rejected = rejected | lost


class _Step:
    """The matmuls of a step and their shardings, each read once."""

    def __init__(self, bodies: Sequence[Body], shardings: Mapping[int, Shardings], terms: Terms):
        self.matmuls = {dot.index: dot for body in bodies for dot in body.dots}
        self.terms, self._shardings = terms, shardings
        self._known = functools.cache(self._matmul)
        self._seconds = functools.cache(self._local_s)
        self._bodies = {body.index: body for body in bodies}
        self._independent = functools.cache(self._independent_matmuls)
        names = {index: names_of(self.matmuls[index]) for index in sorted(self.matmuls)}
        terms.requests.check(names)

    def shared(self, body: Body, rejected: Mapping[int, Reason]) -> BodyRings:
        """Return the rings of a body, without those of rejected matmuls."""
        terms = self.terms
        if any(dot.manual for dot in body.dots):
            return share_written(body, self._shardings, terms.requests, rejected)
        read = functools.partial(self.read, rejected)
        return share(
            body,
            read,
            self.beyond,
            ahead=terms.prefetch,
            costs=terms.costs,
            rings=terms.rings,
            once=terms.once,
        )

    def read(self, rejected: Mapping[int, Reason], dot: Dot) -> ShardedMatmul | Reason:
        """Return a matmul with its sharding, or why it is not rewritten."""
        unread = self.terms.unread
        reason = Reason("no ring", unread) if unread else refusal(dot, self.terms.requests)
        reason = reason or explicit_axes_mismatch(dot, self.terms.explicit)
        return reason or rejected.get(dot.index) or self._known(dot.index)

    def beyond(self, dot: Dot) -> tuple[Specs, Specs, Specs]:
        """Return the shardings before and after the reshards around a matmul."""
        read = self._shardings[dot.index]
        return read.lhs_sources, read.rhs_sources, read.out_sinks

    def chosen(self, body: Body, ring: Ring) -> tuple[Variant, str]:
        """Return a ring's variant, the requested or else the cheapest one, and the reason."""
        chunk, prices = ring.first.chunk(), self.terms.prices
        if requested := self.terms.requests.variant(names_of(ring.members[0].dot)):
            if requested.style == "plain":
                return requested, "as chosen"
            return variant_of(ring.kind, chunk, requested)
        if ring.written:
            return variant_of(ring.kind, chunk, Variant())
        usual, _ = variant_of(ring.kind, chunk, _usual(ring, self.terms.costs))
        others = functools.partial(self._others_s, body, ring)
        return prices.chosen(ring, usual, others) if prices else (usual, "")

    def _others_s(self, body: Body, ring: Ring) -> Iterator[float]:
        """Yield the seconds of each matmul that could overlap with a ring's full collective."""
        return (self._seconds(dot.index) for dot in self._independent(body.index).of(ring))

    def _independent_matmuls(self, index: int) -> IndependentMatmuls:
        return IndependentMatmuls(self._bodies[index])

    def _local_s(self, index: int) -> float:
        dot, matmul, prices = self.matmuls[index], self._known(index), self.terms.prices
        assert prices is not None
        if why_unfit(dot) or isinstance(matmul, Reason):
            return 0.0
        return prices.local_s(dot, matmul)

    def _matmul(self, index: int) -> ShardedMatmul | Reason:
        if index not in self._shardings:
            why = "it was dropped as unused, or lowered to something else"
            return Reason("no ring", f"its sharding is not known: {why}")
        return matmul_of(self.matmuls[index], self._shardings[index], self.terms.axis_sizes)


def _usual(ring: Ring, costs: Mapping[str, float]) -> Variant:
    """Return the default variant: sums on a slow link go straight to their owner.

    On such a link hops of several rings queue, and in a ring every sum waits for the hop before.
    """
    slow = costs.get(ring.first.ring.axis, 1.0) > 1.0
    return Variant("direct" if slow and ring.kind == "reduce_scatter" else "one_way")


# -- what explain() shows -------------------------------------------------------------------------


def decisions(body_rings: BodyRings) -> dict[int, Decision]:
    """Return the entries of the matmuls of a body that are rewritten, by their number."""
    entries = {
        m.dot.index: _decision(body_rings, ring, m)
        for ring in body_rings.rings
        for m in ring.members
    }
    entries |= {m.dot.index: _reads(m, body_rings) for m in body_rings.readers}
    for dot, ring in body_rings.late:
        moved = f"ring {ring.site}"
        entries[dot.index] = reader_entry(
            dot, ring=ring.site, axis=ring.axis, kind=ring.kind, moved=moved
        )
    _charge_hoists(entries, body_rings)
    return entries


def _decision(body_rings: BodyRings, ring: Ring, member: Member) -> Decision:
    """Make the entry of a matmul of a ring; that of the first one carries the ring's bytes."""
    layout, dot, leads = member.ring_layout, member.dot, member is ring.members[0]
    sent = traffic(layout)
    mine = ring.written.bytes_moved if ring.written else sent[ring.axis]
    shown = [s for s in layout.others if leads or ring.arrives]
    others = [
        f"{s.axis} {s.collective.kind}, {human_bytes(sent[s.axis])}" for s in shown if s.collective
    ]
    why = ""
    if layout.others or member.hoists:
        why = f"{human_bytes(mine)} a run" + (", the most" if mine == max(sent.values()) else "")
    slices = ring.variant.slices
    reasons = (why, ring.why) if leads else (f"shares ring {ring.site}",)
    return Decision(
        site=dot.index,
        ring=ring.site,
        variant=ring.variant,
        source=source_of(dot),
        module=module_of(dot),
        einsum=letters_of(dot),
        kind=RING_PASSES[ring.kind],
        axis=ring.axis,
        letter=layout.letter,
        num_chunks=slices if ring.variant.style == "sliced" else slices * ring.axis_size,
        bytes_moved=mine * dot.runs if leads else 0,
        runs=dot.runs,
        others=(*others, *body_rings.left.get(dot.index, ())),
        why=", ".join(filter(None, reasons)),
    )


def _reads(member: Member, body_rings: BodyRings) -> Decision:
    """Make the entry of a matmul that has nothing left to gather."""
    keeping = [[r for r in body_rings.arriving(v) if r.keep] for v in (member.lhs, member.rhs)]
    rings = [found[-1] for found in keeping if found]
    hoists = [body_rings.hoisted[v] for v in (member.lhs, member.rhs) if v in body_rings.hoisted]
    sources = [f"ring {ring.site}" for ring in rings] + [
        f"the {h.kind} on {h.axis}" for h in hoists
    ]
    return reader_entry(
        member.dot,
        ring=rings[0].site if rings else member.dot.index,
        axis=rings[0].axis if rings else hoists[0].axis,
        moved=" and ".join(sources),
    )


def _charge_hoists(entries: dict[int, Decision], body_rings: BodyRings) -> None:
    """List each gather hoisted before the rings with the first matmul that reads its result."""
    members = [*(m for ring in body_rings.rings for m in ring.members), *body_rings.readers]
    seen = set()
    for member in sorted(members, key=lambda m: m.dot.index):
        for hoist in member.hoists:
            if hoist.after in seen:
                continue
            seen.add(hoist.after)
            entry = entries[member.dot.index]
            text = f"{hoist.axis} {hoist.kind}, {human_bytes(hoist.bytes_moved)}"
            entries[entry.site] = msgspec.structs.replace(entry, others=(text, *entry.others))
