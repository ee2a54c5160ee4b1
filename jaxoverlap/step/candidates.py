"""Choose the fastest candidate for a step by its estimate, before anything is compiled.

Rules decide which matmuls get rings; they cannot know what else the step does at that time. So each
candidate is rewritten, partitioned (`passes/analysis/partitioned.py`) and estimated
(`passes/estimation/estimate.py`), and the fastest is taken; the step without any ring is one of
them. A candidate is dropped if its results would have other shardings than the original step's, or
if it could not donate an argument that the original step donates.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxoverlap.flags import is_gpu
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.matmul_collectives import collectives_of_sites
from jaxoverlap.passes.analysis.partitioned import Shardings, SpmdProgram
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.passes.apply import apply
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.layouts.dims import DimNames
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.ring_edits import edits_of
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.embedding_gradients import lookups
from jaxoverlap.passes.rewriting.late_sums import late_sums
from jaxoverlap.passes.rewriting.scatter_sums import (
    Decide,
    Decided,
    Point,
    exposure,
    points,
    scatter_sums,
    with_sums_scattered,
)
from jaxoverlap.plan.decisions import Reason, ScatteredSum
from jaxoverlap.plan.edits import (
    Edit,
    GatherAhead,
    MakeRing,
    ReadGathered,
    ScatterLookup,
    ShareViews,
    SumLate,
)
from jaxoverlap.plan.limits import FEW_CANDIDATES, GAIN, LATE_SUMS_GAIN
from jaxoverlap.plan.plan import Plan
from jaxoverlap.step.check_plan import evidence_of
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.halves import in_halves, in_parts, safe_terms, seconds
from jaxoverlap.step.layouts import Unringed, changed, with_layouts
from jaxoverlap.step.memory import exceeds, too_large
from jaxoverlap.step.options import Options


@dataclass(frozen=True)
class StepCandidate:
    """A rewritten step that is compared with others by its estimate.

    Attributes:
        plan: what is done with each matmul.
        edited: the rewritten step.
        step_s: seconds of the step, estimated from its partitioned program; None where no price
            is known.
        spmd: its partitioned program; None where no price is known.
        unringed: the partitioned program with layouts alone, without batch split and rings; None
            where the step was not partitioned.
    """

    plan: Plan
    edited: EditedStep
    step_s: float | None = None
    spmd: SpmdProgram | None = None
    unringed: SpmdProgram | None = None


def overlapped(step: StepContext, terms: Terms, options: Options) -> StepCandidate:
    """Return the candidate with the least estimated time.

    Args:
        step: the step.
        terms: the terms to decide by.
        options: the user's options.

    Raises:
        RewriteError: if XLA does not partition the step, or a pass fails on it.
    """
    if terms.unread:
        return _finished(step, _decided(step.edited, {}, terms), options)

    def candidates_of(unringed: Unringed) -> _Candidates:
        return _Candidates(step, terms, options, unringed)

    def soonest_s(unringed: Unringed) -> float:
        whole_s, parts = candidates_of(unringed).soonest_s(), options.halves
        if parts is None:
            return whole_s
        cut = in_parts(step, unringed, 2 if parts == "auto" else parts, options.unroll)
        if not cut.is_split or too_large(step.plain, cut.spmd):
            return whole_s
        return min(whole_s, seconds(candidates_of(cut).fastest(rings=False)))

    unringed = with_layouts(step, options, soonest_s)
    whole_rows = unringed
    if isinstance(options.halves, int):
        unringed = in_parts(step, unringed, options.halves, options.unroll)
        terms = safe_terms(step, unringed, terms)
    if not (terms.prices and options.chooses):
        candidate = candidates_of(unringed).by_bytes()
    elif options.halves != "auto":
        candidate = candidates_of(unringed).fastest()
    else:
        candidate = in_halves(step, unringed, candidates_of)
    wanted = options.late_sums or (terms.prices and options.chooses)
    if wanted and not step.explicit:  # there types say how values lie
        candidate = _with_late_sums(step, unringed, candidate, anyway=options.late_sums)
    return replace(candidate, unringed=whole_rows.spmd)


def _with_late_sums(
    step: StepContext, unringed: Unringed, candidate: StepCandidate, *, anyway: bool
) -> StepCandidate:
    """Add up sums behind their scans, if the step is faster so by estimate, or anyway."""
    edited = unringed.edited if candidate.edited is step.edited else candidate.edited
    base = edited.before if edited.before and edited.has(ShareViews) else edited
    if candidate.plan.cut and not unringed.is_split:
        unringed = in_parts(step, unringed, candidate.plan.cut.parts, 1)
    names = DimNames(base.numbered.jaxpr)
    late = list(late_sums(base, names, unringed.spmd.shardings))
    if not late:
        return candidate
    edited = apply(base, [*late, ShareViews()])
    spmd = step.partitioned_after(edited)
    step_s = step.seconds(spmd)
    pays = step_s is not None and step_s < seconds(candidate) * (1 - LATE_SUMS_GAIN)
    if changed(step.plain, spmd) or not (pays or anyway):
        return candidate
    plan = msgspec.structs.replace(candidate.plan, edits=edited.edits)
    return replace(candidate, plan=plan, edited=edited, step_s=step_s, spmd=spmd)


class _Candidates:
    """The candidates that the rules propose for one step."""

    def __init__(
        self,
        step: StepContext,
        terms: Terms,
        options: Options,
        unringed: Unringed,
    ):
        self._step, self._terms, self._options = step, terms, options
        self._unringed = unringed
        self._made: list[StepCandidate] = []

    # -- by bytes -----------------------------------------------------------------------------

    def by_bytes(self) -> StepCandidate:
        """Return the requested or rule-based candidate; scatter its sums where that sends less."""
        candidate = self._finished(self._by_bytes(), layers_ahead=self._options.layers_ahead)
        if candidate.edited is self._step.edited:
            plain = self._step.plain
            return replace(candidate, step_s=self._step.seconds(plain), spmd=plain)
        after = self._step.partitioned_after(candidate.edited)
        if why := changed(self._step.plain, after):
            return self._without_rings(candidate, why)
        if self._terms.prices is None:
            return candidate
        return replace(candidate, step_s=self._step.estimate(after).step_s, spmd=after)

    def _by_bytes(self) -> Decided:
        first = self._decided(self._terms)
        if self._step.explicit:
            return first
        base, step = self._unringed.edited, self._step

        def anew(spmd: SpmdProgram) -> Decided:
            return _decided(base, spmd.shardings, self._terms)

        def cost(decided: Decided) -> float:
            becomes = apply(base, decided.edits)
            module = step.partitioned(becomes.jaxpr, ask=False).module
            left = partitioner_collectives(module, dict(step.mesh.shape))
            beside = (*left, *becomes.facts.get(ScatterLookup, ()))
            return exposure(decided.sharings.values(), beside, self._terms.costs)

        return scatter_sums(first, lambda where: self._with_sums_scattered(where, anew), cost)

    # -- by price -----------------------------------------------------------------------------

    def fastest(self, *, rings: bool = True, most: int | None = None) -> StepCandidate:
        """Take the candidate of least estimated time; of those that are about equal, the first.

        Args:
            rings: whether to try candidates with rings; if not, only with weights gathered ahead.
            most: the most candidates to try; None for all.
        """
        base_s, _ = self._base
        candidates = self._first(most) if rings else list(self._timed(self._gathered_ahead()))
        best_s = min(map(seconds, candidates), default=math.inf)
        if best_s < base_s * (1 - GAIN if rings else 1):  # gathers ahead alone risk nothing
            return next(
                candidate for candidate in candidates if seconds(candidate) <= best_s * (1 + GAIN)
            )
        rings_s = min(
            (seconds(candidate) for candidate in candidates if candidate.plan.decisions),
            default=math.inf,
        )
        why = f"estimated step time {base_s * 1e3:.4g} ms without rings"
        why += f", {rings_s * 1e3:.4g} with" if rings_s < math.inf else ""
        whole = self._without_rings(candidates[0], why)
        return replace(whole, step_s=base_s, spmd=self._unringed.spmd)

    def soonest_s(self) -> float:
        """Return the least estimated seconds of the step without rings and with the rules'."""
        base_s, _ = self._base
        return min([base_s, *map(seconds, self._first(FEW_CANDIDATES))])

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
        assert self._terms.prices is not None
        for decided, layers_ahead in every:
            candidate = self._finished(decided, layers_ahead=layers_ahead)
            if rewrites(candidate.edited):
                timed = functools.partial(self._seconds_of, candidate)
                step_s, spmd = self._step.once(("timed", candidate.plan.edits), timed)
                candidate = replace(candidate, step_s=step_s, spmd=spmd)
            yield candidate

    def _seconds_of(self, candidate: StepCandidate) -> tuple[float | None, SpmdProgram]:
        """Return a candidate's estimated seconds; None if its results are sharded otherwise.

        None also if layers that are gathered ahead need more memory than there is.
        """
        after = self._step.partitioned_after(candidate.edited)
        plain, cost = self._step.plain, self._step.cost
        if after.joined_bytes and cost and exceeds(plain, after, cost):
            return None, after
        if changed(plain, after):
            return None, after
        return self._step.estimate(after).step_s, after

    def _all(self, priced: Terms) -> Iterator[tuple[Decided, bool]]:
        """Yield decisions by exposed time, by full collective cost, with every ring, and so on.

        Each comes with whether all weights of a layer are gathered ahead together.

        A ring may hide more than its own collective, so its own exposed time underrates what it
        saves. So rings that lose alone are tried together too. Then come rings without one axis
        each, lookups alone, and the sums scattered. Weights that are gathered a step ahead, and no
        ring, are the second candidate and the third.
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
        if where := points(every.sharings.values()):
            yield self._with_sums_scattered(where, self._decided_anew), False

    def _gathered_ahead(self) -> Iterator[tuple[Decided, bool]]:
        """Gather the weights of scans a step ahead, and make no ring: the first ones, or a layer's.

        If the batch is split the gathers of a layer hide as well singly: with all ahead, three
        steps of the suite took 1 to 4% longer by simulation.
        """
        first = self._decided(replace(self._terms, rings=False))
        yield first, False
        reads = any(isinstance(edit, ReadGathered) for edit in first.edits)
        if reads and is_gpu(self._step.mesh) and not self._unringed.is_split:
            yield first, True

    def _decided_anew(self, spmd: SpmdProgram) -> Decided:
        """Decide on the step by what is exposed in another partitioned program of it."""
        _, terms = self._knowing(spmd)
        return _decided(self._unringed.edited, spmd.shardings, terms)

    def _knowing(self, spmd: SpmdProgram) -> tuple[float, Terms]:
        """Return a step's seconds, and terms with the exposed time of undecomposed collectives."""
        assert self._terms.prices is not None
        estimated = self._step.estimate(spmd)
        beside = collectives_of_sites(spmd.module)

        def exposed_s(ring: Ring) -> float | None:
            positions = {position for m in ring.members for position in beside.get(m.dot.index, ())}
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

    def _with_sums_scattered(self, where: Mapping[int, Point], decided: Decide) -> Decided:
        jaxpr, shardings = self._unringed.jaxpr, self._unringed.spmd.shardings
        mesh = self._step.mesh
        return with_sums_scattered(self._step.traced, jaxpr, shardings, where, decided, mesh)

    def _finished(self, decided: Decided, *, layers_ahead: bool = False) -> StepCandidate:
        options, unringed = self._options, self._unringed
        return _finished(self._step, decided, options, unringed, layers_ahead=layers_ahead)

    def _without_rings(self, candidate: StepCandidate, why: str) -> StepCandidate:
        """Return the candidate that keeps the layouts of another one, and makes no ring.

        Args:
            candidate: the candidate.
            why: the reason why no matmul gets a ring.
        """
        unringed, edited = self._unringed, self._step.edited
        if unringed.differs:
            edited = apply(unringed.edited, [ShareViews()])
        plan = candidate.plan.without_rings(Reason("not ringed", why))
        plan = msgspec.structs.replace(plan, edits=edited.edits)
        return StepCandidate(plan, edited)


def _axis_by_axis(first: Decided) -> Iterator[dict[int, str]]:
    """Yield for each axis the matmuls whose rings run along it, if there are several axes."""
    rings = [ring for sharing in first.sharings.values() for ring in sharing.rings]
    axes = dict.fromkeys(ring.first.ring.axis for ring in rings)
    for axis in axes if len(axes) > 1 else ():
        yield {
            m.dot.index: f"the step is faster without rings on {axis}"
            for ring in rings
            if ring.first.ring.axis == axis
            for m in ring.members
        }


def rewrites(edited: EditedStep) -> bool:
    """Return whether edits change anything but the sharding of values."""
    return edited.has(MakeRing, ReadGathered, ScatterLookup, SumLate)


# -- one candidate ----------------------------------------------------------------------------


def _decided(step: EditedStep, shardings: Mapping[Any, Shardings], terms: Terms) -> Decided:
    """Decide on every matmul of a step, given the shardings."""
    all_bodies = bodies(step.jaxpr)
    entries, sharings = decide(all_bodies, shardings, terms)
    known = [] if terms.explicit else lookups(all_bodies, shardings, step.mesh, terms.costs)
    edits: list[Edit] = [lookup.edit for lookup in known]
    for sharing in sharings.values():
        edits += edits_of(sharing)
    automatic = {n: sharing for n, sharing in sharings.items() if sharing.manual is None}
    return Decided(entries, automatic, tuple(edits))


def _finished(
    step: StepContext,
    decided: Decided,
    options: Options,
    unringed: Unringed | None = None,
    *,
    layers_ahead: bool = False,
) -> StepCandidate:
    """Apply decisions, and gather scanned weights a step ahead; nothing, if nothing is decided.

    Args:
        step: the step.
        decided: the decisions for it.
        options: the user's options.
        unringed: the step with layouts and batch split; None for the step itself.
        layers_ahead: whether all weights of a layer are gathered ahead, as one.
    """
    edited = apply(unringed.edited if unringed else step.edited, decided.edits)
    rings = edited.facts.get(MakeRing)
    if rings and rings.gathered and options.fsdp == "prefetch":
        edited = apply(edited, [GatherAhead(whole_layers=layers_ahead)])
    if rewrites(edited) or (unringed and unringed.differs):
        edited = apply(edited, [ShareViews()])
    else:
        edited = step.edited
    plan = Plan(
        step=step.params["name"],
        mesh=dict(step.mesh.shape),
        edits=edited.edits,
        entries=decided.entries,
        **evidence_of(edited),
        sums=tuple(ScatteredSum(site=i, dim=p.dim, axes=p.axes) for i, p in decided.sums.items()),
        layouts=unringed and unringed.layouts,
        halves=unringed and unringed.halves,
    )
    return StepCandidate(plan, edited)
