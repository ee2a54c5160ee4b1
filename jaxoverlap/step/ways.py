"""Choose among the ways to run a step, by asking XLA about each before it compiles.

The rules decide which matmuls get rings; by themselves they cannot know what else a step does at
the time. So each way is rewritten, partitioned (`passes/analysis/partitioned.py`) and estimated
(`passes/scheduling/estimate.py`), and the fastest is taken; the step without any ring is one of
them. A way is dropped if its results would have other shardings than the plain step's, or if it
could not donate an argument that the plain step donates.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxoverlap._jax.partitioner import many_processes_of_cpus
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.matmul_collectives import collectives_of_sites
from jaxoverlap.passes.analysis.partitioned import Picture, Shardings
from jaxoverlap.passes.manual.decide import decide_manual
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.embedding_gradients import lookups, scatter
from jaxoverlap.passes.rewriting.one_view import with_one_view
from jaxoverlap.passes.rewriting.prefetch import prefetch
from jaxoverlap.passes.rewriting.rewrite import rewrite
from jaxoverlap.passes.rewriting.scatter_sums import (
    Decide,
    Point,
    Rewriting,
    points,
    scatter_sums,
    with_sums_scattered,
)
from jaxoverlap.passes.rings.chunks import without_ties
from jaxoverlap.plan.decisions import Reason
from jaxoverlap.plan.plan import Plan, ScatteredSum
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.halves import (
    GAIN,
    SOONEST,
    in_halves,
    in_parts,
    safe_terms,
    seconds,
    too_large,
)
from jaxoverlap.step.layouts import LaidOut, changed, lay_out
from jaxoverlap.step.options import Options
from jaxoverlap.step.programs import Edited

LAYOUTS = "results of the step and of its matmuls pinned, tables gathered"
VIEWS = "dims of size 1 left out once for all matmuls that read a value"


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        plan: what is done with each matmul.
        jaxpr: the rewritten step.
        rings: its rings, except those written by hand.
        step_s: seconds of the step, estimated from its partitioned program; None where no price
            is known.
        picture: its partitioned program; None where no price is known.
        laid: the partitioned program of the step laid out, with whole rows and no rings; None where
            the step was not partitioned.
        edited: the step after each edit, the rewritten step last.
    """

    plan: Plan
    jaxpr: Any
    rings: tuple[Ring, ...]
    step_s: float | None = None
    picture: Picture | None = None
    laid: Picture | None = None
    edited: tuple[Edited, ...] = ()


def overlapped(step: StepContext, terms: Terms, options: Options) -> Way:
    """Find the fastest way to run a step, as far as can be told before it is compiled.

    Args:
        step: the step.
        terms: the terms to decide by.
        options: what was asked for.

    Raises:
        RewriteError: if XLA does not partition the step, or a pass fails on it.
        ValueError: if a plan is followed whose rows run in parts, and here they cannot.
    """
    if terms.unread:
        return _finished(step, _decided(step.jaxpr, {}, step.mesh, terms), options)

    def ways_of(laid: LaidOut) -> _Ways:
        return _Ways(step, terms, options, laid)

    def soonest_s(laid: LaidOut) -> float:
        whole_s, parts = ways_of(laid).soonest_s(), options.halves
        if parts is None:
            return whole_s
        cut = in_parts(step, laid, 2 if parts == "auto" else parts, options.unroll)
        if not cut.is_cut or too_large(step.plain, cut.picture):
            return whole_s
        return min(whole_s, seconds(ways_of(cut).fastest(rings=False)))

    laid = lay_out(step, options, soonest_s)
    whole_rows = laid
    if isinstance(options.halves, int):
        laid = in_parts(step, laid, options.halves, options.unroll)
        terms = safe_terms(step, laid, terms)
        if options.plan and laid.halves and not laid.is_cut:  # its sites are those of all parts
            raise UserError(
                f"the plan cannot be followed on {step.params['name']}, whose rows it has in "
                f"{options.halves} parts: {laid.halves.why_not}. Tune again"
            )
    if not (terms.prices and options.chooses):
        way = ways_of(laid).by_bytes()
    elif options.halves != "auto":
        way = ways_of(laid).fastest()
    else:
        way = in_halves(step, laid, ways_of)
    pinned = Edited(
        LAYOUTS, whole_rows.jaxpr, functools.partial(step.seconds, whole_rows.picture.module)
    )
    return replace(way, laid=whole_rows.picture, edited=(pinned, *way.edited))


class _Ways:
    """The ways that the rules know to run one step."""

    def __init__(
        self,
        step: StepContext,
        terms: Terms,
        options: Options,
        laid: LaidOut,
    ):
        self._step, self._terms, self._options = step, terms, options
        self._laid = laid
        self._ways: list[Way] = []

    # -- by bytes -----------------------------------------------------------------------------

    def by_bytes(self) -> Way:
        """Take the way asked for, or the rules', with sums scattered where that sends less."""
        way = self._finished(self._by_bytes())
        if not any(way.plan.changes):
            plain = self._step.plain
            step_s = self._step.seconds(plain.module)
            return replace(way, jaxpr=self._step.jaxpr, step_s=step_s, picture=plain)
        after = self._partitioned(way.jaxpr)
        if why := changed(self._step.plain, after):
            return self._without_rings(way, why)
        if self._terms.prices is None:
            return way
        return replace(way, step_s=self._step.estimate(after.module).step_s, picture=after)

    def _by_bytes(self) -> Rewriting:
        mesh, sums = self._step.mesh, self._options.sums

        def anew(jaxpr: Any, picture: Picture) -> Rewriting:
            return _decided(jaxpr, picture.shardings, mesh, self._terms)

        first = self._decided(self._terms)
        if sums is None:
            return scatter_sums(self._step.traced, first, anew, mesh, self._terms.costs)
        where = {s.site: Point(s.dim, s.axes) for s in sums}
        return self._with_sums_scattered(where, anew) if where else first

    # -- by price -----------------------------------------------------------------------------

    def fastest(self, *, rings: bool = True, most: int | None = None) -> Way:
        """Take the way with the least estimated time; of ways that are about equal, the first.

        Args:
            rings: whether to try ways with rings; if not, only with weights gathered ahead.
            most: the most ways to try; None for all.
        """
        base_s, _ = self._base
        ways = self._first(most) if rings else list(self._timed([self._gathered_ahead()]))
        best_s = min(map(seconds, ways), default=math.inf)
        if best_s < base_s * (1 - GAIN if rings else 1):  # gathers ahead alone risk nothing
            return next(way for way in ways if seconds(way) <= best_s * (1 + GAIN))
        rings_s = min((seconds(way) for way in ways if way.plan.decisions), default=math.inf)
        why = f"estimated step time {base_s * 1e3:.4g} ms without rings"
        why += f", {rings_s * 1e3:.4g} with" if rings_s < math.inf else ""
        whole = self._without_rings(ways[0], why)
        return replace(whole, step_s=base_s, picture=self._laid.picture)

    def soonest_s(self) -> float:
        """Return the least estimated seconds of the step without rings and with the rules'."""
        base_s, _ = self._base
        return min([base_s, *map(seconds, self._first(SOONEST))])

    def _first(self, most: int | None) -> list[Way]:
        """Return the first of all ways with their seconds; each is made and timed once."""
        more = None if most is None else max(most - len(self._ways), 0)
        self._ways += itertools.islice(self._unmade, more)
        return self._ways[:most]

    @functools.cached_property
    def _unmade(self) -> Iterator[Way]:
        """The ways that have not been made yet."""
        _, priced = self._base
        return self._timed(self._all(priced))

    @functools.cached_property
    def _base(self) -> tuple[float, Terms]:
        """The seconds of the step without rings, and terms that know what is exposed in it."""
        return self._knowing(self._laid.picture)

    def _timed(self, rewritings: Iterable[Rewriting]) -> Iterator[Way]:
        """Yield all ways with their seconds; without, if one cannot be taken.

        The step without rings is not timed here: its picture is known.
        """
        assert self._terms.prices is not None
        for rewriting in rewritings:
            way = self._finished(rewriting)
            if way.plan.rewrites:
                plan, laid = way.plan, self._laid.jaxpr
                changes = plan.decisions, plan.scattered, plan.sums, plan.fsdp
                timed = functools.partial(self._seconds_of, way)
                step_s, picture = self._step.once(("timed", id(laid), *changes), timed)
                way = replace(way, step_s=step_s, picture=picture)
            yield way

    def _seconds_of(self, way: Way) -> tuple[float | None, Picture]:
        """Return a way's estimated seconds; None if its results would lie in another way."""
        after = self._partitioned(way.jaxpr)
        if changed(self._step.plain, after):
            return None, after
        return self._step.estimate(after.module).step_s, after

    def _all(self, priced: Terms) -> Iterator[Rewriting]:
        """Yield rewritings decided by exposed time, by whole price, with every ring, and so on.

        A ring may hide more than its own collective: what is exposed beside it is not all that it
        saves. So rings that lose alone are tried together too. Then come rings without one axis
        each, lookups alone, and the sums scattered. Weights that are gathered a step ahead, and no
        ring, are the second way.
        """
        first, every = self._decided(priced), self._decided(replace(self._terms, prices=None))
        yield first
        yield self._gathered_ahead()
        yield self._decided(self._terms)
        yield every
        for rejected in _axis_by_axis(first):
            yield self._decided(priced, rejected)
        if priced.explicit:
            return
        if first.known:
            sites = (entry.site for entry in first.entries)
            yield self._decided(self._terms, dict.fromkeys(sites, "the step is faster without"))
        if where := points(every.sharings.values()):
            yield self._with_sums_scattered(where, self._decided_anew)

    def _gathered_ahead(self) -> Rewriting:
        """Gather the weights of scans a step ahead, and make no ring."""
        return self._decided(replace(self._terms, rings=False))

    def _decided_anew(self, jaxpr: Any, picture: Picture) -> Rewriting:
        """Decide on a jaxpr by what is exposed in a picture of its own."""
        _, terms = self._knowing(picture)
        return _decided(jaxpr, picture.shardings, self._step.mesh, terms)

    def _knowing(self, picture: Picture) -> tuple[float, Terms]:
        """Return a step's seconds, and terms that know the exposed time of whole collectives."""
        assert self._terms.prices is not None
        estimated = self._step.estimate(picture.module)
        beside = collectives_of_sites(picture.module)

        def bare_s(ring: Ring) -> float | None:
            places = {place for m in ring.members for place in beside.get(m.dot.index, ())}
            if not places:
                return None
            waited_s = sum(estimated.waited_s.get(place, 0.0) for place in places)
            return waited_s / ring.members[0].dot.runs

        prices = replace(self._terms.prices, bare=bare_s)
        return estimated.step_s, replace(self._terms, prices=prices)

    # -- one way ------------------------------------------------------------------------------

    def _decided(self, terms: Terms, rejected: Mapping[int, str] | None = None) -> Rewriting:
        if rejected:
            terms = replace(terms, requests=replace(terms.requests, rejected=rejected))
        laid = self._laid
        return _decided(laid.jaxpr, laid.picture.shardings, self._step.mesh, terms)

    def _with_sums_scattered(self, where: Mapping[int, Point], decided: Decide) -> Rewriting:
        jaxpr, shardings = self._laid.jaxpr, self._laid.picture.shardings
        mesh = self._step.mesh
        return with_sums_scattered(self._step.traced, jaxpr, shardings, where, decided, mesh)

    def _finished(self, rewriting: Rewriting) -> Way:
        return _finished(self._step, rewriting, self._options, self._laid)

    def _without_rings(self, way: Way, why: str) -> Way:
        """Return the step without rings, laid out all the same, in the place of a way.

        Args:
            way: the way.
            why: the reason why no matmul gets a ring.
        """
        laid = self._laid
        jaxpr = with_one_view(laid.jaxpr) if laid.differs else self._step.jaxpr
        plan = way.plan.without_rings(Reason("not ringed", why))
        return Way(plan, jaxpr, (), edited=(*_split(self._step, laid), Edited(VIEWS, jaxpr)))

    def _partitioned(self, jaxpr: Any) -> Picture:
        """Partition a rewritten step with XLA, and return the picture."""
        return self._step.partitioned(jaxpr, ask=False)


def _axis_by_axis(first: Rewriting) -> Iterator[dict[int, str]]:
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


# -- one way --------------------------------------------------------------------------------------


def _decided(jaxpr: Any, shardings: Mapping[Any, Shardings], mesh: Mesh, terms: Terms) -> Rewriting:
    """Decide on every matmul of a jaxpr, given the shardings, and rewrite it."""
    all_bodies = bodies(jaxpr)
    entries, sharings = decide(all_bodies, shardings, terms)
    inside, manual = decide_manual(all_bodies, shardings, terms.requests)
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    with without_ties(many_processes_of_cpus(mesh.devices.flat)):
        rewritten, gathered = rewrite(jaxpr, {**sharings, **manual}, mesh)
    may = terms.lookups and not terms.explicit
    known = lookups(all_bodies, shardings, mesh, terms.costs) if may else []
    return Rewriting(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


def _finished(
    step: StepContext, rewriting: Rewriting, options: Options, laid: LaidOut | None = None
) -> Way:
    """Finish a way: gather scanned weights a step ahead, and scatter the gradients of lookups."""
    ringed, prefetched = rewriting.rewritten, 0
    ahead = ringed
    if options.fsdp == "prefetch":
        ahead, prefetched = prefetch(ringed, rewriting.gathered)
    scattered = scatter(ahead, rewriting.known, step.mesh)
    jaxpr = with_one_view(scattered)
    sums = rewriting.sums.items()
    plan = Plan(
        step=step.params["name"],
        mesh=dict(step.mesh.shape),
        entries=rewriting.entries,
        prefetched=prefetched,
        scattered=tuple(lookup.entry(step.mesh.shape) for lookup in rewriting.known),
        sums=tuple(ScatteredSum(site=i, dim=p.dim, axes=p.axes) for i, p in sums),
        layouts=laid and laid.layouts,
        halves=laid and laid.halves,
        fsdp=options.fsdp,
    )
    rings = tuple(ring for sharing in rewriting.sharings.values() for ring in sharing.rings)
    edited = (
        *(_split(step, laid) if laid else ()),
        Edited("rings, and sums that stay scattered", ringed),
        Edited("weights of scans gathered a step ahead", ahead),
        Edited("gradients of lookups scattered", scattered),
        Edited(VIEWS, jaxpr),
    )
    return Way(plan, jaxpr, rings, edited=edited)


def _split(step: StepContext, laid: LaidOut) -> tuple[Edited, ...]:
    """Return the step after its batch was split, if it is."""
    if not laid.is_cut:
        return ()
    seconds = functools.partial(step.seconds, laid.picture.module)
    return (Edited("the batch split in parts", laid.jaxpr, seconds),)
