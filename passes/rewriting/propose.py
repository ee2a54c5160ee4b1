"""Propose rings: by what is exposed, by all of each collective, every one, and fewer.

Rules decide matmul by matmul (`planning/decide.py`) and cannot know what else the step does at that
time; so several sets of rings are proposed, and the search estimates each.

Words: a *ring* is a collective with its matmuls in chunks. *Ahead* is one iteration of a scan
earlier. `Terms` are what the rules decide by; they are *priced* if they have a cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxoverlap.flags import is_gpu
from jaxoverlap.passes.analysis.jaxprs import bodies, dots, has_nested_loops
from jaxoverlap.passes.analysis.matmul_collectives import collectives_of_sites, repeated_gathers
from jaxoverlap.passes.analysis.mesh import is_cpu
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.passes.estimation.estimate import Estimate
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.ring_edits import edits_of
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting import embedding_gradients, rewrite
from jaxoverlap.passes.rewriting.embedding_gradients import lookups
from jaxoverlap.passes.rewriting.scatter_sums import (
    Decided,
    explained,
    exposure,
    partitioned_scattered,
    points,
)
from jaxoverlap.plan.edits import (
    Edit,
    EditedMatmul,
    GatherAhead,
    MakeRing,
    ReadGathered,
    ScatterLookup,
    SplitBatch,
)
from jaxoverlap.plan.speedup import milliseconds

_MIXED_UP = "XLA:CPU mixes up the rings of parts in loops within loops (docs/upstream.md)"


def propose_rings(step: Evaluated) -> Iterator[Proposal]:
    """Propose rings by exposed time, by full collective cost, every ring, and so on.

    A ring may hide more than its own collective, so its own exposed time underrates what it saves.
    So rings that lose alone are tried together too. Then come rings without one axis each, lookups
    alone, and the sums scattered. Weights that are gathered ahead, and no ring, come second, up to
    three proposals.
    """
    assert step.estimate is not None
    terms = _safe(step)
    priced = _knowing(terms, step.program, step.estimate)
    first = decided(step, priced)
    every = decided(step, replace(terms, prices=None))
    yield _proposal(first, terms)
    yield from propose_ahead(step)
    yield _proposal(decided(step, terms), terms)
    yield _proposal(every, terms, why_not=_too_slow(step, every))
    for rejected in _axis_by_axis(first):
        yield _proposal(decided(step, _without(priced, rejected)), terms)
    if priced.explicit:
        return
    if any(isinstance(edit, ScatterLookup) for edit in first.edits):
        alone = dict.fromkeys((entry.site for entry in first.entries), "the step is faster without")
        yield _proposal(decided(step, _without(terms, alone)), terms)
    if where := points(every.rings_by_body.values()):
        program = _scattered(step, where)
        known = _knowing(terms, program, step.estimated(program))
        found = replace(decided(step, known, program.shardings), sums=where)
        yield _proposal(found, terms)


def propose_ahead(step: Evaluated) -> Iterator[Proposal]:
    """Propose to gather the weights of scans ahead, and no ring: the first ones, or a layer's.

    If the batch is split the gathers of a layer hide as well singly: with all ahead, three steps of
    the suite took 1 to 4% longer by simulation.
    """
    terms = replace(step.terms, rings=False)
    first = decided(step, terms)
    yield _proposal(first, terms)
    if repeated_gathers(step.program.module):
        yield _proposal(decided(step, replace(terms, once=True)), terms)
    reads = any(isinstance(edit, ReadGathered) for edit in first.edits)
    if reads and is_gpu(step.step.mesh) and not step.step.has(SplitBatch):
        yield _proposal(first, terms, layers_ahead=True)


def propose_by_bytes(layers_ahead: bool, step: Evaluated) -> Iterator[Proposal]:
    """Propose what rules and requests say, with sums scattered where that costs fewer bytes."""
    terms = _safe(step)
    first = decided(step, terms)
    where = {} if terms.explicit else points(first.rings_by_body.values())
    if where:
        program = _scattered(step, where)
        found = replace(decided(step, terms, program.shardings), sums=where)
        scattered = explained(found, first)
        if scattered is not None and _exposure(step, scattered) < _exposure(step, first):
            first = scattered
    yield _proposal(first, terms, layers_ahead=layers_ahead)


def decided(
    step: Evaluated, terms: Terms, shardings: Mapping[Any, Shardings] | None = None
) -> Decided:
    """Decide on every matmul of a step.

    Args:
        step: the step.
        terms: to decide by.
        shardings: of its matmuls, if they are others than the step's own.
    """
    lies, every = step.shardings if shardings is None else shardings, bodies(step.step.jaxpr)
    entries, rings_by_body = decide(every, lies, terms)
    known = [] if terms.explicit else lookups(every, lies, step.step.mesh, terms.costs)
    edits: list[Edit] = [lookup.edit for lookup in known]
    for body_rings in rings_by_body.values():
        edits += edits_of(body_rings)
    automatic = {n: rings for n, rings in rings_by_body.items() if rings.manual is None}
    return Decided(entries, automatic, tuple(edits))


def _too_slow(step: Evaluated, found: Decided) -> str:
    """Say why rings cannot make a step faster, before it is partitioned; empty if they may.

    Hops run one after the other on their link; of rings that send both ways half of the time
    counts. Rings over many devices have thousands of hops, which take XLA minutes to partition.
    """
    prices = step.terms.prices
    assert prices is not None and step.estimate is not None
    hops_s = {"hops": 0.0, "hops between hosts": 0.0}
    for ring in (ring for body in found.rings_by_body.values() for ring in body.rings):
        if ring.variant.style not in ("plain", "sliced"):
            link = "hops between hosts" if prices.groups[ring.axis].domains > 1 else "hops"
            one_way = ring.variant.style == "one_way"
            runs = ring.members[0].dot.runs * (1.0 if one_way else 0.5)
            hops_s[link] += prices.hops_s(ring, ring.variant) * runs
    link = max(hops_s, key=lambda link: hops_s[link])
    if hops_s[link] <= step.estimate.step_s:
        return ""
    alone, without = milliseconds(hops_s[link]), milliseconds(step.estimate.step_s)
    return f"its {link} alone take {alone}, the step without them {without}"


def _proposal(
    found: Decided, terms: Terms, *, layers_ahead: bool = False, why_not: str = ""
) -> Proposal:
    """Propose decisions; what is gathered before rings and matmuls of scans is gathered ahead."""
    edits, notes = found.edits, {MakeRing: found}
    if why_not:
        return Proposal(notes=notes, why_not=why_not)
    if terms.prefetch and any(matmul.moves for edit in edits for matmul in _matmuls(edit)):
        edits = (*edits, GatherAhead(whole_layers=layers_ahead))
    return Proposal(edits, notes=notes)


def _matmuls(edit: Edit) -> tuple[EditedMatmul, ...]:
    if isinstance(edit, MakeRing):
        return edit.matmuls
    return (edit.matmul,) if isinstance(edit, ReadGathered) else ()


def _safe(step: Evaluated) -> Terms:
    """Return terms without rings where XLA:CPU would deliver a permute of one part to another.

    It starts a loop, and then what sends beside it, before or after the loop's own collectives: on
    each device as it comes (docs/upstream.md). Rings share one channel, and so get wrong values.
    """
    edited = step.step
    if edited.has(SplitBatch) and is_cpu(edited.mesh) and has_nested_loops(edited.jaxpr):
        sites = (dot.index for dot in dots(edited.jaxpr))
        return _without(step.terms, dict.fromkeys(sites, _MIXED_UP))
    return step.terms


def _without(terms: Terms, rejected: Mapping[int, str]) -> Terms:
    return replace(terms, requests=replace(terms.requests, rejected=rejected))


def _knowing(terms: Terms, program: SpmdProgram, estimate: Estimate) -> Terms:
    """Return terms with the exposed time of the collectives that a program waits for."""
    assert terms.prices is not None
    positions_of = collectives_of_sites(program.module)

    def exposed_s(ring: Ring) -> float | None:
        positions = {at for m in ring.members for at in positions_of.get(m.dot.index, ())}
        if not positions:
            return None
        waited_s = sum(estimate.waited_s.get(position, 0.0) for position in positions)
        return waited_s / ring.members[0].dot.runs

    return replace(terms, prices=replace(terms.prices, exposed=exposed_s))


def _axis_by_axis(first: Decided) -> Iterator[dict[int, str]]:
    """Yield for each axis the matmuls whose rings run along it, if there are several axes."""
    rings = [ring for body_rings in first.rings_by_body.values() for ring in body_rings.rings]
    axes = dict.fromkeys(ring.axis for ring in rings)
    for axis in axes if len(axes) > 1 else ():
        yield {
            m.dot.index: f"the step is faster without rings on {axis}"
            for ring in rings
            if ring.axis == axis
            for m in ring.members
        }


def _scattered(step: Evaluated, where: Mapping[int, Any]) -> SpmdProgram:
    """Partition a step with some of its sums scattered."""
    return partitioned_scattered(
        step.partition, step.step.jaxpr, where, step.shardings, step.step.mesh
    )


def _exposure(step: Evaluated, found: Decided) -> float:
    """Return the cost of the step's collectives by bytes, exposed ones twice."""
    scattered = [edit for edit in found.edits if isinstance(edit, ScatterLookup)]
    rings = [edit for edit in found.edits if isinstance(edit, MakeRing | ReadGathered)]
    edited = step.step
    if scattered:
        edited = embedding_gradients.run(edited, scattered)
    if rings:
        edited = rewrite.run(edited, rings)
    module = step.partition(edited.jaxpr).module
    left = partitioner_collectives(module, dict(edited.mesh.shape))
    others = (*left, *edited.facts.get(ScatterLookup, ()))
    return exposure(found.rings_by_body.values(), others, step.terms.costs)
