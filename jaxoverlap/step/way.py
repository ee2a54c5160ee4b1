"""Make one way to run a step: decide on its matmuls, rewrite it, make its plan, price it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.partitioned import Picture, Shardings
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from jaxoverlap.passes.manual.decide import decide_manual
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.rewriting.embedding_gradients import lookups, scatter
from jaxoverlap.passes.rewriting.one_view import with_one_view
from jaxoverlap.passes.rewriting.prefetch import prefetch
from jaxoverlap.passes.rewriting.rewrite import rewrite
from jaxoverlap.passes.rewriting.rewriting import Rewriting
from jaxoverlap.passes.scheduling.estimate import estimate
from jaxoverlap.plan.plan import Plan, ScatteredSum
from jaxoverlap.plan.price import Price
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.layouts import LaidOut, described
from jaxoverlap.step.options import Options


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Attributes:
        plan: what is done with each matmul.
        jaxpr: the rewritten step.
        rings: its rings, except those written by hand.
        step_s: seconds of the step, estimated from its partitioned program; None where no price
            is known.
    """

    plan: Plan
    jaxpr: Any
    rings: tuple[Ring, ...]
    step_s: float | None = None


def decided(jaxpr: Any, shardings: Mapping[Any, Shardings], mesh: Mesh, terms: Terms) -> Rewriting:
    """Decide on every matmul of a jaxpr, given the shardings, and rewrite it."""
    all_bodies = bodies(jaxpr)
    entries, sharings = decide(all_bodies, shardings, terms)
    inside, manual = decide_manual(all_bodies, shardings, terms.requests)
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    rewritten, gathered = rewrite(jaxpr, {**sharings, **manual}, mesh)
    may = terms.lookups and not terms.explicit
    known = lookups(all_bodies, shardings, mesh, terms.costs) if may else []
    return Rewriting(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


def finished(
    step: StepContext, rewriting: Rewriting, options: Options, laid: LaidOut | None = None
) -> Way:
    """Finish a way: gather scanned weights a step ahead, and scatter the gradients of lookups."""
    rewritten, prefetched = rewriting.rewritten, 0
    if options.fsdp == "prefetch":
        rewritten, prefetched = prefetch(rewritten, rewriting.gathered)
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
    return Way(plan, with_one_view(scatter(rewritten, rewriting.known, step.mesh)), rings)


def with_price(
    step: StepContext, plain: Picture, laid: Picture, plan: Plan, step_s: float | None
) -> Plan:
    """Add to a plan what it saves by price, and the operations that partition themselves.

    Args:
        step: the step.
        plain: its partitioned program.
        laid: the same laid out, with whole rows and no rings.
        plan: the plan.
        step_s: the estimated seconds of the step as planned; None where no price is known.
    """
    operations = (e for body in bodies(step.jaxpr) for e in body.eqns if partitions_itself(e))
    partitioning = tuple(dict.fromkeys(map(described, operations)))
    plan = msgspec.structs.replace(plan, partitioning=partitioning)
    if step.cost is None or step_s is None:
        return plan
    as_it_is, laid_s = estimate(plain.module, step.cost), estimate(laid.module, step.cost).step_s
    saved_s = {}
    if plan.layouts and plan.layouts.changes:
        saved_s["layouts"] = as_it_is.step_s - laid_s
    if plan.cut or plan.rewrites:
        rings = any(d.num_chunks > 1 for d in plan.decisions)
        saved_s["halves" if plan.cut else "rings" if rings else "gathers"] = laid_s - step_s
    price = Price(
        plain_s=as_it_is.step_s,
        plain_exposed_s=as_it_is.exposed_s,
        step_s=step_s,
        saved_s=saved_s,
    )
    return msgspec.structs.replace(plan, price=price)
