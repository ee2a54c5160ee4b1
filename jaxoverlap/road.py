"""The road of a step: find its mesh, propagate, decide, rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax.sharding import Mesh

from jaxoverlap import _compat
from jaxoverlap.cluster import Cluster
from jaxoverlap.cost import CostModel, Group, cost_model, has_cost_model
from jaxoverlap.flags import is_gpu
from jaxoverlap.granularity import Site, site_of
from jaxoverlap.made_for import check, cluster_for, followed, made_for
from jaxoverlap.passes.decide import decide, source_of
from jaxoverlap.passes.errors import UserError
from jaxoverlap.passes.flatten import flatten
from jaxoverlap.passes.jaxprs import bodies
from jaxoverlap.passes.lookups import lookups, scatter
from jaxoverlap.passes.manual import decide_manual
from jaxoverlap.passes.mesh import (
    axis_costs,
    axis_domains,
    axis_processes,
    cluster_of,
    explicit_axes,
    find_mesh,
    processes_of_one,
    unread,
)
from jaxoverlap.passes.partitioned import Picture, Shardings, partitioned
from jaxoverlap.passes.prefetch import prefetch
from jaxoverlap.passes.results import open_results, pin_results
from jaxoverlap.passes.rewrite import rewrite
from jaxoverlap.passes.rings import Ring
from jaxoverlap.passes.scattered import Decide, Outcome, Point, scatter_sums, with_sums_scattered
from jaxoverlap.passes.worth import Prices
from jaxoverlap.plan import FSDP, MadeFor, Plan, ScatteredSum, Variant
from jaxoverlap.scheduler import Scheduler

OnError = Literal["raise", "plain"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `overlap` was asked for, and what a search may ask for beside.

    Attributes:
        cluster, skip, on_error, granularity, fsdp, schedule: as in `overlap`.
        choices: how the pieces of single rings travel, by the site that a ring is named after;
            "plain" leaves all the matmuls of a ring alone. What is not named goes as always.
        alone: the sites of matmuls that have no part in any ring.
        sums: the sums of activations that stay scattered; None to take what leaves less exposed.
        xla_options: compiler options, beyond the user's own and those that a pod needs; None for
            those that rings need.
        plan: the plan that all of these come from.
        agree_within_s, never_slower: as in `overlap`.
    """

    cluster: Cluster | None = None
    skip: tuple[str, ...] = ()
    on_error: OnError = "raise"
    granularity: Variant | Mapping[str, Variant] | None = None
    fsdp: FSDP = "prefetch"
    schedule: Scheduler | None = None
    choices: Mapping[int, Variant] = field(default_factory=dict)
    alone: frozenset[int] = frozenset()
    sums: tuple[ScatteredSum, ...] | None = None
    xla_options: Mapping[str, str] | None = None
    plan: Plan | None = None
    agree_within_s: float = 20.0
    never_slower: bool = True

    @classmethod
    def of(cls, plan: Plan, **others: Any) -> Options:
        """What makes a step follow a plan; `others` are what that does not say."""
        at = plan.schedule
        return cls(
            fsdp=plan.fsdp,
            schedule=at and Scheduler(slack=at.slack, in_flight=at.in_flight),
            choices=plan.choices,
            alone=frozenset(skip.site for skip in plan.skips if skip.chosen),
            sums=plan.sums,
            xla_options=plan.xla_options,
            plan=plan,
            **others,
        )


@dataclass(frozen=True)
class Travelled:
    """A step at the end of the road.

    Attributes:
        plan: what was done.
        jaxpr: the rewritten step.
        mesh: the one that it runs on.
        cluster: the mesh's GPUs, where they are known.
        cost: what they take, where that is known.
        rings: that the plan has, but those written by hand.
    """

    plan: Plan
    jaxpr: Any
    mesh: Mesh
    cluster: Cluster | None
    cost: CostModel | None
    rings: tuple[Ring, ...] = ()


@dataclass(frozen=True)
class Start:
    """A step at the beginning of the road.

    Attributes:
        jaxpr: the step, flattened.
        mesh, cluster, cost: as in `Travelled`.
        named: the cluster, where the user or the plan names it.
        origin: what a plan for it is made for.
    """

    jaxpr: Any
    mesh: Mesh
    cluster: Cluster | None
    cost: CostModel | None
    named: Cluster | None
    origin: MadeFor


def begin(call: _compat.Call, options: Options) -> Start:
    """What is known of a step before anything is decided.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster; if the plan was made for
            something else.
        DisagreementError: if the cluster is not named, and a process of the mesh does not say on
            which host it runs.
    """
    params, jaxpr, mesh = call.params, flatten(call.params["jaxpr"]), mesh_of(call)
    if options.cluster is None:
        cluster_of(mesh, options.agree_within_s)  # waits for the processes, once
    named = options.cluster or (cluster_for(options.plan, mesh) if options.plan else None)
    _check_cluster(params["name"], mesh, named)
    origin = made_for(call, mesh, named)
    if options.plan:
        check(options.plan, params["name"], origin, mesh, call, jaxpr)
    cluster = named or cluster_of(mesh)
    cost = cost_model(cluster) if cluster and has_cost_model(cluster) else None
    return Start(jaxpr, mesh, cluster, cost, named, origin)


def travel(
    jitted: Any, call: _compat.Call, args: tuple, kwargs: dict, options: Options
) -> Travelled:
    """Rewrite a step for arguments like these.

    Decides twice where sums of activations may stay scattered.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster; if a plan was made for
            something else, or cannot be followed.
        RewriteError: if a pass fails.
    """
    start = begin(call, options)
    name, jaxpr, mesh = call.params["name"], start.jaxpr, start.mesh
    if options.plan and options.plan.plain:
        return Travelled(options.plan, call.params["jaxpr"], mesh, start.cluster, start.cost)
    reason, costs = unread(mesh), axis_costs(mesh, start.named)
    prices = start.cost and Prices(start.cost, groups_of(mesh, start.named))

    def decided(jaxpr: Any, shardings: Mapping[Any, Shardings]) -> Outcome:
        return _decided(jaxpr, shardings, mesh, costs, prices, reason, options)

    if reason:
        outcome = decided(jaxpr, {})
    else:
        traced = jitted.trace(*args, **kwargs)
        plain = partitioned(traced, jaxpr, mesh)
        jaxpr = pin_results(jaxpr, open_results(call.params, plain.results, mesh), mesh)
        outcome = _outcome(traced, jaxpr, plain, decided, mesh, costs, options)
    rewritten, prefetched = outcome.rewritten, 0
    if options.fsdp == "prefetch":
        rewritten, prefetched = prefetch(rewritten, outcome.gathered)
    plan = Plan(
        step=name,
        mesh=dict(mesh.shape),
        entries=outcome.entries,
        prefetched=prefetched,
        scattered=tuple(lookup.entry(mesh.shape) for lookup in outcome.known),
        sums=tuple(ScatteredSum(site=i, dim=p.dim, axes=p.axes) for i, p in outcome.sums.items()),
        fsdp=options.fsdp,
        made_for=start.origin,
    )
    if options.plan:
        plan = followed(options.plan, plan)
    rewritten = scatter(rewritten, outcome.known, mesh)
    rings = tuple(ring for sharing in outcome.sharings.values() for ring in sharing.rings)
    return Travelled(plan, rewritten, mesh, start.cluster, start.cost, rings)


def sites_of(
    jitted: Any, call: _compat.Call, args: tuple, kwargs: dict, options: Options
) -> tuple[Site, ...]:
    """All rings that a step could have, for a model of them; on a cluster with a cost model.

    Raises:
        As `travel`.
    """
    every = replace(options, granularity=Variant(), choices={}, plan=None)
    done = travel(jitted, call, args, kwargs, every)
    assert done.cost is not None
    groups = groups_of(done.mesh, options.cluster)
    prices = Prices(done.cost, groups)
    found = [
        site_of(ring, source_of(ring.members[0].dot), groups[ring.first.ring.axis])
        for ring in done.rings
        if prices.knows(ring)
    ]
    return tuple(sorted(found, key=lambda site: site.number))


def mesh_of(call: _compat.Call) -> Mesh:
    """The mesh of a step, as it is called.

    Raises:
        NoMeshError: if there is none.
        ValueError: if there are two.
    """
    params = call.params
    jaxpr = params["jaxpr"]
    places = (*params["in_shardings"], *params["out_shardings"], params["ctx_mesh"])
    return find_mesh(params["name"], (*call.flat, *jaxpr.consts), places, jaxpr)


def _outcome(
    traced: Any,
    jaxpr: Any,
    plain: Picture,
    decided: Decide,
    mesh: Mesh,
    costs: Mapping[str, float],
    options: Options,
) -> Outcome:
    """What is decided: with the sums scattered that are asked for, or as leaves less exposed."""
    if options.sums is None:
        return scatter_sums(traced, decided(jaxpr, plain.shardings), decided, mesh, costs)
    where = {s.site: Point(s.dim, s.axes) for s in options.sums}
    if not where:
        return decided(jaxpr, plain.shardings)
    return with_sums_scattered(traced, jaxpr, plain.shardings, where, decided, mesh)


def _decided(
    jaxpr: Any,
    shardings: Mapping[Any, Shardings],
    mesh: Mesh,
    costs: Mapping[str, float],
    prices: Prices | None,
    reason: str | None,
    options: Options,
) -> Outcome:
    """Decide on every matmul of a jaxpr, given how they lie, and rewrite it."""
    found = bodies(jaxpr)
    entries, sharings = decide(
        found,
        shardings,
        dict(mesh.shape),
        skip=options.skip,
        unread=reason,
        granularity=options.granularity,
        choices=options.choices,
        alone=options.alone,
        prefetch=options.fsdp == "prefetch",
        costs=costs,
        prices=prices,
    )
    inside, by_hand = decide_manual(
        found,
        shardings,
        skip=options.skip,
        granularity=options.granularity,
        choices=options.choices,
        alone=options.alone,
    )
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    rewritten, gathered = rewrite(jaxpr, {**sharings, **by_hand}, mesh)
    known = [] if explicit_axes(mesh) else lookups(found, shardings, mesh, costs)
    return Outcome(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


def groups_of(mesh: Mesh, cluster: Cluster | None) -> dict[str, Group]:
    """Who takes part in a collective along each mesh axis; permutes in one process are copies."""
    spread, processes = axis_domains(mesh, cluster), axis_processes(mesh, cluster)
    return {
        axis: Group(size, spread[axis], processes[axis] == 1, communicator=size)
        for axis, size in mesh.shape.items()
    }


def _check_cluster(name: str, mesh: Mesh, cluster: Cluster | None) -> None:
    if cluster is not None and mesh.size != cluster.num_devices:
        raise UserError(
            f"{name} runs on a mesh of {mesh.size} devices ({dict(mesh.shape)}), but cluster "
            f"{cluster} has {cluster.num_devices}: make the mesh of the cluster's "
            "size, or name the cluster that the mesh is for"
        )
    if cluster is not None and is_gpu(mesh) and (found := processes_of_one(mesh, cluster)) > 1:
        raise ValueError(
            f"{name} runs on a mesh where {cluster.gpus_per_process} GPUs that cluster {cluster} "
            f"has in one process are in {found}, which cannot copy from each other: say after a "
            "slash how many processes a host runs, as in 'h100-sxm:8x8/8', or in "
            f"Cluster(processes_per_host=); here {cluster.processes_per_host * found}"
        )
