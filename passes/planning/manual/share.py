"""Choose rings for the collectives that a user wrote next to matmuls in a shard_map body.

    x = all_gather[axis_name=model all_gather_dimension=0 tiled=True] x ;  q = dot_general x wq
    p = dot_general h w ;  y = reduce_scatter[axis_name=model scatter_dimension=0 tiled=True] p

->  q = <all_gather_matmul> x wq ;  y = <matmul_reduce_scatter> h w

Here the collective is an equation, so nothing has to be worked out. The matmuls that read a
gathered or exchanged value share one ring, which also returns the full value if others read it;
partial sums that are added up before they are scattered travel as one sum. Equations between the
two that only transpose, convert or retype (transpose, convert_element_type, pvary) run chunk by
chunk.

A matmul stays as it is where a ring would not be the same: for groups of devices, several axes at
once, gathers that are not tiled; in branches and loops that devices may run differently, as a hop
needs all of them. So it does where XLA would move an operand or the result along an automatic axis
of its own accord: in a ring it would do so once a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.manual.candidates import BodyCollectives, possible_rings
from jaxoverlap.passes.planning.manual.reasons import crossed, refusal_of, spread, why_not
from jaxoverlap.passes.planning.ring_plan import BodyRings, Ring
from jaxoverlap.passes.planning.terms import Requests
from jaxoverlap.plan.decisions import Reason


def share_written(
    body: Body,
    shardings: Mapping[int, Shardings],
    requests: Requests,
    rejected: Mapping[int, Reason],
) -> BodyRings:
    """Choose the matmuls of a manual body that have rings; the largest collectives choose first.

    Args:
        body: the body.
        shardings: its matmuls' shardings on the automatic axes.
        requests: the user's requests.
        rejected: the number of each matmul whose ring was rejected, with the reason.
    """
    body_rings, found = started(body)
    whys = {dot.index: why for dot in body.dots if (why := refusal_of(dot, requests))}
    whys |= {dot.index: rejected[dot.index] for dot in body.dots if dot.index in rejected}
    taken: set[int] = set()
    # An exchange between two matmuls goes with the first: the second may have one of its own after.
    possible = sorted(possible_rings(found), key=lambda ring: (-_bytes(ring), ring.arrives))
    for ring in possible:
        assert ring.written is not None
        held = spread(ring.members[0], shardings)
        ring.written = dataclasses.replace(ring.written, spread=held)
        for member in ring.members:
            if why := crossed(member, shardings):
                whys.setdefault(member.dot.index, why)
        if placed := add_written_ring(body_rings, ring, taken | whys.keys()):
            taken |= {member.dot.index for member in placed.members}
    for ring in filter(lambda ring: ring.arrives, body_rings.rings):
        keep(found, ring)
        assert ring.written is not None
        reading, _ = found.matmuls_reading(ring.written.position)
        late = {one.dot.index: one.dot for one in reading}
        body_rings.late += [(late[site], ring) for site in late if site not in taken | whys.keys()]
    _list_left(body_rings, found, possible, taken)
    late = {dot.index for dot, _ in body_rings.late}
    for dot in body.dots:
        if dot.index not in taken | late:
            body_rings.skipped[dot.index] = whys.get(dot.index) or why_not(
                found, dot, body_rings.rings
            )
    return body_rings


def started(body: Body) -> tuple[BodyRings, BodyCollectives]:
    """Return a manual body without rings, and the collectives next to its matmuls."""
    manual = body.dots[0].manual
    assert manual is not None
    return BodyRings(EquationOrder(body.eqns), manual=manual), BodyCollectives(body, manual)


def _bytes(ring: Ring) -> int:
    assert ring.written is not None
    return ring.written.bytes_moved


def add_written_ring(body_rings: BodyRings, ring: Ring, taken: Collection[int]) -> Ring | None:
    """Add a ring of a collective and its free matmuls, and return it; None if that is impossible.

    Args:
        body_rings: the rings of the body so far.
        ring: the ring, with all matmuls next to its collective.
        taken: the numbers of matmuls that are not free.
    """
    assert ring.written is not None
    position, order = ring.written.position, body_rings.order
    if any(other.written and other.written.position == position for other in body_rings.rings):
        return None
    free = [member for member in ring.members if member.dot.index not in taken]
    if not free or (free != ring.members and not ring.arrives):
        return None
    group = [position, *ring.between]
    if ring.arrives:  # matmuls that must come later read the full value, which is kept
        made = [member for member in free if order.merge(*group, member.dot.position)]
    else:
        made = free if order.merge(*group, *(m.dot.position for m in free)) else []
    if not made:
        return None
    body_rings.add(dataclasses.replace(ring, members=made))
    return body_rings.rings[-1]


def keep(found: BodyCollectives, ring: Ring) -> None:
    """Note whether others read the value that a ring gathers, and which views of it they read."""
    assert ring.written is not None
    positions = {member.dot.position for member in ring.members}
    unread = found.unread(ring.between, positions)
    ring.again = tuple(sorted(ring.between - unread))
    ring.keep = found.read_beyond(ring.written.position, positions | unread)


def _list_left(
    body_rings: BodyRings, found: BodyCollectives, possible: Sequence[Ring], taken: Collection[int]
) -> None:
    """List each collective without a ring with the first matmul next to it that has one."""
    done = {ring.written.position for ring in body_rings.rings if ring.written}
    near: dict[int, tuple[str, Iterable[int]]] = {}
    for ring in possible:
        assert ring.written is not None
        near[ring.written.position] = str(ring.written), [m.dot.index for m in ring.members]
    for position, collective in found.collectives.items():
        if isinstance(collective, Reason) and collective.code != "no collective":
            summed = found.matmuls_summed_into(position)
            met = [*found.matmuls_reading(position)[0], *(summed[0] if summed else [])]
            near[position] = str(collective), [one.dot.index for one in met]
    for position, (text, sites) in near.items():
        first = next((site for site in sites if site in taken), None)
        if first is not None and position not in done:
            body_rings.left.setdefault(first, []).append(text)
