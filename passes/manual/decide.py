"""Choose rings for the collectives that a user wrote next to matmuls in a shard_map body.

    x = all_gather[axis_name=model all_gather_dimension=0 tiled=True] x ;  q = dot_general x wq
    p = dot_general h w ;  y = reduce_scatter[axis_name=model scatter_dimension=0 tiled=True] p

->  q = <all_gather_matmul> x wq ;  y = <matmul_reduce_scatter> h w

Here the collective is an equation, so nothing has to be worked out. The matmuls that read a
gathered or exchanged value share one ring, which also returns the full value if others read it;
partial sums that are added up before they are scattered travel as one sum. Equations between the
two that only transpose, convert or retype (transpose, convert_element_type, pvary) run chunk by
chunk. The axis is manual already, so the ring is in the body itself (`rewrite.py`).

A matmul stays as it is where a ring would not be the same: for groups of devices, several axes at
once, gathers that are not tiled; in branches and loops that devices may run differently, as a hop
needs all of them. So it does where XLA would move an operand or the result along an automatic axis
of its own accord: in a ring it would do so once a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.equation_order import EquationOrder
from jaxoverlap.passes.analysis.jaxprs import Body, Manual
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.edited import misfit
from jaxoverlap.passes.manual.find import ManualRing, ManualSite, Sites, possible_rings
from jaxoverlap.passes.manual.reasons import crossed, refusal_of, spread, why_not
from jaxoverlap.passes.planning.decide import variant_of
from jaxoverlap.passes.planning.entries import names_of, reader_entry, ring_entry, skip_of
from jaxoverlap.passes.planning.ring_edits import check_variant
from jaxoverlap.passes.planning.terms import Requests
from jaxoverlap.plan.decisions import Decision, Reason, Skip, Variant
from jaxoverlap.plan.edits import EditedMatmul, MakeRing


@dataclass
class ManualSharing:
    """The rings of one manual body, and the reasons why its other matmuls have none.

    Attributes:
        manual: the shard_maps around it.
        order: the order in which the body's equations then stand.
        rings: the rings.
        late: matmuls that read what a ring gathered, by their numbers.
        left: collectives next to a matmul that stay as they are, by the matmul's id.
        skipped: why each other matmul is not rewritten, by its id.
    """

    manual: Manual
    order: EquationOrder
    rings: list[ManualRing] = field(default_factory=list)
    late: dict[int, ManualRing] = field(default_factory=dict)
    left: dict[int, list[str]] = field(default_factory=dict)
    skipped: dict[int, Reason] = field(default_factory=dict)


def decide_manual(
    bodies: Sequence[Body], shardings: Mapping[int, Shardings], requests: Requests
) -> tuple[dict[int, Decision | Skip], dict[int, ManualSharing]]:
    """Decide on every matmul in the manual bodies of a step.

    Args:
        bodies: the step's bodies, from `jaxprs.bodies`.
        shardings: from `partitioned`: its matmuls' shardings on the automatic axes.
        requests: for single matmuls.

    Returns:
        An entry for each matmul, and the rings of each manual body with matmuls, by number.
    """
    entries: dict[int, Decision | Skip] = {}
    sharings: dict[int, ManualSharing] = {}
    for body in bodies:
        dots = {dot.index: dot for dot in body.dots if dot.manual}
        if not dots:
            continue
        sharing = sharings[body.index] = _chosen(body, shardings, requests)
        entries |= manual_decisions(sharing)
        entries |= {
            i: reader_entry(
                dots[i], ring=ring.site, axis=ring.axis, kind=ring.kind, moved=f"ring {ring.site}"
            )
            for i, ring in sharing.late.items()
        }
        entries |= {i: skip_of(dots[i], why) for i, why in sharing.skipped.items()}
    return entries, sharings


def _chosen(body: Body, shardings: Mapping[int, Shardings], requests: Requests) -> ManualSharing:
    """Choose the rings of a manual body, and how the pieces of each ring travel."""
    left = requests.left_plain
    while True:
        sharing = _share(body, shardings, requests, left)
        before = len(left)
        for ring in sharing.rings:
            wanted = requests.variant(names_of(ring.sites[0].dot)) or Variant()
            ring.variant, ring.why = variant_of(ring.collective.kind, ring.chunk, wanted)
            if wanted.style == "plain":
                left |= {site.dot.index: Reason("not ringed", "as chosen") for site in ring.sites}
        if len(left) == before:
            return sharing


def _share(
    body: Body, shardings: Mapping[int, Shardings], requests: Requests, left: Mapping[int, Reason]
) -> ManualSharing:
    """Choose the matmuls of a manual body that have rings; the largest collectives choose first.

    Args:
        body, shardings, requests: the body, its matmuls' shardings, and the user's requests.
        left: the number of each matmul whose ring was rejected, with the reason.
    """
    manual = body.dots[0].manual
    assert manual is not None
    sites, order = Sites(body, manual.axes), EquationOrder([_edges(eqn) for eqn in body.eqns])
    sharing = ManualSharing(manual, order)
    whys = {dot.index: why for dot in body.dots if (why := refusal_of(dot, requests))}
    whys |= {dot.index: left[dot.index] for dot in body.dots if dot.index in left}
    taken: set[int] = set()
    # An exchange between two matmuls goes with the first: the second may have one of its own after.
    possible = sorted(
        possible_rings(sites), key=lambda ring: (-ring.collective.bytes_moved, ring.arrives)
    )
    for ring in possible:
        held = spread(ring.sites[0], shardings)
        ring.collective = dataclasses.replace(ring.collective, spread=held)
        for site in ring.sites:
            if why := crossed(ring, site, shardings):
                whys.setdefault(site.dot.index, why)
        if _place(sharing, ring, taken | whys.keys()):
            taken |= {site.dot.index for site in sharing.rings[-1].sites}
    for ring in filter(lambda ring: ring.arrives, sharing.rings):
        _keep(sites, ring)
        late = (
            {s.dot.index for s in sites.reading(ring.collective.position)[0]} - taken - whys.keys()
        )
        sharing.late |= dict.fromkeys(late, ring)
    _leave(sharing, sites, possible, taken)
    for dot in body.dots:
        if dot.index not in taken | sharing.late.keys():
            sharing.skipped[dot.index] = whys.get(dot.index) or why_not(sites, dot, sharing.rings)
    return sharing


def _place(sharing: ManualSharing, ring: ManualRing, taken: Collection[int]) -> bool:
    """Make a ring of a collective and its free matmuls, and return whether that was possible."""
    if any(ring.collective.position == other.collective.position for other in sharing.rings):
        return False
    free = [site for site in ring.sites if site.dot.index not in taken]
    if not free or (free != ring.sites and not ring.arrives):
        return False
    group = [ring.collective.position, *ring.between]
    if ring.arrives:  # matmuls that must come later read the whole value, which is kept
        made = [site for site in free if sharing.order.merge(*group, site.dot.position)]
    else:
        made = free if sharing.order.merge(*group, *(s.dot.position for s in free)) else []
    if made:
        sharing.rings.append(dataclasses.replace(ring, sites=made))
    return bool(made)


def _leave(
    sharing: ManualSharing, sites: Sites, possible: Sequence[ManualRing], taken: Collection[int]
) -> None:
    """List each collective without a ring with the first matmul next to it that has one."""
    done = {ring.collective.position for ring in sharing.rings}
    beside = {ring.collective.position: (str(ring.collective), ring.sites) for ring in possible}
    for position, collective in sites.collectives.items():
        if isinstance(collective, Reason) and collective.code != "no collective":
            summed = sites.summed(position)
            beside[position] = (
                str(collective),
                [*sites.reading(position)[0], *(summed[0] if summed else [])],
            )
    for position, (text, met) in beside.items():
        first = next((s.dot.index for s in met if s.dot.index in taken), None)
        if first is not None and position not in done:
            sharing.left.setdefault(first, []).append(text)


class _Edges(NamedTuple):
    """The parts of an equation that `EquationOrder` reads."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    effects: set[Any]


def _edges(eqn: Any) -> _Edges:
    """Drop the effects of mesh axes: collectives may move, as all devices run the same program."""
    return _Edges(eqn.invars, eqn.outvars, compat.ordered_effects(eqn))


def _keep(sites: Sites, ring: ManualRing) -> None:
    """Note whether others read the value that a ring gathers, and which views of it they read."""
    positions = {site.dot.position for site in ring.sites}
    unread = sites.unread(ring.between, positions)
    ring.again = tuple(sorted(ring.between - unread))
    ring.keep = sites.read_beyond(ring.collective.position, positions | unread)


# -- as edits -------------------------------------------------------------------------------------


def manual_edits(sharing: ManualSharing) -> Iterator[MakeRing]:
    """Yield the edits that make the rings of a manual body."""
    for ring in sharing.rings:
        yield MakeRing(
            kind=ring.kind,
            axis=ring.axis,
            variant=ring.variant,
            matmuls=tuple(EditedMatmul(site=site.dot.index) for site in ring.sites),
            written=ring.collective.position,
        )


def placed_manual(body: Body, edits: Iterable[MakeRing]) -> ManualSharing:
    """Find what edits name in a manual body, and the order of its equations after them.

    Raises:
        UserError: if an edit does not fit the body.
    """
    manual = body.dots[0].manual
    assert manual is not None
    sites, order = Sites(body, manual.axes), EquationOrder([_edges(eqn) for eqn in body.eqns])
    sharing, possible = ManualSharing(manual, order), list(possible_rings(sites))
    for edit in edits:
        named = {matmul.site for matmul in edit.matmuls}
        for ring in possible:
            of_it = [site for site in ring.sites if site.dot.index in named]
            if ring.collective.position == edit.written and len(of_it) == len(named):
                break
        else:
            raise misfit(edit, "no collective of the user's is there beside these matmuls")
        if (ring.kind, ring.axis) != (edit.kind, edit.axis):
            raise misfit(edit, f"the collective there is {ring.kind} over {ring.axis}")
        check_variant(edit, ring.chunk)
        ring = dataclasses.replace(ring, sites=of_it, variant=edit.variant)
        if not _place(sharing, ring, ()):
            raise misfit(edit, "one of them waits for another")
    for ring in sharing.rings:
        if ring.arrives:
            _keep(sites, ring)
    return sharing


# -- what explain() shows -------------------------------------------------------------------------


def manual_decisions(sharing: ManualSharing) -> dict[int, Decision]:
    """Return the entries of the matmuls of a manual body that are in rings, by their number."""
    return {s.dot.index: _decision(sharing, ring, s) for ring in sharing.rings for s in ring.sites}


def _decision(sharing: ManualSharing, ring: ManualRing, site: ManualSite) -> Decision:
    """Make the entry of one matmul; the first one of a ring carries its bytes."""
    return ring_entry(
        ring,
        site.dot,
        letter=site.einsum.side(site.side)[ring.dim],
        bytes_moved=ring.collective.bytes_moved,
        others=sharing.left.get(site.dot.index, ()),
    )
