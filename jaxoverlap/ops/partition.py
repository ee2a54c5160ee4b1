"""Partition an operation: decide on rings as for a step, and write one device's program.

XLA's partitioner has settled the shardings of operands and results when it calls the operation. The
matmuls are decided on as the body of a step would be (`passes/planning`): rings, the matmuls that
share them, their cost. An operand of a ring may have to be gathered on other axes first: then the
operation requests it gathered, and XLA gathers it, once for all operations that read it so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxoverlap._jax.operations import specs
from jaxoverlap._jax.operations.options import compiler_option
from jaxoverlap._jax.operations.question import DeviceProgram, Operation, Partition, Wish
from jaxoverlap._util.expect import expect, expect_one_of
from jaxoverlap._util.text import short_source
from jaxoverlap.cost.find import cost_model, has_packaged_tables
from jaxoverlap.cost.groups import groups_of
from jaxoverlap.flags import is_gpu, options_for
from jaxoverlap.flags.required import BY_COPY, COPIES, why_one_stream
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

# The share of a collective, left whole, that XLA's own schedule leaves exposed: nobody can ask here
# how long it is for one of a step. With all of it rings were taken that saved less than they
# cost: a mixture's step on 8 H100s took 127.3 ms, plain 122.0, of whose 12.3 ms of collectives 4.1
# were exposed (simulated).
EXPOSED = 0.75


def partition(*, group: MatmulGroup) -> Partition:
    """Make the function that partitions a group of matmuls."""

    def answer(operation: Operation) -> DeviceProgram:
        avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operation.avals)
        told = operation.operands, operation.results, operation.wishes
        mesh = operation.mesh
        made, jaxpr, entries = _partitioned(group, avals, *told, mesh, _permutes_are_copies())
        operations.note(operation.number, entries, short_source(*operation.source))
        return DeviceProgram(jaxpr, made.operands, made.results, made.fulfilled)

    return answer


@functools.lru_cache(maxsize=512)  # layers are alike
def _partitioned(
    group: MatmulGroup,
    avals: tuple[Any, ...],
    operands: Told,
    results: Told,
    wishes: tuple[Wish, ...],
    mesh: Mesh,
    by_copy: bool,
) -> tuple[LocalGroup, Any, tuple[Decision | Skip, ...]]:
    """Decide on a group, and trace one device's part of it.

    Args:
        group: the matmuls.
        avals: the types of their operands, two for each matmul.
        operands, results: the shardings of these.
        wishes: what later operations would read gathered.
        mesh: the mesh.
        by_copy: whether permutes inside a process are copies.
    """
    terms = _terms(mesh, by_copy)
    (body,) = bodies(group.jaxpr(_unspread(group, avals)))
    told = _shardings(group, operands, results)
    entries, rings_by_body = decide([body], told, terms)
    made = local_group(body, told, rings_by_body[body.index], wishes, mesh)
    structs = specs.local_structs(mesh, avals, made.operands)
    return made, specs.trace_on(mesh, made, structs), entries


def _unspread(group: MatmulGroup, avals: Sequence[Any]) -> list[Any]:
    """Return the types of a group's operands, each once."""
    by_number = {}
    for i, product in enumerate(group.products):
        by_number |= {product.lhs: avals[2 * i], product.rhs: avals[2 * i + 1]}
    return [by_number[n] for n in sorted(by_number)]


def _shardings(group: MatmulGroup, operands: Told, results: Told) -> dict[int, Shardings]:
    """Return the shardings of each matmul; the terms of a sum have the sum's sharding."""
    number, told = itertools.count(), {}
    for output, result in zip(group.outputs, results, strict=True):
        for _ in output:
            i = next(number)
            told[i] = Shardings(operands[2 * i], operands[2 * i + 1], result)
    return told


def terms_now(mesh: Mesh) -> Terms:
    """Collect the terms of decisions on a mesh, in the compilation that is going on.

    Permutes are estimated as copies between the GPUs of a process only where XLA's options make
    them so (`compiler_options`); else they are NCCL's, and most rings lose against the collective.
    """
    return _terms(mesh, _permutes_are_copies())


def _permutes_are_copies() -> bool:
    return compiler_option(BY_COPY) in COPIES


@functools.lru_cache(maxsize=32)
def _terms(mesh: Mesh, by_copy: bool) -> Terms:
    cluster = cluster_of(mesh)
    cost = (
        cost_model(cluster) if cluster and has_packaged_tables(cluster) and is_gpu(mesh) else None
    )
    groups = groups_of(mesh, None)
    if not by_copy:
        groups = {axis: replace(group, by_copy=False) for axis, group in groups.items()}

    def exposed(ring: Ring) -> float | None:
        """Return a ring's collective's assumed exposed seconds: 0 for a sum over the network."""
        assert prices is not None
        network = groups[ring.axis].domains > 1
        if network and ring.kind in ("reduce_scatter", "all_reduce"):
            return 0.0
        return EXPOSED * prices.collective_s(ring)

    prices = cost and RingCosts(cost, groups, exposed)
    return Terms(axis_sizes=dict(mesh.shape), costs=axis_costs(mesh, None), prices=prices)


def compiler_options(mesh: Mesh, *, streams: Literal["one", "two"] = "one") -> dict[str, str]:
    """Return the XLA options for steps whose matmuls partition themselves.

        step = jax.jit(train_step, compiler_options=jaxoverlap.compiler_options(mesh))

    With them permutes inside a process are copies between its GPUs, and hops stay apart. Without
    them permutes are NCCL's, and most collectives are not decomposed.

    Args:
        mesh: the step's mesh; for one that is not of NVIDIA GPUs there are none.
        streams: "two" has XLA launch NVLink's collectives on a stream of their own, where the mesh
            spans several NVLink domains and JAXOVERLAP_STREAMS is not "one". XLA's own order, which
            no scheduler pass changes here, may hide less so: a layer of varlen on two hosts of two
            H100s takes 8% less time on two streams, on A100s 7% more. Simulate both.

    Raises:
        ValueError: if `streams` is neither.
    """
    expect(isinstance(mesh, Mesh), "mesh", mesh, "a jax.sharding.Mesh")
    expect_one_of("streams", streams, "one", "two")
    cluster = cluster_of(mesh) if streams == "two" else None
    return options_for(
        mesh, nvlink_stream=cluster is not None and why_one_stream(mesh, cluster) == ""
    )
