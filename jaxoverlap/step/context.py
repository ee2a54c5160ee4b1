"""Gather the facts of a step before anything is decided: its mesh, its cluster, its cost model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxoverlap._jax import compat, jits
from jaxoverlap.cost.find import cost_model, has_packaged_tables
from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags import is_gpu
from jaxoverlap.flags.required import why_one_stream
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.hardware.pods import is_pod
from jaxoverlap.hardware.topology import check_is_pods, cluster_of, processes_of_one
from jaxoverlap.passes.analysis.einsum import Spec
from jaxoverlap.passes.analysis.errors import UserError
from jaxoverlap.passes.analysis.flatten import flatten
from jaxoverlap.passes.analysis.jaxprs import equations
from jaxoverlap.passes.analysis.mesh import MeshError, MutableError, explicit_axes, find_mesh
from jaxoverlap.passes.analysis.partitioned import SpmdProgram, partitioned
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.estimation.estimate import Estimate, estimate
from jaxoverlap.passes.planning.entries import described
from jaxoverlap.passes.rewriting.prefetch import joined_bytes
from jaxoverlap.plan.edits import DropTypes
from jaxoverlap.plan.plan import MadeFor
from jaxoverlap.step.check_plan import argument_shardings, check, cluster_for, made_for
from jaxoverlap.step.options import Options

_CALLBACKS = ("debug_print", "debug_callback", "pure_callback", "io_callback")
_AT_MOST = 2  # steps: each holds its partitioned programs
# The flattened step, and its answers.
_known: jits.Cache[tuple[EditedStep, dict[Hashable, Any]]] = jits.Cache()


@dataclass(frozen=True)
class StepContext:
    """A step before the passes: its jaxpr, mesh, cluster and cost model.

    Attributes:
        call: its call, as its jit sees it.
        edited: the step, flattened, and without shardings in its types if `typed` is another one.
        cluster, cost: the mesh's GPUs, and their cost model; None where not known.
        named: the cluster, where the user or the plan names it.
        origin: what a plan for the step is made for.
        one_stream: why NVLink's collectives cannot have a stream of their own; empty if they can,
            None where the GPUs have but one kind of link, or no price.
        outermost: whether it is called by itself, and not under `jax.grad`, `vmap` or `jit`.
        typed: a step on an explicit mesh with its types, where `jaxpr` has none.
        earlier: the step before edits that the search is not about, the one as written first, each
            with the name of what was done to it.
        notes: what was found out about these, in words.
        answers: what was found out about it, by what was asked (`once`); calls of one step share
            it, so nothing in it may hold a call, whose arguments would stay in memory.
    """

    call: jits.Call
    edited: EditedStep
    cluster: Cluster | None
    cost: CostModel | None
    named: Cluster | None
    origin: MadeFor
    outermost: bool
    one_stream: str | None = None
    typed: StepContext | None = None
    earlier: tuple[tuple[str, StepContext], ...] = ()
    notes: tuple[str, ...] = ()
    answers: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def jaxpr(self) -> Any:
        """The step's jaxpr."""
        return self.edited.jaxpr

    @property
    def mesh(self) -> Mesh:
        """The mesh that it runs on; its axes are automatic if types were dropped."""
        return self.edited.mesh

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of its jit equation."""
        return self.call.params

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced step."""
        return self.call.traced()

    @property
    def plain(self) -> SpmdProgram:
        """The partitioned program of the step as it is, with the shardings of its matmuls."""
        return self.once("plain", lambda: self.partitioned(self.jaxpr))

    def partitioned(self, jaxpr: Any, *, ask: bool = True) -> SpmdProgram:
        """Partition what the step becomes; `ask` and errors as in `analysis.partitioned`."""
        return partitioned(self.traced, jaxpr, self.mesh, ask=ask)

    def partitioned_after(self, edited: EditedStep) -> SpmdProgram:
        """Partition the step after edits; errors as in `analysis.partitioned`."""
        spmd = partitioned(self.traced, edited.jaxpr, edited.mesh, ask=False)
        return replace(spmd, joined_bytes=joined_bytes(edited))

    def once[T](self, question: Hashable, find: Callable[[], T]) -> T:
        """Return the answer to a question, computed on the first call and cached.

        Candidates with other options, and a tuner's, need the same answers about one step again; of
        two threads with one question one waits.
        """
        with self.answers.setdefault(("lock", question), threading.RLock()):
            if question not in self.answers:
                self.answers[question] = find()
            return self.answers[question]

    def estimate(self, program: SpmdProgram, *, nvlink_stream: bool | None = None) -> Estimate:
        """Estimate a partitioned program of the step, whose prices are known.

        Args:
            program: the program.
            nvlink_stream: whether NVLink's collectives have a stream of their own; None: if they
                can.
        """
        assert self.cost is not None
        if nvlink_stream is None:
            nvlink_stream = self.one_stream == ""
        return estimate(
            program.module,
            self.cost,
            nvlink_stream=nvlink_stream,
            joined_bytes=program.joined_bytes,
        )

    def seconds(self, program: SpmdProgram) -> float | None:
        """Return the estimated seconds of a partitioned program; None where no price is known."""
        return None if self.cost is None else self.estimate(program).step_s

    @property
    def inferred(self) -> bool:
        """Whether the types that JAX inferred are left to the partitioner."""
        return any(isinstance(edit, DropTypes) and edit.inferred for edit in self.edited.edits)

    @property
    def explicit(self) -> tuple[str, ...]:
        """The axes whose shardings are part of the arrays' types."""
        return explicit_axes(self.mesh)


def prepare(call: jits.Call, options: Options) -> StepContext:
    """Gather the facts of a step before anything is decided.

    Raises:
        NoMeshError: if the step has no mesh.
        MutableError: if it takes mutable arrays.
        ValueError: if it has two, or one that does not fit the cluster; if the plan was made for
            something else.
        DisagreementError: if the cluster is not named, and a process of the mesh does not say on
            which host it runs.
    """
    params, mesh = call.params, mesh_of(call)
    if is_pod(mesh):
        _refuse_callbacks(call)
    if compat.takes_mutable(params["jaxpr"]):
        raise MutableError(
            f"{call.name} reads or writes mutable arrays (jax.Ref) from outside; give it arrays, "
            "and return what changes",
            (mesh,),
        )
    jaxpr = flatten(params["jaxpr"], take_over=options.operations == "take over")
    if options.cluster is None and options.prices is None:
        cluster_of(mesh, options.agree_within_s)  # waits for the processes, once
    priced = options.prices and options.prices.cluster
    named = options.cluster or priced or (cluster_for(options.plan, mesh) if options.plan else None)
    _check_cluster(params["name"], mesh, named)
    if options.cluster is not None:
        try:
            check_is_pods(mesh, options.cluster)
        except ValueError as error:
            raise UserError(str(error)) from error
    origin = made_for(call, mesh, named)
    if options.plan:
        check(options.plan, params["name"], origin, mesh, call, jaxpr)
    cluster = named or cluster_of(mesh)
    cost = options.prices
    if cost is None and cluster and has_packaged_tables(cluster):
        cost = cost_model(cluster)
    arguments = tuple(map(_spec, jaxpr.invars, argument_shardings(call)))
    outermost = jits.at_top_level()
    one_stream = _one_stream(mesh, cluster, options) if cost and cluster else None
    facts = (repr(origin), repr(cost), one_stream, outermost, options.operations)
    key = (params["jaxpr"], mesh, arguments, *facts)
    if (known := _known.get(key)) is None:
        known = EditedStep(jaxpr, mesh, arguments), {}
        _known.put(key, known, at_most=_AT_MOST)
    edited, answers = known
    return StepContext(
        call=call,
        edited=edited,
        cluster=cluster,
        cost=cost,
        named=named,
        origin=origin,
        outermost=outermost,
        one_stream=one_stream,
        answers=answers,
    )


def _refuse_callbacks(call: jits.Call) -> None:
    """Refuse a step for a pod that calls back into Python: JAX looks for a GPU that runs it.

    Raises:
        UserError: if it does; it says where.
    """
    for eqn, around in equations(call.params["jaxpr"]):
        if eqn.primitive.name in _CALLBACKS:
            raise UserError(
                f"{call.name} calls back into Python, by {described(eqn, around)}, and nothing "
                "runs on GPUs that are not there: leave jax.debug.print, pure_callback and "
                "io_callback out of a step that is compiled for a pod_mesh"
            )


def _one_stream(mesh: Mesh, cluster: Cluster, options: Options) -> str | None:
    """Return why all collectives share a stream; "" if they need not, None: one kind of link."""
    try:
        return why_one_stream(mesh, cluster, options.streams)
    except ValueError as error:
        raise UserError(str(error)) from error


def _spec(var: Any, sharding: Any) -> Spec | None:
    """Return the mesh axes on each dim of an argument; None where its sharding does not say it."""
    if not isinstance(sharding, NamedSharding) or not hasattr(var.aval, "ndim"):
        return None
    return compat.axes_by_dim(sharding.spec, var.aval.ndim)


def mesh_of(call: jits.Call) -> Mesh:
    """Find the mesh of a step by its call.

    Raises:
        NoMeshError: if there is none.
        MeshError: if there are two, or if it is of TPUs.
    """
    params = call.params
    jaxpr = params["jaxpr"]
    positions = (*params["in_shardings"], *params["out_shardings"], params["ctx_mesh"])
    mesh = find_mesh(params["name"], (*call.flat, *jaxpr.consts), positions, jaxpr)
    if mesh.devices.flat[0].platform == "tpu":
        raise MeshError(f"{call.name} runs on TPUs, which are not supported", (mesh,))
    return mesh


def _check_cluster(name: str, mesh: Mesh, cluster: Cluster | None) -> None:
    if cluster is not None and mesh.size != cluster.num_devices:
        raise UserError(
            f"{name} runs on a mesh of {mesh.size} devices ({dict(mesh.shape)}), but cluster "
            f"{cluster} has {cluster.num_devices}: make the mesh of the cluster's "
            "size, or name the cluster that the mesh is for"
        )
    if (
        cluster is not None
        and is_gpu(mesh)
        and (num_processes := processes_of_one(mesh, cluster)) > 1
    ):
        raise UserError(
            f"{name} runs on a mesh where {cluster.gpus_per_process} GPUs that cluster {cluster} "
            f"has in one process are in {num_processes}, which cannot copy from each other: say "
            "after a slash how many processes a host runs, as in 'h100-sxm:8x8/8', or in "
            f"Cluster(processes_per_host=); here {cluster.processes_per_host * num_processes}"
        )
