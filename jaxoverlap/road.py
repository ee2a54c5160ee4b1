"""The road of a step: find its mesh, propagate, decide, rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import Mesh

from jaxoverlap import _compat
from jaxoverlap.cluster import Cluster
from jaxoverlap.cost import CostModel, Group, cost_model, has_cost_model
from jaxoverlap.passes.decide import decide
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
    unread,
)
from jaxoverlap.passes.prefetch import prefetch
from jaxoverlap.passes.propagate import Shardings, propagate
from jaxoverlap.passes.rewrite import rewrite
from jaxoverlap.passes.scattered import Outcome, scatter_sums
from jaxoverlap.passes.worth import Prices
from jaxoverlap.plan import Plan, Variant
from jaxoverlap.scheduler import Scheduler

OnError = Literal["raise", "plain"]
FSDP = Literal["prefetch", "ring"]


@dataclass(frozen=True)
class Options:
    """What `overlap` was asked for."""

    cluster: Cluster | None
    skip: tuple[str, ...]
    on_error: OnError
    granularity: Variant | Mapping[str, Variant] | None
    fsdp: FSDP
    schedule: Scheduler | None


@dataclass(frozen=True)
class Travelled:
    """A step at the end of the road.

    Attributes:
        plan: what was done.
        jaxpr: the rewritten step.
        mesh: the one that it runs on.
        cluster: the mesh's GPUs, where they are known.
        cost: what they take, where that is known.
    """

    plan: Plan
    jaxpr: Any
    mesh: Mesh
    cluster: Cluster | None
    cost: CostModel | None


def travel(
    jitted: Any, call: _compat.Call, args: tuple, kwargs: dict, options: Options
) -> Travelled:
    """Rewrite a step for arguments like these.

    Decides twice where sums of activations may stay scattered.

    Raises:
        NoMeshError: if the step has no mesh.
        ValueError: if it has two, or one that does not fit the cluster.
        RewriteError: if a pass fails.
    """
    params = call.params
    jaxpr = flatten(params["jaxpr"])
    places = (*params["in_shardings"], *params["out_shardings"], params["ctx_mesh"])
    mesh = find_mesh(params["name"], (*call.flat, *jaxpr.consts), places, jaxpr)
    _check_cluster(params["name"], mesh, options.cluster)
    reason, costs = unread(mesh), axis_costs(mesh, options.cluster)
    cluster = options.cluster or cluster_of(mesh)
    cost = cost_model(cluster) if cluster and has_cost_model(cluster) else None
    prices = cost and Prices(cost, _groups(mesh, options.cluster))

    def decided(jaxpr: Any, shardings: Mapping[Any, Shardings]) -> Outcome:
        return _decided(jaxpr, shardings, mesh, costs, prices, reason, options)

    if reason:
        outcome = decided(jaxpr, {})
    else:
        traced = jitted.trace(*args, **kwargs)
        outcome = decided(jaxpr, propagate(traced, jaxpr))
        outcome = scatter_sums(traced, outcome, decided, mesh, costs)
    rewritten, prefetched = outcome.rewritten, 0
    if options.fsdp == "prefetch":
        rewritten, prefetched = prefetch(rewritten, outcome.gathered)
    plan = Plan(
        step=params["name"],
        mesh=dict(mesh.shape),
        entries=outcome.entries,
        prefetched=prefetched,
        scattered=tuple(lookup.entry(mesh.shape) for lookup in outcome.known),
    )
    return Travelled(plan, scatter(rewritten, outcome.known, mesh), mesh, cluster, cost)


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
        prefetch=options.fsdp == "prefetch",
        costs=costs,
        prices=prices,
    )
    inside, by_hand = decide_manual(
        found, shardings, skip=options.skip, granularity=options.granularity
    )
    entries = tuple(inside.get(entry.site, entry) for entry in entries)
    rewritten, gathered = rewrite(jaxpr, {**sharings, **by_hand}, mesh)
    known = [] if explicit_axes(mesh) else lookups(found, shardings, mesh, costs)
    return Outcome(jaxpr, shardings, entries, sharings, known, rewritten, gathered)


def _groups(mesh: Mesh, cluster: Cluster | None) -> dict[str, Group]:
    """Who takes part in a collective along each mesh axis; permutes in one process are copies."""
    spread, processes = axis_domains(mesh, cluster), axis_processes(mesh)
    return {
        axis: Group(size, spread[axis], processes[axis] == 1, communicator=size)
        for axis, size in mesh.shape.items()
    }


def _check_cluster(name: str, mesh: Mesh, cluster: Cluster | None) -> None:
    if cluster is not None and mesh.size != cluster.num_devices:
        raise ValueError(
            f"{name} runs on a mesh of {mesh.size} devices ({dict(mesh.shape)}), but cluster "
            f"{cluster} has {cluster.num_devices}: make the mesh of the cluster's "
            "size, or name the cluster that the mesh is for"
        )
