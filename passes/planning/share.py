"""Group the matmuls of a body into rings: those that read one value share one ring.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.einsum import Side, Spec
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, Dot
from jaxoverlap.passes.analysis.reshards import End, Reshards
from jaxoverlap.passes.planning.entries import NO_COLLECTIVE
from jaxoverlap.passes.planning.layout import Layout, hoistable, lay_out, traffic
from jaxoverlap.passes.planning.ring_plan import BodyRings, Hoist, Member, Ring, Value
from jaxoverlap.passes.planning.splits import ImpliedCollective, Refusal, ShardedMatmul, Split
from jaxoverlap.plan.decisions import NO_RINGS, Reason

Read = Callable[[Dot], ShardedMatmul | Reason]
Specs = Sequence[Spec | None]
Beyond = Callable[[Dot], tuple[Specs, Specs, Specs]]
_View = tuple[Member, ShardedMatmul]


def share(
    body: Body,
    read: Read,
    beyond: Beyond,
    *,
    ahead: bool = False,
    costs: Mapping[str, float] | None = None,
    rings: bool = True,
    once: bool = False,
) -> BodyRings:
    """Choose each matmul's shardings in a body, and the matmuls with which it shares a ring.

    Args:
        body: the body.
        read: returns a matmul with its shardings, or why it is not rewritten.
        beyond: the shardings of what its operands are resharded from and its result to, reshard by
            reshard.
        ahead: gather the weights of a scan before any ring, to be prefetched.
        costs: the cost of a byte along each mesh axis, in any unit; default: alike.
        rings: whether matmuls may become rings; if not, weights are gathered all the same.
        once: whether, without rings, what several matmuls gather is gathered once for all of them.
    """
    body_rings, chains = BodyRings(EquationOrder(body.eqns), costs=costs or {}), Reshards(body)
    early = body.ahead if ahead else frozenset()
    late: list[tuple[Dot, ShardedMatmul]] = []
    shared = _gathered_twice(body, read, beyond) if once and not rings else frozenset[Value]()
    for dot in body.dots:
        matmul = read(dot)
        if isinstance(matmul, Reason):
            body_rings.skipped[dot.index] = matmul
        elif not rings:
            _read_gathered(body_rings, _views(chains, dot, matmul, beyond(dot)), early, shared)
        elif any(isinstance(s, Refusal) for s in matmul.splits):
            late.append((dot, matmul))  # the others may move for it what it reads
        else:
            _assign(body_rings, _views(chains, dot, matmul, beyond(dot)), early)
    for dot, matmul in late:
        _assign(body_rings, _views(chains, dot, matmul, beyond(dot)), early)
    _add_up(body_rings, body)
    return body_rings


def _gathered_twice(body: Body, read: Read, beyond: Beyond) -> frozenset[Value]:
    """Return the gathered values that several matmuls of a body wait for."""
    chains, times = Reshards(body), Counter[Value]()
    for dot in body.dots:
        if isinstance(matmul := read(dot), Reason):
            continue
        member, matmul = _views(chains, dot, matmul, beyond(dot))[0]
        for axis, collective in _gathers(matmul):
            times[_moved(member, matmul, axis, collective)[1]] += 1
    return frozenset(value for value, n in times.items() if n > 1)


def _views(
    chains: Reshards, dot: Dot, matmul: ShardedMatmul, beyond: tuple[Specs, Specs, Specs]
) -> list[_View]:
    """List the views of a matmul: with all reshards around it, with its result's, as written."""
    lhs, rhs = dot.eqn.invars
    result, end = End(dot.eqn.outvars[0]), chains.end(dot.eqn.outvars[0])
    plain = Member(dot, Value(lhs, matmul.lhs), Value(rhs, matmul.rhs), None, (), result)
    views: list[_View] = [(plain, matmul)]
    if (spec := _resharded(end.var, end.reshards, beyond[2], end.dims)) not in (None, matmul.out):
        ended = dataclasses.replace(plain, end=end)
        views.append((ended, dataclasses.replace(matmul, out=spec)))
    member, seen = views[-1]
    operands: list[tuple[Side, Any]] = [("lhs", lhs), ("rhs", rhs)]
    for (side, var), specs in zip(operands, beyond[:2], strict=True):
        origin, reshards = chains.origin(var)
        spec = _resharded(origin, reshards, specs)
        if spec not in (None, matmul.spec(side)):
            member, seen = _reading(member, seen, side, Value(origin, spec))
    if seen is not views[-1][1]:
        views.append((member, seen))
    return views[::-1]


def _resharded(var: Any, reshards: int, specs: Specs, dims: Sequence[int] = ()) -> Spec | None:
    """Return the sharding of a value some reshards away: by its type, or as Shardy has it.

    Args:
        var: its variable.
        reshards: how many reshards away.
        specs: what Shardy says, reshard by reshard.
        dims: which of the matmul's dims each of its own is; () for all in order.
    """
    if reshards and (stated := compat.stated_spec(var)) is not None:
        return tuple(stated[dims.index(d)] for d in range(len(dims))) if dims else stated
    return specs[reshards - 1] if 0 < reshards <= len(specs) else None


def _assign(body_rings: BodyRings, views: Sequence[_View], early: Collection[Any]) -> None:
    """Give a matmul its ring, a new one or one that is there; or note why it has none."""
    reasons = []
    for member, matmul in views:
        if _clashes(body_rings, member):
            continue
        reason = _assign_view(body_rings, *_gathered_early(member, matmul, early))
        if reason is None:
            return
        reasons.append(reason)
    waits = [reason for reason in reasons if reason != NO_COLLECTIVE]
    body_rings.skipped[views[0][0].dot.index] = waits[0] if waits else NO_COLLECTIVE


def _clashes(body_rings: BodyRings, member: Member) -> bool:
    """Return whether a matmul would read a variable that a ring absorbs, or absorb a read one.

    A constraint between two matmuls may be looked through from either side, and not from both.
    """
    reads = {v.var for v in (member.lhs, member.rhs) if not compat.is_literal(v.var)}
    return not (
        body_rings.absorbed.isdisjoint(reads) and body_rings.read.isdisjoint(member.end.inside)
    )


def _gathered_early(member: Member, matmul: ShardedMatmul, early: Collection[Any]) -> _View:
    """Hoist the gather of a value that is known one scan step ahead, if the matmul awaits no more.

    Where it waits for something else too, that is the ring, and this gather comes before it.
    """
    needed = _collectives(matmul)
    if len(needed) != 1:
        return member, matmul
    axis, collective = needed[0]
    if (
        collective is None
        or collective.kind != "all_gather"
        or member.value(collective.side).var not in early
    ):
        return member, matmul
    return (
        _hoisted(member, matmul, axis, collective)
        if hoistable(matmul, axis, collective)
        else (member, matmul)
    )


def _read_gathered(
    body_rings: BodyRings,
    views: Sequence[_View],
    early: Collection[Any],
    shared: Collection[Value],
) -> None:
    """Let a matmul read values that are gathered before it; what else moves stays XLA's.

    Args:
        body_rings: those of the body, without any ring.
        views: the matmul.
        early: variables that are known one scan step ahead.
        shared: gathered values that other matmuls read too.
    """
    for member, matmul in views:
        if _clashes(body_rings, member):
            continue
        while (gather := _next_gather(member, matmul, early, shared)) is not None:
            member, matmul = _hoisted(member, matmul, *gather)
        if member.hoists:
            member = dataclasses.replace(member, end=End(member.dot.eqn.outvars[0]))
            _add(body_rings, member)
            body_rings.readers.append(member)
            return
    dot, matmul = views[-1][0].dot, views[-1][1]
    body_rings.skipped[dot.index] = NO_RINGS if _collectives(matmul) else NO_COLLECTIVE


def _next_gather(
    member: Member, matmul: ShardedMatmul, early: Collection[Any], shared: Collection[Value]
) -> tuple[str, ImpliedCollective] | None:
    """Return the next gather of a value that is known a scan step ahead, or shared; its axis."""
    for axis, collective in _gathers(matmul):
        side, after = _moved(member, matmul, axis, collective)
        if member.value(side).var in early or after in shared:
            return axis, collective
    return None


def _gathers(matmul: ShardedMatmul) -> Iterator[tuple[str, ImpliedCollective]]:
    """Yield the gathers of operands that may come before a matmul, each with its axis."""
    for axis, collective in _collectives(matmul):
        if collective is None or collective.kind != "all_gather":
            continue
        if hoistable(matmul, axis, collective):
            yield axis, collective


def _assign_view(body_rings: BodyRings, member: Member, matmul: ShardedMatmul) -> Reason | None:
    """Give a matmul its ring, seen in one way; or say why it has none."""
    original = member
    while True:
        needed = _collectives(matmul)
        if not needed:
            if member.lhs == original.lhs and member.rhs == original.rhs and not member.hoists:
                return NO_COLLECTIVE
            # A reader stays the matmul that it is, so its result is resharded after it.
            member = dataclasses.replace(member, end=End(member.dot.eqn.outvars[0]))
            _add(body_rings, member)
            body_rings.readers.append(member)
            return None
        axes = dict.fromkeys(axis for axis, _ in needed)
        candidates = [_candidate(body_rings, member, matmul, axis) for axis in axes]
        good = [c for c in candidates if isinstance(c, Member)]
        for candidate in good:
            if _join(body_rings, candidate):
                return None
        known = _keep_known(body_rings, member, matmul, needed)
        if known is None:
            break
        member, matmul = _reading(member, matmul, *known)
    if good:
        best = min(good, key=lambda c: _preference(body_rings, c))
        _add(body_rings, best)
        body_rings.add(Ring([best]))
        return None
    refusals = [s.reason for s in matmul.splits if isinstance(s, Refusal)]
    reasons = refusals or [c for c in candidates if isinstance(c, str)]
    return Reason("no ring", "; ".join(dict.fromkeys(reasons)))


def _add(body_rings: BodyRings, member: Member) -> None:
    """Note the hoists before a matmul, what it reads, and the equations that it replaces."""
    body_rings.hoisted |= {h.after: h for h in member.hoists if h.after not in body_rings.hoisted}
    body_rings.absorbed.update(member.end.inside)
    body_rings.read.update(v.var for v in (member.lhs, member.rhs) if not compat.is_literal(v.var))
    merged = body_rings.order.merge(member.dot.position, *member.end.positions)
    assert merged, "nobody stands between a result and what only reshards it"


def _collectives(matmul: ShardedMatmul) -> list[tuple[str, ImpliedCollective | None]]:
    """List the collectives of each mesh axis; None is one that no pass knows."""
    collectives: list[tuple[str, ImpliedCollective | None]] = []
    for split in matmul.splits:
        if isinstance(split, Refusal):
            collectives += [(split.axis, collective) for collective in split.first or (None,)]
        elif split.collective is not None:
            collectives.append((split.axis, split.collective))
    return collectives


def _candidate(
    body_rings: BodyRings, member: Member, matmul: ShardedMatmul, axis: str
) -> Member | str:
    """Lay a matmul out with its ring on one axis, and hoist all other collectives that allow it."""
    while True:
        splits = matmul.splits
        refused = [s for s in splits if isinstance(s, Refusal)]
        shared = [s for s in splits if isinstance(s, Split)]
        ring = next((s for s in shared if s.axis == axis and s.collective), None)
        before = [(s.axis, m) for s in refused for m in s.first]
        before += [(s.axis, s.collective) for s in shared if s.collective and s is not ring]
        possible = [(a, m) for a, m in before if hoistable(matmul, a, m)]
        if not possible:
            break
        # Each gather makes the next one's value larger, so the slowest link comes first.
        slowest = max(possible, key=lambda move: body_rings.cost(move[0]))
        member, matmul = _hoisted(member, matmul, *slowest)
    if refused:
        return "; ".join(s.reason for s in refused)
    if ring is None:
        return f"collectives on other axes leave nothing to move along {axis}"
    layout = lay_out(matmul, shared, ring)
    return layout if isinstance(layout, str) else dataclasses.replace(member, layout=layout)


def _is_gather(split: Split) -> bool:
    return split.collective is not None and split.collective.kind == "all_gather"


def _hoisted(
    member: Member, matmul: ShardedMatmul, axis: str, collective: ImpliedCollective
) -> tuple[Member, ShardedMatmul]:
    """Hoist an operand's collective: the matmul then reads the moved value."""
    side, after = _moved(member, matmul, axis, collective)
    hoist = Hoist(collective.kind, member.value(side), after, axis, collective.bytes_moved)
    member = dataclasses.replace(member, hoists=(*member.hoists, hoist))
    return _reading(member, matmul, side, after)


def _moved(
    member: Member, matmul: ShardedMatmul, axis: str, collective: ImpliedCollective
) -> tuple[Side, Value]:
    """Return the operand that a collective moves, and the moved value with its sharding."""
    letters = matmul.einsum.side(collective.side)
    to = letters.index(collective.to) if collective.to else None
    return collective.side, member.value(collective.side).moved(
        axis, letters.index(collective.letter), to
    )


def _reading(
    member: Member, matmul: ShardedMatmul, side: Side, value: Value
) -> tuple[Member, ShardedMatmul]:
    """Give the matmul another operand."""
    return (
        dataclasses.replace(member, **{side: value}),
        dataclasses.replace(matmul, **{side: value.spec}),
    )


def _keep_known(
    body_rings: BodyRings,
    member: Member,
    matmul: ShardedMatmul,
    needed: Sequence[tuple[str, ImpliedCollective | None]],
) -> tuple[Side, Value] | None:
    """Take an operand that others have moved already, instead of moving it again.

    A ring that has moved it keeps it from now on, and comes before the matmul.

    Returns:
        The side of the operand, and its sharding; None, and nothing changed, if none was moved.
    """
    for axis, collective in needed:
        if collective is None or collective.side == "out":
            continue
        side, after = _moved(member, matmul, axis, collective)
        if after in body_rings.hoisted:
            return side, after
        for ring in body_rings.arriving(after):
            if ring.can_keep() and body_rings.order.put_after(ring.position, member.dot.position):
                ring.keep = True
                return side, after
    return None


def _ring_of(body_rings: BodyRings, member: Member) -> Ring | None:
    """Return the ring that gathers what a matmul would gather."""
    mine = Ring([member])
    if not mine.arrives:
        return None
    return next((r for r in body_rings.arriving(mine.gathered) if r.shard == mine.shard), None)


def _join(body_rings: BodyRings, member: Member) -> bool:
    """Let a matmul join the ring that gathers its operand, if no member depends on another."""
    ring = _ring_of(body_rings, member)
    if ring is None or not same_sharding([*ring.members, member]):
        return False
    # `EquationOrder.merge` lets what is merged need each other: a matmul and its constraint do.
    results = {v for m in ring.members for v in (m.dot.eqn.outvars[0], m.end.var)}
    read = [*member.dot.eqn.invars, member.lhs.var, member.rhs.var]
    if any(v in results for v in read if not compat.is_literal(v)):
        return False
    if not body_rings.order.merge(ring.position, member.dot.position):
        return False
    ring.members.append(member)
    _add(body_rings, member)
    return True


def same_sharding(members: Sequence[Member]) -> bool:
    """Return whether all members would have the same sharding of the value that they share."""
    return len({_shared(m.layout) for m in members if m.layout}) == 1


def _shared(layout: Layout) -> tuple[Any, ...]:
    """List the properties that must be alike in the value that a ring's members share."""
    ring = layout.ring.collective
    assert ring is not None
    letters = layout.matmul.einsum.side(ring.side)
    moving = [letters.find(c) for c in (layout.letter, ring.letter, ring.to) if c]
    others = tuple(
        (s.axis, s.collective.kind, layout.matmul.einsum.side(ring.side).find(s.collective.letter))
        for s in layout.others
        if s.collective and s.collective.side == ring.side
    )
    return layout.ring.axis, ring.kind, tuple(moving), layout.spec(ring.side), others


def _preference(body_rings: BodyRings, member: Member) -> tuple[float, int, int]:
    """Rank by least cost in all, then by fewest gathers in the ring, then by most ring bytes."""
    layout = member.layout
    assert layout is not None
    sent = traffic(layout)
    new = [h for h in member.hoists if h.after not in body_rings.hoisted]
    cost = sum(sent[axis] * body_rings.cost(axis) for axis in sent)
    cost += sum(h.bytes_moved * body_rings.cost(h.axis) for h in new)
    inside = sum(map(_is_gather, layout.others))
    return cost, inside, -sent[layout.ring.axis]


def _add_up(body_rings: BodyRings, body: Body) -> None:
    """Let rings whose results are added up, and read by nobody else, send one sum."""
    sums = [ring for ring in body_rings.rings if not ring.arrives and not ring.members[0].end.views]
    made = {ring.members[0].end.var: ring for ring in sums}
    added: set[int] = set()  # rings that are a part of another now
    for position, (lhs, rhs), total in _additions(body):
        one, other = made.get(lhs), made.get(rhs)
        if one is None or other is None or one is other:
            continue
        members = sorted([*one.members, *other.members], key=lambda m: m.dot.index)
        if same_sharding(members) and body_rings.order.merge(
            one.position, other.position, position
        ):
            added.add(id(other))
            one.members, one.total = members, total
            made[total] = one
    body_rings.rings = [ring for ring in body_rings.rings if id(ring) not in added]


def _additions(body: Body) -> Iterator[tuple[int, list[Any], Any]]:
    """Yield the index of each addition of two values read only there, the values, and the sum."""
    for position, eqn in enumerate(body.eqns):
        if eqn.primitive.name in ("add", "add_any"):
            once = [v for v in compat.variables(eqn.invars) if len(body.uses.readers(v)) == 1]
            if len(once) == 2:
                yield position, once, eqn.outvars[0]


def sum_of(body: Body, values: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the sum of all values, and the indices of its additions; None if there is none."""
    missing, positions = set(values), list[int]()
    for position, read, total in _additions(body):
        if missing.issuperset(read):
            missing = missing.difference(read) | {total}
            positions.append(position)
    return (missing.pop() if len(missing) == 1 else None), positions
