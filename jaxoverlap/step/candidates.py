"""Choose the candidate for a step before anything is compiled, by its estimate where it has one.

Rules decide which matmuls get rings; they cannot know what else the step does at that time. So each
candidate is rewritten, partitioned (`passes/analysis/partitioned.py`) and estimated
(`passes/estimation/estimate.py`), and the fastest is taken; the step without any ring is one of
them. Without a cost model the rules alone decide. A candidate is dropped if its results would have
other shardings than the original step's, or if it could not donate an argument that the original
step donates.

Words: a *ring* is a collective with its matmuls in chunks; the step is *unringed* with layouts and
the batch split, and no ring. `Terms` are what the rules decide by; they are *priced* if they have a
cost model. A *late* sum is reduced behind its scan. *Ahead* is one iteration of a scan earlier.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from jaxoverlap.flags import is_gpu
from jaxoverlap.passes.analysis.jaxprs import bodies, dots
from jaxoverlap.passes.analysis.matmul_collectives import collectives_of_sites, repeated_gathers
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.halves.split_exchange import split_exchanges
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.ring_edits import edits_of
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.embedding_gradients import lookups
from jaxoverlap.passes.rewriting.late_sums import late_sums
from jaxoverlap.passes.rewriting.scatter_sums import (
    Decided,
    Point,
    explained,
    exposure,
    partitioned_scattered,
    points,
)
from jaxoverlap.plan.decisions import Reason, ScatteredSum, without_rings
from jaxoverlap.plan.edits import (
    Edit,
    GatherAhead,
    MakeRing,
    ReadGathered,
    ScatterLookup,
    ShareViews,
)
from jaxoverlap.plan.limits import (
    EXCHANGE_CHUNKS,
    FEW_CANDIDATES,
    GAIN,
    LATE_SUMS_GAIN,
    SKIP_RINGS_GAIN,
    SPLIT_EXCHANGE_GAIN,
    UNROLL,
    UNROLL_GAIN,
)
from jaxoverlap.step.candidate import StepCandidate, evaluated
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.halves import in_parts, safe_terms
from jaxoverlap.step.layouts import with_layouts
from jaxoverlap.step.memory import exceeds, fits, too_large
from jaxoverlap.step.options import Options


def overlapped(
    step: StepContext, terms: Terms, options: Options
) -> tuple[StepCandidate, SpmdProgram | None]:
    """Return the candidate with the least estimated time; without prices, that of the rules.

    Args:
        step: the step.
        terms: the terms to decide by.
        options: the user's options.

    Returns:
        The candidate, and the partitioned program of the step with its layouts alone, without batch
        split and rings; None where the step was not partitioned.

    Raises:
        RewriteError: if XLA does not partition the step, or a pass fails on it.
    """
    if terms.unread:
        start = StepCandidate(step.edited)
        return _finished(step, start, _decided(step.edited, {}, terms), terms), None
    by_price = terms.prices is not None and options.chooses

    def candidates_of(unringed: StepCandidate) -> _Candidates:
        return _Candidates(step, terms, unringed)

    def soonest_s(unringed: StepCandidate) -> float:
        whole_s, parts = candidates_of(unringed).soonest_s(), options.halves
        if parts is None:
            return whole_s
        split = in_parts(step, unringed, 2 if parts == "auto" else parts, options.unroll)
        if not split.is_split or too_large(step.plain, split.spmd):
            return whole_s
        return min(whole_s, candidates_of(split).fastest(rings=False).seconds)

    laid_out = unringed = with_layouts(step, options.layouts, options.pins, soonest_s)
    if isinstance(options.halves, int):
        unringed = in_parts(step, unringed, options.halves, options.unroll)
        terms = safe_terms(step, unringed, terms)
    if not by_price:
        candidate = candidates_of(unringed).by_bytes(layers_ahead=options.layers_ahead)
    elif options.halves != "auto":
        candidate = candidates_of(unringed).fastest()
    else:
        candidate = _in_halves(step, unringed, candidates_of)
    if (options.late_sums or by_price) and not step.explicit:  # there types say how values lie
        candidate = _with_late_sums(step, unringed, candidate, anyway=options.late_sums)
    if by_price:
        candidate = _with_split_exchanges(step, unringed, candidate)
    return candidate, laid_out.spmd


def _in_halves(
    step: StepContext,
    unringed: StepCandidate,
    candidates_of: Callable[[StepCandidate], _Candidates],
) -> StepCandidate:
    """Return the best candidate with the batch in halves, or without if that is estimated faster.

    Args:
        step, unringed: as for `in_parts`.
        candidates_of: gives the candidates of such a step.
    """
    undivided = candidates_of(unringed)
    best = undivided.fastest(most=FEW_CANDIDATES)
    split = _split(step, unringed, candidates_of)
    assert split.halves is not None
    if not split.is_split:
        return replace(undivided.fastest(), halves=split.halves)
    if split.seconds > best.seconds * (1 - SKIP_RINGS_GAIN):
        best = undivided.fastest()
    record = msgspec.structs.replace(split.halves, whole_s=best.seconds, step_s=split.seconds)
    # Estimates of steps with rings are a hundredth too short on the suite's 7B steps.
    least_gain = 0 if best.decisions else GAIN
    if split.seconds < best.seconds * (1 - least_gain):
        return replace(split, halves=record)
    why_not = f"it gains less than {GAIN:.0%}"
    if split.seconds >= best.seconds:
        why_not = "the step is faster without a split"
    return replace(best, halves=msgspec.structs.replace(record, why_not=why_not))


def _split(
    step: StepContext,
    unringed: StepCandidate,
    candidates_of: Callable[[StepCandidate], _Candidates],
) -> StepCandidate:
    """Return the step with its batch in two parts, its scans unrolled if that is estimated faster.

    `StepCandidate.halves` has the seconds of the other one too, or why the batch is not split.
    """
    split = in_parts(step, unringed, 2, 1)
    assert split.halves is not None
    if not split.is_split:
        return split
    if why_not := too_large(step.plain, split.spmd):
        return replace(split, halves=msgspec.structs.replace(split.halves, why_not=why_not))
    best, other = candidates_of(split).fastest(rings=False), None
    if any(dot.runs > 1 for dot in dots(split.jaxpr)):
        unrolled = in_parts(step, unringed, 2, UNROLL)
        if fits(unrolled.spmd, step.cost):
            other = candidates_of(unrolled).fastest(rings=False)
    if other and other.seconds < best.seconds * (1 - UNROLL_GAIN):
        best, other = other, best
    if other is None:
        return best
    assert best.halves is not None and other.halves is not None
    record = msgspec.structs.replace(
        best.halves, other_unroll=other.halves.unroll, other_unroll_s=other.step_s
    )
    return replace(best, halves=record)


def _with_late_sums(
    step: StepContext, unringed: StepCandidate, candidate: StepCandidate, *, anyway: bool
) -> StepCandidate:
    """Add up sums behind their scans, if the step is faster so by estimate, or anyway."""
    base = _before_views(step, unringed, candidate)
    if candidate.halves and candidate.is_split and not unringed.is_split:
        unringed = in_parts(step, unringed, candidate.halves.parts, 1)
    names = DimNames(base.numbered.jaxpr)
    late = list(late_sums(base, names, unringed.spmd.shardings))
    return _with(step, candidate, base, late, -math.inf if anyway else LATE_SUMS_GAIN)


def _with_split_exchanges(
    step: StepContext, unringed: StepCandidate, candidate: StepCandidate
) -> StepCandidate:
    """Send exchanges of `shard_map`s in chunks, if the step is faster so by estimate."""
    base = _before_views(step, unringed, candidate)
    for parts in EXCHANGE_CHUNKS:
        edits = list(split_exchanges(base, parts))
        candidate = _with(step, candidate, base, edits, SPLIT_EXCHANGE_GAIN)
    return candidate


def _before_views(
    step: StepContext, unringed: StepCandidate, candidate: StepCandidate
) -> EditedStep:
    """Return a candidate's step without its last edit, `ShareViews`, for edits that come before.

    Of a candidate that edits nothing, the unringed step's.
    """
    edited = unringed.edited if candidate.edited is step.edited else candidate.edited
    return edited.before if edited.before and edited.has(ShareViews) else edited


def _with(
    step: StepContext,
    candidate: StepCandidate,
    base: EditedStep,
    edits: Sequence[Edit],
    gain: float,
) -> StepCandidate:
    """Return the step with further edits if it is faster by estimate; else the candidate.

    Args:
        step, candidate: the step, and its candidate so far.
        base: what the edits are applied to.
        edits: the edits.
        gain: the share of the candidate's time that they have to gain; -inf: none.
    """
    if not edits:
        return candidate
    further = evaluated(step, replace(candidate, edited=apply(base, [*edits, ShareViews()])))
    pays = gain == -math.inf or further.seconds < candidate.seconds * (1 - gain)
    return further if pays and not further.why_not else candidate


class _Candidates:
    """The candidates that the rules propose for one step."""

    def __init__(self, step: StepContext, terms: Terms, unringed: StepCandidate):
        self._step, self._terms, self._unringed = step, terms, unringed
        self._made: list[StepCandidate] = []

    # -- by bytes -----------------------------------------------------------------------------

    def by_bytes(self, *, layers_ahead: bool = False) -> StepCandidate:
        """Return the requested or rule-based candidate; scatter its sums where that costs less."""
        candidate = self._finished(self._by_bytes(), layers_ahead=layers_ahead)
        if candidate.edited is self._step.edited:
            plain = self._step.plain
            return replace(candidate, step_s=self._step.seconds(plain), program=plain)
        candidate = evaluated(self._step, candidate)
        if candidate.why_not:
            return self._without_rings(candidate, candidate.why_not)
        return candidate

    def _by_bytes(self) -> Decided:
        first = self._decided(self._terms)
        where = {} if self._step.explicit else points(first.rings_by_body.values())
        if not where:
            return first
        scattered = explained(self._with_sums_scattered(where, by_price=False), first)
        if scattered is None or self._exposure(scattered) >= self._exposure(first):
            return first
        return scattered

    def _exposure(self, decided: Decided) -> float:
        """Return the cost of the step's collectives by bytes, exposed ones twice."""
        step, edited = self._step, apply(self._unringed.edited, decided.edits)
        module = step.partitioned(edited.jaxpr, ask=False).module
        left = partitioner_collectives(module, dict(step.mesh.shape))
        others = (*left, *edited.facts.get(ScatterLookup, ()))
        return exposure(decided.rings_by_body.values(), others, self._terms.costs)

    # -- by price -----------------------------------------------------------------------------

    def fastest(self, *, rings: bool = True, most: int | None = None) -> StepCandidate:
        """Take the candidate of least estimated time; of those that are about equal, the first.

        If the best gains less than `GAIN` the step without rings is taken.

        Args:
            rings: whether to try candidates with rings; if not, only with weights gathered ahead.
            most: the most candidates to try; None for all.
        """
        base_s, _ = self._base
        candidates = self._first(most) if rings else list(self._timed(self._gathered_ahead()))
        best_s = min((c.seconds for c in candidates), default=math.inf)
        if best_s < base_s * (1 - GAIN if rings else 1):  # gathers ahead alone risk nothing
            return next(c for c in candidates if c.seconds <= best_s * (1 + GAIN))
        rings_s = min((c.seconds for c in candidates if c.decisions), default=math.inf)
        why = f"estimated step time {base_s * 1e3:.4g} ms without rings"
        why += f", {rings_s * 1e3:.4g} with" if rings_s < math.inf else ""
        why += f": it gains less than {GAIN:.0%}" if rings_s < base_s else ""
        return replace(self._without_rings(candidates[0], why), step_s=base_s)

    def soonest_s(self) -> float:
        """Return the least estimated seconds of the step without rings and with the rules'."""
        base_s, _ = self._base
        return min([base_s, *(c.seconds for c in self._first(FEW_CANDIDATES))])

    def _first(self, most: int | None) -> list[StepCandidate]:
        """Return the first of all candidates with their seconds; each is made and timed once."""
        more = None if most is None else max(most - len(self._made), 0)
        self._made += itertools.islice(self._unmade, more)
        return self._made[:most]

    @functools.cached_property
    def _unmade(self) -> Iterator[StepCandidate]:
        """The candidates that have not been made yet."""
        _, priced = self._base
        return self._timed(self._all(priced))

    @functools.cached_property
    def _base(self) -> tuple[float, Terms]:
        """The seconds of the step without rings, and terms that know what is exposed in it."""
        return self._knowing(self._unringed.spmd)

    def _timed(self, every: Iterable[tuple[Decided, bool]]) -> Iterator[StepCandidate]:
        """Yield all candidates with their seconds; without, if one cannot be taken.

        The step without rings is not timed here: its partitioned program is known.
        """
        plain, cost = self._step.plain, self._step.cost
        assert cost is not None
        for decided, layers_ahead in every:
            candidate = self._finished(decided, layers_ahead=layers_ahead)
            if candidate.rewrites:
                candidate = evaluated(self._step, candidate)
                spmd = candidate.spmd
                early = spmd.joined_bytes or not candidate.edited.has(MakeRing)
                if early and exceeds(plain, spmd, cost):
                    candidate = replace(candidate, step_s=None)
            yield candidate

    def _all(self, priced: Terms) -> Iterator[tuple[Decided, bool]]:
        """Yield decisions by exposed time, by full collective cost, with every ring, and so on.

        Each comes with whether all weights of a layer are gathered ahead together.

        A ring may hide more than its own collective, so its own exposed time underrates what it
        saves. So rings that lose alone are tried together too. Then come rings without one axis
        each, lookups alone, and the sums scattered. Weights that are gathered ahead, and no ring,
        come second, up to three candidates.
        """
        first, every = self._decided(priced), self._decided(replace(self._terms, prices=None))
        yield first, False
        yield from self._gathered_ahead()
        yield self._decided(self._terms), False
        yield every, False
        for rejected in _axis_by_axis(first):
            yield self._decided(priced, rejected), False
        if priced.explicit:
            return
        if any(isinstance(edit, ScatterLookup) for edit in first.edits):
            sites = (entry.site for entry in first.entries)
            alone = dict.fromkeys(sites, "the step is faster without")
            yield self._decided(self._terms, alone), False
        if where := points(every.rings_by_body.values()):
            yield self._with_sums_scattered(where, by_price=True), False

    def _gathered_ahead(self) -> Iterator[tuple[Decided, bool]]:
        """Gather the weights of scans ahead, and make no ring: the first ones, or a layer's.

        If the batch is split the gathers of a layer hide as well singly: with all ahead, three
        steps of the suite took 1 to 4% longer by simulation.
        """
        terms = replace(self._terms, rings=False)
        first = self._decided(terms)
        yield first, False
        if repeated_gathers(self._unringed.spmd.module):
            yield self._decided(replace(terms, once=True)), False
        reads = any(isinstance(edit, ReadGathered) for edit in first.edits)
        if reads and is_gpu(self._step.mesh) and not self._unringed.is_split:
            yield first, True

    def _knowing(self, spmd: SpmdProgram) -> tuple[float, Terms]:
        """Return a step's seconds, and terms with the exposed time of undecomposed collectives."""
        assert self._terms.prices is not None
        estimated = self._step.estimate(spmd)
        positions_of = collectives_of_sites(spmd.module)

        def exposed_s(ring: Ring) -> float | None:
            positions = {
                position for m in ring.members for position in positions_of.get(m.dot.index, ())
            }
            if not positions:
                return None
            waited_s = sum(estimated.waited_s.get(position, 0.0) for position in positions)
            return waited_s / ring.members[0].dot.runs

        prices = replace(self._terms.prices, exposed=exposed_s)
        return estimated.step_s, replace(self._terms, prices=prices)

    # -- one candidate ------------------------------------------------------------------------

    def _decided(self, terms: Terms, rejected: Mapping[int, str] | None = None) -> Decided:
        if rejected:
            terms = replace(terms, requests=replace(terms.requests, rejected=rejected))
        return _decided(self._unringed.edited, self._unringed.spmd.shardings, terms)

    def _with_sums_scattered(self, where: Mapping[int, Point], *, by_price: bool) -> Decided:
        """Decide on the step with some sums scattered.

        Args:
            where: the sums.
            by_price: whether by what is exposed in the step with these sums scattered.
        """
        step, base = self._step, self._unringed
        shardings = base.spmd.shardings
        spmd = partitioned_scattered(step.traced, base.jaxpr, where, shardings, step.mesh)
        _, terms = self._knowing(spmd) if by_price else (0.0, self._terms)
        return replace(_decided(base.edited, spmd.shardings, terms), sums=where)

    def _finished(self, decided: Decided, *, layers_ahead: bool = False) -> StepCandidate:
        return _finished(self._step, self._unringed, decided, self._terms, layers_ahead)

    def _without_rings(self, candidate: StepCandidate, why: str) -> StepCandidate:
        """Return the step with its layouts and batch split alone.

        Args:
            candidate: a candidate with rings, to list its matmuls.
            why: the reason why no matmul gets a ring.
        """
        unringed, edited = self._unringed, self._step.edited
        if unringed.differs:
            edited = apply(unringed.edited, [ShareViews()])
        entries = without_rings(candidate.entries, Reason("not ringed", why))
        return replace(unringed, edited=edited, entries=entries)


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


# -- one candidate ----------------------------------------------------------------------------


def _decided(step: EditedStep, shardings: Mapping[Any, Shardings], terms: Terms) -> Decided:
    """Decide on every matmul of a step, given the shardings."""
    all_bodies = bodies(step.jaxpr)
    entries, rings_by_body = decide(all_bodies, shardings, terms)
    known = [] if terms.explicit else lookups(all_bodies, shardings, step.mesh, terms.costs)
    edits: list[Edit] = [lookup.edit for lookup in known]
    for body_rings in rings_by_body.values():
        edits += edits_of(body_rings)
    automatic = {
        n: body_rings for n, body_rings in rings_by_body.items() if body_rings.manual is None
    }
    return Decided(entries, automatic, tuple(edits))


def _finished(
    step: StepContext,
    unringed: StepCandidate,
    decided: Decided,
    terms: Terms,
    layers_ahead: bool = False,
) -> StepCandidate:
    """Apply decisions, and gather scanned weights ahead; nothing, if nothing is decided.

    Args:
        step: the step.
        unringed: the step with layouts and batch split.
        decided: the decisions for it.
        terms: the terms of the decisions.
        layers_ahead: whether all weights of a layer are gathered ahead, as one.
    """
    edited = apply(unringed.edited, decided.edits)
    rings = edited.facts.get(MakeRing)
    if rings and rings.gathered and terms.prefetch:
        edited = apply(edited, [GatherAhead(whole_layers=layers_ahead)])
    sums = tuple(ScatteredSum(site=i, dim=p.dim, axes=p.axes) for i, p in decided.sums.items())
    candidate = replace(unringed, edited=edited, program=None, entries=decided.entries, sums=sums)
    changes = candidate.rewrites or unringed.differs
    return replace(candidate, edited=apply(edited, [ShareViews()]) if changes else step.edited)
