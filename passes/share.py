"""One ring for all that read it: which matmuls of a body share a ring, and what they read.

A value that several matmuls gather moves once: those that can run at the same time (q, k and v; the
data and weight gradients that read dy) share a ring, and each hop has all their chunks above it;
one that comes later (a weight gradient, whose other operand follows from the first ring's result)
reads the whole value, which the ring keeps for it. Partial sums that are added up before anyone
reads them (the gradients of what q, k and v read) travel as one sum.

Where a matmul waits for a gather on another axis too (FSDP's weight), that gather is placed before
the ring and once for all that read it, the recomputed forward pass and the data gradient included.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxoverlap import _compat
from jaxoverlap.passes.jaxprs import Body, Dot
from jaxoverlap.passes.layout import Layout, hoistable, lay_out, traffic
from jaxoverlap.passes.order import Order
from jaxoverlap.passes.rings import Hoist, Member, Ring, Sharing, Value
from jaxoverlap.passes.sites import Matmul, Refusal, Side, Split, splits

Read = Callable[[Dot], Matmul | str]


def share(body: Body, read: Read) -> Sharing:
    """Decide for each matmul of a body how it lies on the mesh, and with which it shares a ring.

    Args:
        body: the body.
        read: gives a matmul with its shardings, or why it is left alone.
    """
    sharing = Sharing(Order(body.eqns))
    for dot in body.dots:
        matmul = read(dot)
        reason = matmul if isinstance(matmul, str) else _place(sharing, dot, matmul)
        if reason is not None:
            sharing.skipped[dot.index] = reason
    _add_up(sharing, body)
    return sharing


def _place(sharing: Sharing, dot: Dot, matmul: Matmul) -> str | None:
    """Give a matmul its ring, a new one or one that is there; or say why it has none."""
    lhs, rhs = dot.eqn.invars
    member = Member(dot, Value(lhs, matmul.lhs), Value(rhs, matmul.rhs), None)
    changed = False
    while True:
        found = splits(matmul)
        if refusals := [s.reason for s in found if isinstance(s, Refusal)]:
            return "; ".join(refusals)
        moving = [s for s in found if isinstance(s, Split) and s.motion is not None]
        if not moving:
            sharing.readers += [member] if changed else []
            return None if changed else "no collective"
        candidates = [_candidate(member, matmul, split.axis) for split in moving]
        good = [c for c in candidates if isinstance(c, Member)]
        if any(_join(sharing, candidate) for candidate in good):
            return None
        known = next(_known(sharing, member, matmul, moving, good), None)
        if known is None:
            break
        member, matmul = _reading(member, matmul, *known)
        changed = True
    if not good:
        return next(c for c in candidates if isinstance(c, str))
    best = min(good, key=lambda c: _preference(sharing, c))
    sharing.hoisted |= {h.after: h for h in best.hoists if h.after not in sharing.hoisted}
    sharing.rings.append(Ring([best]))
    return None


def _candidate(member: Member, matmul: Matmul, axis: str) -> Member | str:
    """The matmul with the ring on one axis, and gathers on other axes done before it."""
    while True:
        shared = [s for s in splits(matmul) if isinstance(s, Split)]
        ring = next((s for s in shared if s.axis == axis and s.motion), None)
        if ring is None:
            return f"gathers on other axes leave nothing to move along {axis}"
        split = hoistable(matmul, [s for s in shared if s is not ring and _is_gather(s)])
        if split is None:
            break
        member, matmul = _hoisted(member, matmul, split)
    layout = lay_out(matmul, shared, ring)
    return layout if isinstance(layout, str) else dataclasses.replace(member, layout=layout)


def _is_gather(split: Split) -> bool:
    return split.motion is not None and split.motion.kind == "all_gather"


def _hoisted(member: Member, matmul: Matmul, split: Split) -> tuple[Member, Matmul]:
    """The matmul, reading an operand that has been gathered before."""
    side, before, after = _gathered(member, matmul, split)
    assert split.motion is not None
    hoist = Hoist(before, after, split.axis, split.motion.bytes_moved)
    member = dataclasses.replace(member, hoists=(*member.hoists, hoist))
    return _reading(member, matmul, side, after)


def _gathered(member: Member, matmul: Matmul, split: Split) -> tuple[Side, Value, Value]:
    """The side that a split gathers, before and after."""
    assert split.motion is not None
    side = split.motion.side
    before = member.value(side)
    dim = matmul.einsum.side(side).index(split.motion.letter)
    return side, before, before.gathered(dim, split.axis)


def _reading(member: Member, matmul: Matmul, side: Side, value: Value) -> tuple[Member, Matmul]:
    """The matmul with another operand."""
    return (
        dataclasses.replace(member, **{side: value}),
        dataclasses.replace(matmul, **{side: value.spec}),
    )


def _known(
    sharing: Sharing,
    member: Member,
    matmul: Matmul,
    moving: Sequence[Split],
    candidates: Sequence[Member],
) -> Iterator[tuple[Side, Value]]:
    """Operands that others have gathered already, by the side that would gather them again."""
    for split in filter(_is_gather, moving):
        side, _, after = _gathered(member, matmul, split)
        if after in sharing.hoisted:
            yield side, after
    for candidate in candidates:
        ring = _ring_of(sharing, candidate)
        if ring is None or not ring.can_keep():
            continue
        if sharing.order.put_after(ring.place, member.dot.place):
            ring.keep = True
            yield Ring([candidate]).side, ring.whole


def _ring_of(sharing: Sharing, member: Member) -> Ring | None:
    """The ring that gathers what a matmul would gather."""
    mine = Ring([member])
    if mine.kind != "all_gather":
        return None
    same = (
        r
        for r in sharing.rings
        if r.kind == mine.kind and (r.shard, r.whole) == (mine.shard, mine.whole)
    )
    return next(same, None)


def _join(sharing: Sharing, member: Member) -> bool:
    """Let a matmul share the ring that gathers what it reads, if it can run beside the others."""
    ring = _ring_of(sharing, member)
    members = _fit_together([*ring.members, member]) if ring else None
    if ring is None or members is None or not sharing.order.merge(ring.place, member.dot.place):
        return False
    ring.members = members
    sharing.hoisted |= {h.after: h for h in member.hoists if h.after not in sharing.hoisted}
    return True


def _fit_together(members: Sequence[Member]) -> list[Member] | None:
    """The members laid out on the same manual axes; None if what they share then lies apart."""
    layouts = [m.layout for m in members if m.layout]
    axes: set[str] = set()
    while axes != (grown := {a for layout in layouts for a in layout.manual}):
        axes = grown
        again = [_laid_out_again(layout, axes) for layout in layouts]
        layouts = [layout for layout in again if isinstance(layout, Layout)]
        if len(layouts) < len(members):
            return None
    if len({_shared(layout) for layout in layouts}) > 1:
        return None
    fit = zip(members, layouts, strict=True)
    return [dataclasses.replace(member, layout=layout) for member, layout in fit]


def _laid_out_again(layout: Layout, axes: set[str]) -> Layout | str:
    shared = [s for s in splits(layout.matmul) if isinstance(s, Split)]
    ring = next(s for s in shared if s.axis == layout.ring.axis)
    return lay_out(layout.matmul, shared, ring, axes)


def _shared(layout: Layout) -> tuple[Any, ...]:
    """All that must be alike in the value that a ring's members share."""
    ring = layout.ring.motion
    assert ring is not None
    dim = layout.matmul.einsum.side(ring.side).index(layout.letter)
    others = tuple(
        (s.axis, s.motion.kind, layout.matmul.einsum.side(ring.side).find(s.motion.letter))
        for s in layout.others
        if s.motion and s.motion.side == ring.side
    )
    return layout.ring.axis, ring.kind, dim, layout.spec(ring.side), others


def _preference(sharing: Sharing, member: Member) -> tuple[int, int, int]:
    """Fewest bytes in all; then no gather inside the ring; then most bytes in the ring."""
    layout = member.layout
    assert layout is not None
    sent = traffic(layout)
    new = sum(h.bytes_moved for h in member.hoists if h.after not in sharing.hoisted)
    inside = sum(map(_is_gather, layout.others))
    return sum(sent.values()) + new, inside, -sent[layout.ring.axis]


def _add_up(sharing: Sharing, body: Body) -> None:
    """Let rings whose results are added up, and read by nobody else, send one sum."""
    reads = Counter(v for e in body.eqns for v in e.invars if not _compat.is_literal(v))
    reads.update(v for v in body.outvars if not _compat.is_literal(v))
    made = {
        ring.members[0].dot.eqn.outvars[0]: ring
        for ring in sharing.rings
        if ring.kind != "all_gather"
    }
    for place, eqn in enumerate(body.eqns):
        rings = [made.get(v) for v in eqn.invars if not _compat.is_literal(v) and reads[v] == 1]
        if eqn.primitive.name not in ("add", "add_any") or len(rings) != 2:
            continue
        one, other = rings
        if one is None or other is None or one is other:
            continue
        members = _fit_together([*one.members, *other.members])
        if members and sharing.order.merge(one.place, other.place, place):
            sharing.rings.remove(other)
            one.members, one.total = sorted(members, key=lambda m: m.dot.index), eqn.outvars[0]
            made[one.total] = one
