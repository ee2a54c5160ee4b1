"""Partition an operation: decide with the rules of the whole road, and write one device's part.

XLA's partitioner has settled how the operands and the results lie, and asks. The matmuls are
decided on as the body of a step would be (`passes/planning`): rings, who shares them, what they
cost. What a ring reads may have to be gathered on other axes before: then the operation asks for
operands that are gathered, and XLA gathers them, once for all operations that read them so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxoverlap._jax.operations import specs
from jaxoverlap._jax.operations.question import Operation, Partition, Partitioned, Wish
from jaxoverlap._util.text import short_source
from jaxoverlap.cost.find import cost_model, has_cost_model
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.flags import is_gpu
from jaxoverlap.hardware.topology import axis_costs, cluster_of
from jaxoverlap.ops.local import LocalGroup, local_group
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.jaxprs import bodies
from jaxoverlap.passes.analysis.matmul_group import MatmulGroup
from jaxoverlap.passes.analysis.partitioned import Shardings
from jaxoverlap.passes.planning.decide import decide
from jaxoverlap.passes.planning.profit import RingCosts
from jaxoverlap.passes.planning.ring_plan import Ring
from jaxoverlap.passes.planning.terms import Terms
from jaxoverlap.plan import operations
from jaxoverlap.plan.decisions import Decision, Skip

Told = tuple[Spec | None, ...]


def partition(*, group: MatmulGroup) -> Partition:
    """Make the function that partitions a group of matmuls."""

    def answer(operation: Operation) -> Partitioned:
        avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operation.avals)
        made, jaxpr, entries = _partitioned(
            group, avals, operation.operands, operation.results, operation.wishes, operation.mesh
        )
        operations.note(operation.number, entries, short_source(*operation.source))
        return Partitioned(jaxpr, made.operands, made.results, made.fulfilled)

    return answer


@functools.lru_cache(maxsize=512)  # layers are alike
def _partitioned(
    group: MatmulGroup,
    avals: tuple[Any, ...],
    operands: Told,
    results: Told,
    wishes: tuple[Wish, ...],
    mesh: Mesh,
) -> tuple[LocalGroup, Any, tuple[Decision | Skip, ...]]:
    """Decide on a group, and trace one device's part of it.

    Args:
        group: the matmuls.
        avals: the types of their operands, two for each matmul.
        operands, results: how these lie.
        wishes: what later operations would read gathered.
        mesh: the mesh.
    """
    (body,) = bodies(group.jaxpr(_unspread(group, avals)))
    terms = terms_on(mesh)
    told = _shardings(group, operands, results)
    entries, sharings = decide([body], told, terms)
    made = local_group(body, told, sharings[body.index], wishes, mesh)
    structs = specs.local_structs(mesh, avals, made.operands)
    return made, specs.trace_on(mesh, made, structs), entries


def _unspread(group: MatmulGroup, avals: Sequence[Any]) -> list[Any]:
    """Return the types of a group's operands, each once."""
    by_number = {}
    for i, product in enumerate(group.products):
        by_number |= {product.lhs: avals[2 * i], product.rhs: avals[2 * i + 1]}
    return [by_number[n] for n in sorted(by_number)]


def _shardings(group: MatmulGroup, operands: Told, results: Told) -> dict[int, Shardings]:
    """Return the shardings of each matmul; the terms of a sum lie as the sum."""
    number, told = itertools.count(), {}
    for output, result in zip(group.outputs, results, strict=True):
        for _ in output:
            i = next(number)
            told[i] = Shardings(operands[2 * i], operands[2 * i + 1], result)
    return told


@functools.lru_cache(maxsize=16)
def terms_on(mesh: Mesh) -> Terms:
    """Collect the terms of decisions on a mesh: what its links cost, and the prices of its GPUs."""
    cluster = cluster_of(mesh)
    cost = cost_model(cluster) if cluster and has_cost_model(cluster) and is_gpu(mesh) else None
    groups = groups_of(mesh, None)

    def bare(ring: Ring) -> float | None:
        """Take a sum over the network to hide: mostly a weight's gradient, which nobody awaits."""
        network = groups[ring.axis].domains > 1
        return 0.0 if network and ring.kind in ("reduce_scatter", "all_reduce") else None

    return Terms(
        axis_sizes=dict(mesh.shape),
        costs=axis_costs(mesh, None),
        prices=cost and RingCosts(cost, groups, bare),
    )
