"""The ways to run a step, and the choice between them: XLA is asked about each before it compiles.

The rules decide which matmuls get rings; by themselves they cannot know what else a step does at
the time. So each way is rewritten, partitioned (`passes/partitioned.py`) and estimated
(`passes/estimate.py`), and the fastest is taken; the step without any ring is one of them. A way
whose results would lie in another way than the plain step's, or that could not donate what that
donates, is none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxoverlap.options import Options
from jaxoverlap.passes.decide import decide
from jaxoverlap.passes.estimate import estimate
from jaxoverlap.passes.jaxprs import bodies
from jaxoverlap.passes.lookups import lookups, scatter
from jaxoverlap.passes.manual import decide_manual
from jaxoverlap.passes.mesh import explicit_axes, unread
from jaxoverlap.passes.partitioned import Picture, Shardings, collectives_of_sites, partitioned
from jaxoverlap.passes.prefetch import prefetch
from jaxoverlap.passes.results import open_results, pin_results
from jaxoverlap.passes.rewrite import rewrite
from jaxoverlap.passes.rings import Ring
from jaxoverlap.passes.scattered import Outcome, Point, points, scatter_sums, with_sums_scattered
from jaxoverlap.passes.worth import Prices
from jaxoverlap.plan import Plan, ScatteredSum

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
    prices: Prices | None
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
    asked = functools.partial(partitioned, traced, mesh=mesh, ask=False)
    if terms.prices is not None and terms.options.chooses:
        return _fastest(name, traced, pinned, plain, asked, terms)
    way = _finished(name, _by_bytes(traced, pinned, plain, terms), terms)
    after = asked(way.jaxpr)
    if changed := _changed(plain, after):
        return _left_alone(name, pinned, plain, terms, changed)
    if terms.prices is None:
        return way
    return replace(way, step_s=estimate(after.module, terms.prices.cost).step_s)


def _by_bytes(traced: jax.stages.Traced, jaxpr: Any, plain: Picture, terms: Terms) -> Outcome:
    """What is decided: with the sums scattered that are asked for, or as leaves less exposed."""
    mesh, sums = terms.mesh, terms.options.sums

    def decided(jaxpr: Any, picture: Picture) -> Outcome:
        return _decided(jaxpr, picture.shardings, terms)

    if sums is None:
        return scatter_sums(traced, decided(jaxpr, plain), decided, mesh, terms.costs)
    where = {s.site: Point(s.dim, s.axes) for s in sums}
    if not where:
        return decided(jaxpr, plain)
    return with_sums_scattered(traced, jaxpr, plain.shardings, where, decided, mesh)


# -- by price -------------------------------------------------------------------------------------


def _fastest(
    name: str,
    traced: jax.stages.Traced,
    jaxpr: Any,
    plain: Picture,
    asked: Callable[[Any], Picture],
    terms: Terms,
) -> Way:
    """The way that is estimated to take least; of ways that take about as long, the one before.

    Args:
        name: of the step.
        traced, jaxpr: the step, its results pinned.
        plain: what XLA makes of it.
        asked: gives what XLA makes of a rewritten one.
        terms: to decide by.
    """
    assert terms.prices is not None
    cost = terms.prices.cost
    plain_s = estimate(plain.module, cost).step_s
    best, best_s, rings_s = None, plain_s, math.inf
    for outcome in _ways(traced, jaxpr, plain, terms):
        way = _finished(name, outcome, terms)
        after = asked(way.jaxpr)
        if _changed(plain, after):
            continue
        way_s = estimate(after.module, cost).step_s
        rings_s = min(rings_s, way_s) if way.plan.decisions else rings_s
        if way_s < (best_s if best else plain_s * (1 - _GAIN)):
            best, best_s = replace(way, step_s=way_s), way_s
    if best is not None:
        return best
    why = f"by price the step takes {plain_s * 1e3:.4g} ms without rings"
    why += f", {rings_s * 1e3:.4g} with" if rings_s < math.inf else ""
    return replace(_left_alone(name, jaxpr, plain, terms, why), step_s=plain_s)


def _ways(traced: jax.stages.Traced, jaxpr: Any, plain: Picture, terms: Terms) -> Iterator[Outcome]:
    """The ways that the rules know: by each matmul's price, with sums scattered, axis by axis."""
    first = _decided(jaxpr, plain.shardings, _knowing(plain, terms))
    yield first
    rings = [ring for sharing in first.sharings.values() for ring in sharing.rings]
    axes = dict.fromkeys(ring.first.ring.axis for ring in rings)
    for axis in axes if len(axes) > 1 else ():
        rejected = {
            m.dot.index: f"the step is faster without rings on {axis}"
            for ring in rings
            if ring.first.ring.axis == axis
            for m in ring.members
        }
        yield _decided(jaxpr, plain.shardings, _knowing(plain, terms), rejected)
    if explicit_axes(terms.mesh):
        return
    if first.known:
        why = dict.fromkeys((entry.site for entry in first.entries), "the step is faster without")
        yield _decided(jaxpr, plain.shardings, terms, why)
    every, _ = _entries(jaxpr, plain.shardings, replace(terms, prices=None))
    if where := points(every[1].values()):

        def decided(jaxpr: Any, picture: Picture) -> Outcome:
            return _decided(jaxpr, picture.shardings, _knowing(picture, terms))

        yield with_sums_scattered(traced, jaxpr, plain.shardings, where, decided, terms.mesh)


def _knowing(picture: Picture, terms: Terms) -> Terms:
    """The terms, with what of each collective is exposed where it is left whole."""
    assert terms.prices is not None
    waited_s = estimate(picture.module, terms.prices.cost).waited_s
    beside = collectives_of_sites(picture.module)

    def bare_s(ring: Ring) -> float | None:
        found = {place for m in ring.members for place in beside.get(m.dot.index, ())}
        if not found:
            return None
        return sum(waited_s.get(place, 0.0) for place in found) / ring.members[0].dot.runs

    return replace(terms, prices=replace(terms.prices, bare=bare_s))


# -- what stays as it is --------------------------------------------------------------------------


def _changed(plain: Picture, after: Picture) -> str:
    """How a step's results would differ from the plain step's, but for their values; "" if not."""
    pairs = zip(plain.results, after.results, strict=True)
    moved = [str(place) for place, (one, other) in enumerate(pairs) if one != other]
    if moved:
        return f"XLA would give result {', '.join(moved[:3])} another sharding"
    lost = {argument for _, argument in plain.donated - after.donated}
    return f"XLA would not donate argument {', '.join(sorted(lost)[:3])}" if lost else ""


def _left_alone(name: str, jaxpr: Any, plain: Picture, terms: Terms, why: str) -> Way:
    """The step without any ring."""
    dots = [dot.index for body in bodies(jaxpr) for dot in body.dots]
    outcome = _decided(jaxpr, plain.shardings, terms, dict.fromkeys(dots, why))
    return _finished(name, replace(outcome, known=()), terms)


# -- one way --------------------------------------------------------------------------------------


def _decided(
    jaxpr: Any,
    shardings: Mapping[Any, Shardings],
    terms: Terms,
    rejected: Mapping[int, str] | None = None,
) -> Outcome:
    """Decide on every matmul of a jaxpr, given how they lie, and rewrite it."""
    (entries, sharings), by_hand = _entries(jaxpr, shardings, terms, rejected)
    inside, manual = by_hand
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    rewritten, gathered = rewrite(jaxpr, {**sharings, **manual}, terms.mesh)
    found, mesh = bodies(jaxpr), terms.mesh
    known = [] if explicit_axes(mesh) else lookups(found, shardings, mesh, terms.costs)
    return Outcome(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


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


def _finished(name: str, outcome: Outcome, terms: Terms) -> Way:
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
