"""The ways to run a step, and the choice between them: XLA is asked about each before it compiles.

The rules decide which matmuls get rings; by themselves they cannot know what else a step does at
the time. So each way is rewritten, partitioned (`passes/analysis/partitioned.py`) and estimated
(`passes/scheduling/estimate.py`), and the fastest is taken; the step without any ring is one of them. A way
whose results would lie in another way than the plain step's, or that could not donate what that
donates, is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.mesh import explicit_axes, unread
from jaxoverlap.passes.analysis.partitioned import (
    Picture,
    Shardings,
    collectives_of_sites,
    partitioned,
)
from jaxoverlap.passes.manual.decide import decide_manual
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.rewriting.embedding_gradients import lookups, scatter
from jaxoverlap.passes.rewriting.pin_results import open_results, pin_results
from jaxoverlap.passes.rewriting.prefetch import prefetch
from jaxoverlap.passes.rewriting.rewrite import rewrite
from jaxoverlap.passes.rewriting.scatter_sums import (
    Point,
    Rewriting,
    points,
    scatter_sums,
    with_sums_scattered,
)
from jaxoverlap.passes.scheduling.estimate import estimate
from jaxoverlap.plan.decisions import LEFT_PLAIN
from jaxoverlap.plan.plan import Plan, ScatteredSum
from jaxoverlap.step.options import Options

_GAIN = 0.01  # of the step without rings: an estimate that says less does not tell two ways apart


@dataclass(frozen=True)
class Terms:
    """What all decisions on a step go by.

    Attributes:
        mesh: the step's mesh.
        costs: of a byte along each mesh axis, from `mesh.axis_costs`.
        prices: of rings on the cluster, where that is known.
        options: what was asked for.
    """

    mesh: Mesh
    costs: Mapping[str, float]
    prices: RingCosts | None
    options: Options


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        plan: what is done with each matmul.
        jaxpr: the rewritten step.
        rings: that it has, but those written by hand.
        step_s: how long it takes, estimated from its partitioned program; None where no price is
            known.
    """

    plan: Plan
    jaxpr: Any
    rings: tuple[Ring, ...]
    step_s: float | None = None


def overlapped(
    traced: jax.stages.Traced | None, jaxpr: Any, params: dict[str, Any], terms: Terms
) -> Way:
    """The fastest way to run a step, as far as can be told before it is compiled.

    Args:
        traced: the step; None where its shardings cannot be read.
        jaxpr: the step, flattened.
        params: of its jit equation.
        terms: to decide by.

    Raises:
        RewriteError: if XLA does not partition the step, or a pass fails on it.
    """
    name, mesh = params["name"], terms.mesh
    if traced is None:
        return _finished(name, _decided(jaxpr, {}, terms), terms)
    plain = partitioned(traced, jaxpr, mesh)
    pinned = pin_results(jaxpr, open_results(params, plain.results, mesh), mesh)
    if terms.prices is not None and terms.options.chooses:
        return _fastest(name, jaxpr, plain, _Ways(traced, pinned, plain, terms))
    way = _finished(name, _by_bytes(traced, pinned, plain, terms), terms)
    if not way.plan.decisions and not way.plan.scattered:
        return replace(way, jaxpr=jaxpr)
    after = partitioned(traced, way.jaxpr, mesh, ask=False)
    if changed := _changed(plain, after):
        return _left_alone(way, jaxpr, changed)
    if terms.prices is None:
        return way
    return replace(way, step_s=estimate(after.module, terms.prices.cost).step_s)


def _by_bytes(traced: jax.stages.Traced, jaxpr: Any, plain: Picture, terms: Terms) -> Rewriting:
    """What is decided: with the sums scattered that are asked for, or as leaves less exposed."""
    mesh, sums = terms.mesh, terms.options.sums

    def decided(jaxpr: Any, picture: Picture) -> Rewriting:
        return _decided(jaxpr, picture.shardings, terms)

    if sums is None:
        return scatter_sums(traced, decided(jaxpr, plain), decided, mesh, terms.costs)
    where = {s.site: Point(s.dim, s.axes) for s in sums}
    if not where:
        return decided(jaxpr, plain)
    return with_sums_scattered(traced, jaxpr, plain.shardings, where, decided, mesh)


# -- by price -------------------------------------------------------------------------------------


def _fastest(name: str, jaxpr: Any, plain: Picture, ways: _Ways) -> Way:
    """The way that is estimated to take least; of ways that take about as long, the one before.

    Args:
        name: of the step.
        jaxpr: the step.
        plain: what XLA makes of it.
        ways: to choose from.
    """
    cost, plain_s = ways.prices.cost, ways.plain_s
    first, best, best_s, rings_s = None, None, plain_s * (1 - _GAIN), math.inf
    for outcome in ways.outcomes():
        way = _finished(name, outcome, ways.terms)
        first = first or way
        if not way.plan.decisions and not way.plan.scattered:
            continue
        after = ways.partitioned(way.jaxpr, ask=False)
        if _changed(plain, after):
            continue
        way_s = estimate(after.module, cost).step_s
        rings_s = min(rings_s, way_s) if way.plan.decisions else rings_s
        if way_s < best_s:
            best, best_s = replace(way, step_s=way_s), way_s
    if best is not None:
        return best
    assert first is not None
    why = f"by price the step takes {plain_s * 1e3:.4g} ms without rings"
    why += f", {rings_s * 1e3:.4g} with" if rings_s < math.inf else ""
    return replace(_left_alone(first, jaxpr, why), step_s=plain_s)


class _Ways:
    """The ways that the rules know for one step on a known cluster.

    Attributes:
        terms: to decide by.
        prices: of rings on the cluster.
        plain_s: how long the step takes without any, estimated.
    """

    def __init__(self, traced: jax.stages.Traced, jaxpr: Any, plain: Picture, terms: Terms):
        """Take a traced step, its jaxpr with pinned results, and what XLA makes of it plain."""
        assert terms.prices is not None
        self._traced, self._jaxpr, self._plain = traced, jaxpr, plain
        self.terms, self.prices = terms, terms.prices
        self.plain_s, self._priced = self._knowing(plain)

    def partitioned(self, jaxpr: Any, *, ask: bool) -> Picture:
        """What XLA makes of another jaxpr of the step."""
        return partitioned(self._traced, jaxpr, self.terms.mesh, ask=ask)

    def outcomes(self) -> Iterator[Rewriting]:
        """By each matmul's price; without one axis; lookups alone; with sums scattered."""
        first = self._decided(self._priced)
        yield first
        for rejected in self._axis_by_axis(first):
            yield self._decided(self._priced, rejected)
        if explicit_axes(self.terms.mesh):
            return
        if first.known:
            sites = (entry.site for entry in first.entries)
            yield self._decided(self.terms, dict.fromkeys(sites, "the step is faster without"))
        yield from self._with_sums_scattered()

    def _decided(self, terms: Terms, rejected: Mapping[int, str] | None = None) -> Rewriting:
        return _decided(self._jaxpr, self._plain.shardings, terms, rejected)

    def _axis_by_axis(self, first: Rewriting) -> Iterator[dict[int, str]]:
        """The matmuls whose rings run along one axis, each axis' in turn, if there are several."""
        rings = [ring for sharing in first.sharings.values() for ring in sharing.rings]
        axes = dict.fromkeys(ring.first.ring.axis for ring in rings)
        for axis in axes if len(axes) > 1 else ():
            yield {
                m.dot.index: f"the step is faster without rings on {axis}"
                for ring in rings
                if ring.first.ring.axis == axis
                for m in ring.members
            }

    def _with_sums_scattered(self) -> Iterator[Rewriting]:
        """The way in which sums that rings could take are scattered first, if there are any."""
        jaxpr, shardings = self._jaxpr, self._plain.shardings
        every, _ = _entries(jaxpr, shardings, replace(self.terms, prices=None))
        if where := points(every[1].values()):

            def decided(jaxpr: Any, picture: Picture) -> Rewriting:
                _, terms = self._knowing(picture)
                return _decided(jaxpr, picture.shardings, terms)

            mesh = self.terms.mesh
            yield with_sums_scattered(self._traced, jaxpr, shardings, where, decided, mesh)

    def _knowing(self, picture: Picture) -> tuple[float, Terms]:
        """A step's seconds, and the terms with what is exposed of each collective left whole."""
        estimated = estimate(picture.module, self.prices.cost)
        beside = collectives_of_sites(picture.module)

        def bare_s(ring: Ring) -> float | None:
            found = {place for m in ring.members for place in beside.get(m.dot.index, ())}
            if not found:
                return None
            waited_s = sum(estimated.waited_s.get(place, 0.0) for place in found)
            return waited_s / ring.members[0].dot.runs

        prices = replace(self.prices, bare=bare_s)
        return estimated.step_s, replace(self.terms, prices=prices)


# -- what stays as it is --------------------------------------------------------------------------


def _changed(plain: Picture, after: Picture) -> str:
    """How a step's results would differ from the plain step's, but for their values; "" if not."""
    pairs = zip(plain.results, after.results, strict=True)
    moved = [str(place) for place, (one, other) in enumerate(pairs) if one != other]
    if moved:
        return f"XLA would give result {', '.join(moved[:3])} another sharding"
    lost = {argument for _, argument in plain.donated - after.donated}
    return f"XLA would not donate argument {', '.join(sorted(lost)[:3])}" if lost else ""


def _left_alone(way: Way, jaxpr: Any, why: str) -> Way:
    """The step as it is, in the place of a way.

    Args:
        way: the way.
        jaxpr: the step.
        why: no matmul gets a ring.
    """
    return Way(way.plan.without_rings(LEFT_PLAIN + why), jaxpr, ())


# -- one way --------------------------------------------------------------------------------------


def _decided(
    jaxpr: Any,
    shardings: Mapping[Any, Shardings],
    terms: Terms,
    rejected: Mapping[int, str] | None = None,
) -> Rewriting:
    """Decide on every matmul of a jaxpr, given how they lie, and rewrite it."""
    (entries, sharings), by_hand = _entries(jaxpr, shardings, terms, rejected)
    inside, manual = by_hand
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    rewritten, gathered = rewrite(jaxpr, {**sharings, **manual}, terms.mesh)
    found, mesh = bodies(jaxpr), terms.mesh
    known = [] if explicit_axes(mesh) else lookups(found, shardings, mesh, terms.costs)
    return Rewriting(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


def _entries(
    jaxpr: Any,
    shardings: Mapping[Any, Shardings],
    terms: Terms,
    rejected: Mapping[int, str] | None = None,
) -> tuple[Any, Any]:
    """What `decide` and `decide_manual` say of a jaxpr."""
    options, found = terms.options, bodies(jaxpr)
    wanted: dict[str, Any] = {
        "skip": options.skip,
        "granularity": options.granularity,
        "choices": options.choices,
        "alone": options.alone,
        "rejected": rejected,
    }
    return (
        decide(
            found,
            shardings,
            dict(terms.mesh.shape),
            **wanted,
            unread=unread(terms.mesh),
            explicit=explicit_axes(terms.mesh),
            prefetch=options.fsdp == "prefetch",
            costs=terms.costs,
            prices=terms.prices,
        ),
        decide_manual(found, shardings, **wanted),
    )


def _finished(name: str, outcome: Rewriting, terms: Terms) -> Way:
    """The way, with gathers of scanned weights a step ahead and lookups' gradients scattered."""
    rewritten, prefetched = outcome.rewritten, 0
    if terms.options.fsdp == "prefetch":
        rewritten, prefetched = prefetch(rewritten, outcome.gathered)
    sums = outcome.sums.items()
    plan = Plan(
        step=name,
        mesh=dict(terms.mesh.shape),
        entries=outcome.entries,
        prefetched=prefetched,
        scattered=tuple(lookup.entry(terms.mesh.shape) for lookup in outcome.known),
        sums=tuple(ScatteredSum(site=i, dim=p.dim, axes=p.axes) for i, p in sums),
        fsdp=terms.options.fsdp,
    )
    rings = tuple(ring for sharing in outcome.sharings.values() for ring in sharing.rings)
    return Way(plan, scatter(rewritten, outcome.known, terms.mesh), rings)
