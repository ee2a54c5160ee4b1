"""Make the program of one signature of a step: rewrite it, add options, agree with processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxoverlap._jax import jits, partitioner
from jaxoverlap._jax.jobs import job_of
from jaxoverlap._util.text import warn
from jaxoverlap.cost.model import CostModel
from jaxoverlap.flags import is_gpu
from jaxoverlap.hardware import pods
from jaxoverlap.hardware.cluster import Cluster
from jaxoverlap.hardware.topology import cluster_of
from jaxoverlap.passes.analysis.errors import RewriteError, UserError, own_faults
from jaxoverlap.passes.analysis.mesh import MeshError
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting.prefetch import joined_bytes
from jaxoverlap.passes.scheduling.scheduler import Scheduler, SchedulerPass, scheduler_pass_for
from jaxoverlap.plan.plan import Plan, Schedule
from jaxoverlap.plan.speedup import CandidateName, Speedup
from jaxoverlap.step.check_plan import facts_of
from jaxoverlap.step.context import StepContext, mesh_of
from jaxoverlap.step.notices import (
    Notice,
    no_mesh,
    not_compiled,
    not_rewritten,
    repaired,
    unpriced,
)
from jaxoverlap.step.options import Options
from jaxoverlap.step.pipeline import PassResult, Search, is_unpriced, run_passes
from jaxoverlap.step.processes import Agreement, DisagreementError, meet, processes_of
from jaxoverlap.step.trial import Request

OFF_VARIABLE = "JAXOVERLAP"  # "off" runs every step as it is


@dataclass(frozen=True)
class StepProgram:
    """The program that one signature of a step became.

    Attributes:
        plan: what was done; None where the step runs as it is.
        params: the jit equation's parameters, with the rewritten jaxpr and options for it.
        inner: the same without our options, which only an outermost jit may have.
        source: the parameters as traced, to run the step as it is.
        cluster: the cluster that it runs on, where that is known.
        ordering: the scheduler pass that it is compiled with.
        agreement: what the processes have still to agree on; None where they have, or there is one.
        notice: why nothing is overlapped, or what the step loses as written; None where neither is
            so, or nothing was requested.
        error: why there is no plan; None where there is one, or where another process failed.
        cost: the cost model of its cluster, where there is one.
        undecided: whether it has still to be compared with the step as it is, by that model.
        close: the plan and the step of other candidates that it is compared with, by name.
        speedup: the result of that comparison, where it was made before any compilation.
        compiled: whether XLA has compiled it, for a call of the step.
        on_pod: whether its mesh is of GPUs that are not there.
    """

    plan: Plan | None
    params: dict[str, Any]
    inner: dict[str, Any]
    source: dict[str, Any]
    cluster: Cluster | None = None
    ordering: SchedulerPass | None = None
    agreement: Agreement | None = None
    notice: Notice | None = None
    error: MeshError | RewriteError | None = None
    cost: CostModel | None = None
    undecided: bool = False
    close: Mapping[CandidateName, tuple[Plan, EditedStep]] = field(default_factory=dict)
    speedup: Speedup | None = None
    compiled: bool = False
    on_pod: bool = False

    @property
    def named_params(self) -> dict[str, Any]:
        """The parameters, under the name that the scheduler pass looks for."""
        return self.ordering.named(self.params) if self.ordering else self.params

    def compiling(self) -> AbstractContextManager[Any]:
        """Return the context in which XLA compiles it: the scheduler pass is at work in it."""
        return self.ordering.compiling() if self.ordering else contextlib.nullcontext()


def is_off() -> bool:
    """Return whether the environment variable switches `overlap()` off for all steps.

    Raises:
        ValueError: if the variable is neither "on" nor "off".
    """
    value = os.environ.get(OFF_VARIABLE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{OFF_VARIABLE}={value}: expected 'on' or 'off'")
    return value == "off"


def step_program(
    call: jits.Call,
    options: Options,
    search: Search,
    find_plan: Callable[[], Plan] | None = None,
) -> StepProgram:
    """Rewrite a step for arguments like these; or leave it as it is.

    It stays as it is where it does not run on one mesh of several devices, where it takes mutable
    arrays, where the rewrite fails, if `options` allow that, and where the environment variable
    JAXOVERLAP is "off".

    Args:
        call: the step, and how it is called.
        options: the user's options.
        search: searches for the edits, if no plan is followed.
        find_plan: finds the plan to follow, which then says most of `options`.

    Raises:
        UserError: as `run_passes`; a MeshError only if a plan is given, which is for one mesh.
        RewriteError: if the rewrite fails, unless `options` allow that.
        ValueError, DisagreementError: as `find_plan`; ValueError also as `is_off`.
    """
    params, name = call.params, call.name
    if is_off():
        text = f"{name} runs as it is: {OFF_VARIABLE}=off asks for it"
        error = UserError(text)
        agreement = _failed(call, error, plain=True)
        return replace(_plain(params), agreement=agreement, notice=Notice(text, text), error=error)
    try:
        if find_plan is not None:
            with own_faults(name, ValueError, DisagreementError):
                options = replace(options, plan=find_plan())
        return _rewritten(call, options, search)
    except MeshError as error:
        if options.plan is not None:
            raise
        return _on_no_one_mesh(call, error, options)
    except RewriteError as error:
        if options.on_error == "raise":
            raise
        text = f"{name} runs without overlap: {error.without_plain}"
        agreement = _failed(call, error, plain=True)
        return replace(_plain(params), agreement=agreement, notice=Notice(text, text), error=error)


def _on_no_one_mesh(call: jits.Call, error: MeshError, options: Options) -> StepProgram:
    """Return the program of a step that no edit may change: the step as it is.

    It is on no mesh, on several or on one device, or takes mutable arrays.

    Where its meshes are of the same devices, those are its cluster; for a pod it is compiled with
    the options that a pod needs.
    """
    devices = {frozenset(mesh.devices.flat) for mesh in error.meshes}
    mesh = error.meshes[0] if len(devices) == 1 else None
    program = as_it_is(call, mesh) if mesh is not None and pods.is_pod(mesh) else None
    cluster = options.cluster or (mesh and cluster_of(mesh, options.agree_within_s))
    program = program or _plain(call.params)
    return replace(program, cluster=cluster, notice=no_mesh(call, error), error=error)


def refuse_on_pod(call: jits.Call) -> None:
    """Refuse to run a step on GPUs that are not there.

    Raises:
        ValueError: if a mesh of the step is of such.
    """
    try:
        meshes = (mesh_of(call),)
    except MeshError as error:
        meshes = error.meshes
    for mesh in filter(pods.is_pod, meshes):
        raise pods.cannot_run(mesh)


def pass_result(call: jits.Call, options: Options, search: Search) -> PassResult:
    """Run the passes; whatever fails there unexpectedly is a RewriteError.

    Raises:
        UserError, RewriteError, DisagreementError: as `run_passes`.
        Exception: what the step itself raises when it is lowered or compiled, as it comes.
    """
    try:
        with own_faults(call.name, DisagreementError):
            return run_passes(call, options, search)
    except RewriteError as error:
        failed = error
    lowered = call.traced().lower()  # where it is at fault, the error is its own
    if isinstance(failed.__cause__, partitioner.NoAnswerError):
        lowered.compile()
    raise failed


def _rewritten(call: jits.Call, options: Options, search: Search) -> StepProgram:
    """Rewrite a step with its rings, and collect all that it is compiled with."""
    done = pass_result(call, options, search)
    with own_faults(call.name):
        return arrived(call, done, options)


def arrived(call: jits.Call, done: PassResult, options: Options) -> StepProgram:
    """Make the program of a step from the result of its passes."""
    params, name = call.params, call.name
    added, compiled_with = _xla_options(done, dict(params["compiler_options_kvs"]), options)
    ordering = _ordering(name, done, options) if is_gpu(done.step.mesh) else None
    scheduler = ordering and ordering.options
    requested = options.plan is not None or getattr(options.granularity, "style", "") == "plain"
    plan = msgspec.structs.replace(
        done.plan,
        xla_options=added,
        schedule=scheduler and Schedule(**dataclasses.asdict(scheduler)),
    )
    ours = jits.with_jaxpr(params, done.jaxpr, compiled_with)
    return StepProgram(
        plan=plan,
        params=ours,
        inner=jits.with_jaxpr(params, done.jaxpr, {}),
        source=params,
        cluster=done.step.cluster,
        ordering=ordering,
        agreement=_agreement(plan, done, dict(ours["compiler_options_kvs"]), ordering, options),
        notice=None if requested else _notice(plan, done.step, options),
        cost=done.step.cost,
        close=done.close,
        undecided=bool(done.step.cost and options.never_slower and not options.plan)
        and is_gpu(done.step.mesh),
        on_pod=pods.is_pod(done.step.mesh),
    )


def _notice(plan: Plan, step: StepContext, options: Options) -> Notice | None:
    """Return the notice about a step's plan; None if it gives no reason for one."""
    if is_unpriced(step, options):
        return unpriced(plan.step, step.mesh.devices.flat[0].device_kind)
    return repaired(plan) if plan.edits else not_rewritten(plan.step, plan)


def as_it_is(call: jits.Call, mesh: Mesh) -> StepProgram:
    """Return the step not rewritten, by XLA's defaults, with the options that a pod needs."""
    on_pod = pods.is_pod(mesh)
    pod_options = pods.compiler_options() if on_pod else {}
    params = call.params
    ours = jits.with_jaxpr(params, params["jaxpr"], pod_options)
    return StepProgram(None, ours, params, params, on_pod=on_pod)


def _plain(params: dict[str, Any]) -> StepProgram:
    """Return the program of a step that runs as it is."""
    return StepProgram(None, params, params, params)


def _xla_options(
    done: PassResult, users: Mapping[str, Any], options: Options
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options that a plan names beyond the user's own, and these with a pod's."""
    pod_options = pods.compiler_options() if pods.is_pod(done.step.mesh) else {}
    chosen = done.plan.xla_options
    if options.plan is None:
        chosen = {name: value for name, value in chosen.items() if name not in pod_options}
    added = {name: value for name, value in chosen.items() if name not in users}
    return added, {**added, **pod_options}


def _ordering(name: str, done: PassResult, options: Options) -> SchedulerPass | None:
    """Return the scheduler pass, where XLA's GPU compiler makes the schedule."""
    schedule = options.schedule
    if options.plan is not None:
        wanted = options.plan.schedule
        schedule = wanted and Scheduler(**msgspec.structs.asdict(wanted))
    if schedule is not None and done.step.cost is None:
        warn(
            f"{name} is left in XLA's order: there is no cost model of its GPUs "
            f"({done.step.cluster or 'not known'}). Name some that have one in overlap(cluster=), "
            "or give schedule=None"
        )
    if schedule is None or done.step.cost is None:
        return None
    if ahead := joined_bytes(done.edited):
        schedule = replace(schedule, ahead_bytes=max(schedule.ahead_bytes, ahead))
    return scheduler_pass_for(name, done.step.cost, schedule)


# -- lowering -------------------------------------------------------------------------------------


def lowered_as(call: jits.Call, new: StepProgram) -> jax.stages.Lowered:
    """Lower a rewritten step under the name that its scheduler pass looks for."""
    return jits.traced_with(call.traced(), new.named_params).lower()


def lowered_plain(call: jits.Call) -> jax.stages.Lowered:
    """Lower the step as it is, with the options that a pod needs."""
    return lowered_as(call, as_it_is(call, mesh_of(call)))


def refused(program: StepProgram, call: jits.Call, error: Exception) -> StepProgram:
    """Return the program that runs the step as it is, where XLA does not compile the rewritten one.

    Args:
        program: the rewritten step, whose first call failed.
        call: that call.
        error: how it failed.

    Raises:
        JaxRuntimeError: the given error, if XLA compiles the program: then it failed as it ran; or
            if the mesh spans processes, of which the others may go on with the rewritten step.
    """
    if processes_of(mesh_of(call)):
        raise error
    try:
        with program.compiling():
            lowered_as(call, program).compile()
    except jax.errors.JaxRuntimeError:
        text = not_compiled(call.name, error)
        return replace(_plain(program.source), notice=Notice(text, text))
    raise error


def request_of(
    stage: jax.stages.Lowered,
    new: StepProgram,
    mesh: Mesh,
    cost: CostModel,
    compiler_options: Mapping[str, Any] | None = None,
) -> Request:
    """Make the request for a child to compile and simulate a lowered step.

    A child does not see the GPUs: it compiles for their description, as for a pod.

    Raises:
        ValueError: if the step calls back into Python.
    """
    there = is_gpu(mesh) and not pods.is_pod(mesh)
    described = pods.compiler_options() if there else {}
    job = job_of(stage, {**described, **(compiler_options or {})})
    return Request(job, cost, new.ordering)


# -- many processes -------------------------------------------------------------------------------


def _agreement(
    plan: Plan,
    done: PassResult,
    compiled_with: Mapping[str, Any],
    ordering: SchedulerPass | None,
    options: Options,
) -> Agreement | None:
    """Collect what the processes of a step's mesh have to agree on; None if there is but one."""
    processes = processes_of(done.step.mesh)
    if not processes:
        return None
    facts = facts_of(plan, done.jaxpr, done.step.mesh, compiled_with)
    facts["scheduler pass"] = ordering.name if ordering else "none"
    return Agreement(plan.step, processes, facts, plain=options.on_error == "plain")


def _failed(call: jits.Call, error: Exception, *, plain: bool) -> Agreement | None:
    """Make the agreement that says that a step failed here; None if there are no other processes.

    The mesh names the processes. A step without a mesh has failed in all of them.
    """
    try:
        processes = processes_of(mesh_of(call))
    except ValueError:
        return None
    failure = f"{type(error).__name__}: {error}"
    return Agreement(call.name, processes, failed=failure, plain=plain) if processes else None


def agree(program: StepProgram, options: Options) -> StepProgram:
    """Wait until all processes agree on a rewritten step; return a plain one if one of them failed.

    Raises:
        DisagreementError: as `meet`.
    """
    assert program.agreement is not None
    if meet(program.agreement, options.agree_within_s):
        return replace(program, agreement=None)
    warn(
        f"{program.agreement.step} runs without overlap in all processes: one could not rewrite it"
    )
    return _plain(program.source)


def tell(call: jits.Call, error: Exception, options: Options) -> None:
    """Let the other processes know that this one has failed, so that they do not wait for it."""
    agreement = _failed(call, error, plain=False)
    if agreement is not None:
        with contextlib.suppress(DisagreementError):  # what failed here says more
            meet(agreement, options.agree_within_s)
