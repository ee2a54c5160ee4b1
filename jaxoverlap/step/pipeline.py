"""Run a step's pipeline: find its mesh and cluster, choose a way, note what was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import jits
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.cost.model import CostModel
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.hardware.topology import axis_costs
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.passes.analysis.mesh import unread
from jaxoverlap.passes.analysis.sharding_rules import partitions_itself
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.requests import Requests
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.passes.scheduling.estimate import estimate
from jaxoverlap.plan.plan import Plan
from jaxoverlap.plan.price import Price
from jaxoverlap.step.check_plan import followed
from jaxoverlap.step.context import StepContext, prepare
from jaxoverlap.step.layouts import described
from jaxoverlap.step.options import Options
from jaxoverlap.step.ways import Way, overlapped


@dataclass(frozen=True)
class PassResult:
    """A step after the passes: its plan, its rewritten jaxpr and its estimate.

    Attributes:
        plan: what was done.
        jaxpr: the rewritten step.
        mesh: the mesh that it runs on.
        cluster: the mesh's GPUs, where they are known.
        cost: their cost model, where there is one.
        rings: the plan's rings, except those written by hand.
        step_s: seconds of the step, estimated before it is compiled; None where not known.
    """

    plan: Plan
    jaxpr: Any
    mesh: Mesh
    cluster: Cluster | None
    cost: CostModel | None
    rings: tuple[Ring, ...] = ()
    step_s: float | None = None


def run_passes(
    jitted: Any,
    call: jits.Call,
    args: tuple,
    kwargs: dict,
    options: Options,
    step: StepContext | None = None,
) -> PassResult:
    """Rewrite a step for arguments like these.

    Args:
        jitted: the jitted step.
        call, args, kwargs: its call with such arguments.
        options: what was asked for.
        step: its facts, where `prepare` has gathered them for options that differ in no fact.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster; if a plan was made for
            something else, or cannot be followed.
        RewriteError: if a pass fails.
        DisagreementError: as `prepare`.
    """
    step = step or prepare(call, options)
    if options.plan and options.plan.plain:
        jaxpr = call.params["jaxpr"]
        return PassResult(options.plan, jaxpr, step.mesh, step.cluster, step.cost)
    traced = None if unread(step.mesh) else jitted.trace(*args, **kwargs)
    done = overlapped(step, traced, _terms(step, options), options)
    plan = done.plan if options.plan else _with_price(step, done)  # a plan brings its own price
    plan = msgspec.structs.replace(plan, made_for=step.origin)
    if options.plan:
        plan = followed(options.plan, plan)
    return PassResult(plan, done.jaxpr, step.mesh, step.cluster, step.cost, done.rings, done.step_s)


def _terms(step: StepContext, options: Options) -> Terms:
    """Collect the terms of all decisions on a step."""
    return Terms(
        axis_sizes=dict(step.mesh.shape),
        requests=Requests(options.skip, options.granularity, options.choices, options.alone),
        costs=axis_costs(step.mesh, step.named),
        prices=step.cost and RingCosts(step.cost, groups_of(step.mesh, step.named)),
        prefetch=options.fsdp == "prefetch",
        rings=options.rings,
        lookups=options.lookups,
        explicit=step.explicit,
        unread=unread(step.mesh),
    )


def _with_price(step: StepContext, way: Way) -> Plan:
    """Add to a way's plan what it saves by price, and the operations that partition themselves."""
    operations = (at for at in equations(step.jaxpr) if partitions_itself(at[0]))
    partitioning = tuple(dict.fromkeys(described(*at) for at in operations))
    plan = msgspec.structs.replace(way.plan, partitioning=partitioning)
    if step.cost is None or way.step_s is None or way.plain is None or way.laid is None:
        return plan
    as_it_is = estimate(way.plain.module, step.cost)
    laid_s = as_it_is.step_s  # without pins the two are one program
    if way.laid is not way.plain:
        laid_s = estimate(way.laid.module, step.cost).step_s
    saved_s = {}
    if plan.layouts and plan.layouts.changes:
        saved_s["layouts"] = as_it_is.step_s - laid_s
    if plan.cut or plan.rewrites:
        rings = any(d.num_chunks > 1 for d in plan.decisions)
        saved_s["halves" if plan.cut else "rings" if rings else "gathers"] = laid_s - way.step_s
    price = Price(
        plain_s=as_it_is.step_s,
        plain_exposed_s=as_it_is.exposed_s,
        step_s=way.step_s,
        saved_s=saved_s,
    )
    return msgspec.structs.replace(plan, price=price)
