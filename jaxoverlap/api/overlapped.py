"""The object that `overlap` returns: a step that decides once for each signature."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxoverlap._jax import fused_attention, jits
from jaxoverlap._jax.jit_wrappers import arguments_reach, find_jit, jitted_alone
from jaxoverlap._util.progress import working
from jaxoverlap._util.text import warn
from jaxoverlap.api.described import described
from jaxoverlap.hardware import hosts
from jaxoverlap.hardware.pods import capability_of, is_pod
from jaxoverlap.passes.analysis.errors import own_faults
from jaxoverlap.passes.analysis.mesh import MeshError
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.plan.plan import Plan
from jaxoverlap.search.choice import CompiledChoice, checked, decided, faster, found_to_compile
from jaxoverlap.search.found import found, layouts_found, with_offer
from jaxoverlap.search.layouts import Layouts
from jaxoverlap.search.never_slower import predicted
from jaxoverlap.start.at_once import AtOnce
from jaxoverlap.start.contender import fits_as_written
from jaxoverlap.start.copies import TrialsOnCopies
from jaxoverlap.start.record import Trials
from jaxoverlap.start.settings import Start
from jaxoverlap.step.context import mesh_of, prepare
from jaxoverlap.step.notices import inside
from jaxoverlap.step.options import Options
from jaxoverlap.step.processes import agreed, processes_of
from jaxoverlap.step.program import (
    StepProgram,
    agree,
    is_off,
    lowered_as,
    lowered_plain,
    pass_result,
    refuse_on_pod,
    refused,
    step_program,
    tell,
)
from jaxoverlap.step.programs import Program, programs_of
from jaxoverlap.step.stages import Lowered
from jaxoverlap.tuning.target import TuningTarget
from jaxoverlap.tuning.tune import Tuning, tuned

_CHECKIFY = (
    "checkify puts its checks into the step as it was traced, and cannot put them into rings. "
    "Overlap the function that is around checkify.checkify"
)
_NOT_PLAIN = ("lower", "jitted_fn", "as_text")  # a plain function has no such attribute
_MAX_SEEN = 128  # signatures that a step remembers; a run has a few
_BESIDE_BUDGET_S = 3600.0  # that a tuning may take beside its budget: two candidates have none


class Overlapped:
    """A train step whose collectives hide behind its matmuls; made by `overlap`.

    Call it as the step it was made from. It traces once per signature and sharding.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        tuning: Tuning | None = None,
        start: Start | None = None,
    ):
        if not callable(fn):
            raise ValueError(f"overlap() was given {fn!r}; expected a function, jitted or not")
        if isinstance(fn, Overlapped):
            fn = fn._fn  # overlapped twice is overlapped once, with the outer options
        wrapped_jit = find_jit(fn)
        if wrapped_jit is None and any(hasattr(fn, name) for name in _NOT_PLAIN):
            raise ValueError(
                f"overlap() was given {type(fn).__module__}.{type(fn).__qualname__}: expected a "
                "function from jax.jit, nnx.jit or equinox.filter_jit, a functools.partial of one, "
                "or a plain function. What wraps a jitted function goes around overlap(): "
                "nnx.cached_partial(overlap(step), model)"
            )
        hosts.announce()  # so that one process may explain a step before the others come to it
        self._fn = fn
        self._wrapped_jit = wrapped_jit or jitted_alone(fn)
        self._jitted: Any = self._wrapped_jit.jitted
        self._options = options
        self._tuning = tuning
        self._start = start or Start()
        self._seen: jits.Cache[StepProgram] = jits.Cache()
        self._started: jits.Cache[AtOnce] = jits.Cache()
        self._lock = threading.RLock()  # one thread at a time decides what a signature becomes
        self._told: set[str] = set()
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, as functions in classes do."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Look other names up on the given function: `eval_shape` of a jit, `func` of a partial."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fn, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, shallow or deep, and pickles are new steps: they decide for themselves."""
        return Overlapped, (self._fn, self._options, self._tuning, self._start)

    def __deepcopy__(self, memo: dict[int, Any]) -> Overlapped:
        """Copy the step, and not the function inside, as functions are never copied."""
        return Overlapped(self._fn, self._options, self._tuning, self._start)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self._wrapped_jit.around(self._run)(*args, **kwargs)

    def __repr__(self) -> str:
        """Return what the step became, for each signature that it was called with."""
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return described(name, self._seen.values(), self.trials)

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for each matmul, for arguments like these; print it.

        It has a row for each matmul that waits for a collective: its source line, einsum, mesh
        axis, kind, bytes, chunks and the decision; the reason for each that is skipped; and a row
        for each collective that stays XLA's. It takes arrays or ShapeDtypeStructs; it compiles
        nothing and runs nothing.

        Raises:
            ValueError: if the step has no mesh, or one that does not fit.
            RewriteError: if the rewrite fails, whatever `on_error` says.
        """
        return arguments_reach(self._wrapped_jit, self._explain, args, kwargs)

    def advise(self, *args: Any, **kwargs: Any) -> Layouts | None:
        """Return the shardings that would be pinned, for arguments like these, with their gains.

        None if layouts are not searched for: the mesh is explicit, its cluster has no cost model,
        or `layouts=None`. It takes arrays or ShapeDtypeStructs; it compiles nothing.

        Raises:
            ValueError: if the step has no mesh, or one that does not fit.
            RewriteError: if the search fails, whatever `on_error` says.
        """
        return arguments_reach(self._wrapped_jit, self._advise, args, kwargs)

    def programs(self, *args: Any, **kwargs: Any) -> tuple[Program, ...]:
        """Return the step's program after each edit, for arguments like these, the original first.

        `print(*step.programs(state, batch))` shows what each pass changed, as a diff, and the
        estimated time after it. It takes arrays or ShapeDtypeStructs; it compiles nothing.

        Raises:
            ValueError: if the step has no mesh, or one that does not fit.
            RewriteError: if the rewrite fails, whatever `on_error` says.
        """
        return arguments_reach(self._wrapped_jit, self._programs, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the rewritten step as `jax.jit(...).trace` does; processes do not agree on it."""
        return arguments_reach(self._wrapped_jit, self._trace, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower the rewritten step; it takes arrays or ShapeDtypeStructs, as in `jax.stages`.

        Where the mesh spans processes, all have to come here or call the step.
        """
        return arguments_reach(self._wrapped_jit, self._lower, args, kwargs)

    @property
    def trials(self) -> tuple[Trials, ...]:
        """The trials of a step that starts as it is, a record for each signature of its calls."""
        return tuple(started.trials for started in self._started.values())

    def clear_cache(self) -> None:
        """Forget all that was traced, decided and compiled, as `clear_cache` of a jit does."""
        self._seen.cache_clear()
        self._started.cache_clear()
        self._jitted.clear_cache()

    def _tune(self, tuning: Tuning, out: Path | None, *args: Any, **kwargs: Any) -> Plan:
        return self._tuned(self._inferred(args, kwargs), tuning, out)

    # The methods below get the arguments of the jit inside: nnx.jit has taken its models apart.

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # for debuggers: the user's own Python, on values
            return self._jitted(*args, **kwargs)
        call = jits.infer(self._jitted, args, kwargs)
        outermost = jits.at_top_level()
        if not outermost and jits.in_checkify():
            self._tell("checkify", f"{call.name} runs without overlap: {_CHECKIFY}")
            return self._jitted(*args, **kwargs)
        if outermost and (started := self._at_once(call)) is not None:
            return started.run(call, lambda: self._jitted(*args, **kwargs))
        program = self._decided(call, runs=True) if outermost else self._agreed(call)
        if program.params is program.source:  # the step as it is: jit's own errors are its best
            return self._jitted(*args, **kwargs)
        if not outermost:
            if not jits.only_shapes():
                self._tell("inside", inside(call.name))
            flat = jits.bind_jit(call.flat, program.inner)
        elif program.compiled or not self._options.falls_back:
            flat = _bound(call, program)
        else:
            try:
                flat = _bound(call, program)
            except jax.errors.JaxRuntimeError as error:
                return self._instead(call, program, error)
            self._seen.put(_key(call), replace(program, compiled=True), at_most=_MAX_SEEN)
        return jax.tree.unflatten(call.out_tree, flat)

    def _at_once(self, call: jits.Call) -> AtOnce | None:
        """Return what runs a step that starts as it is; None if a decision is to be followed.

        That of an earlier run is put where later calls find it.
        """
        if self._start.mode == "decided":
            return None
        key = _key(call)
        if (started := self._started.get(key)) is None:
            if is_off() or any(map(jits.is_tracer, call.flat)):
                return None
            try:
                mesh = mesh_of(call)
            except MeshError:
                return None  # nothing is decided on it
            if is_pod(mesh) or mesh.size == 1 or not self._start.is_plain(mesh):
                return None
            if self._options.memory is not None and (
                self._seen.get(key) is not None or not fits_as_written(call, self._options)
            ):
                return None  # it is decided before the first step
            with self._lock:
                if (started := self._started.get(key)) is None:
                    started = AtOnce(call, self._options, self._start, self._tuning)
                    self._started.put(key, started, at_most=_MAX_SEEN)
        if started.program is None:
            return started
        if self._seen.get(key) is None:
            self._seen.put(key, started.program, at_most=_MAX_SEEN)
        return None

    def _instead(self, call: jits.Call, program: StepProgram, error: Exception) -> Any:
        """Run the step as it is, as XLA refuses its program; raise what else went wrong."""
        plain = refused(program, call, error)
        # If XLA refuses both, the error is the step's own.
        results = self._jitted(*call.args, **call.kwargs)
        self._seen.put(_key(call), plain, at_most=_MAX_SEEN)
        assert plain.notice is not None
        self._tell(*plain.notice)
        return results

    def _explain(self, *args: Any, **kwargs: Any) -> Plan:
        call, program = self._planned(args, kwargs)
        plan = program.plan or pass_result(call, self._options, found).plan
        with own_faults(plan.step):
            plan = with_offer(prepare(call, self._options), self._options, plan)
            after = partitioned(call.traced(), program.inner["jaxpr"], mesh_of(call), ask=False)
            return msgspec.structs.replace(
                plan, remaining=partitioner_collectives(after.module, plan.mesh)
            )

    def _advise(self, *args: Any, **kwargs: Any) -> Layouts | None:
        call = self._inferred(args, kwargs)
        with own_faults(call.name):
            return layouts_found(prepare(call, self._options), self._options)

    def _programs(self, *args: Any, **kwargs: Any) -> tuple[Program, ...]:
        call, program = self._planned(args, kwargs)
        options = replace(self._options, plan=program.plan or self._options.plan)
        return programs_of(pass_result(call, options, found))

    def _planned(self, args: tuple, kwargs: dict) -> tuple[jits.Call, StepProgram]:
        """Return a call and the rewritten step; raise why it was not rewritten, if it failed."""
        call = self._inferred(args, kwargs)
        program = self._rewritten(call)
        if program.error is not None:
            raise program.error
        return call, program

    def _trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        call = self._inferred(args, kwargs)
        program = self._rewritten(call)
        return jits.traced_with(call.traced(), program.params)

    def _lower(self, *args: Any, **kwargs: Any) -> Lowered:
        call = self._inferred(args, kwargs)
        program = self._decided(call)
        compare = plain = None
        if self._options.falls_back and program.plan is not None:
            plain = functools.partial(lowered_plain, call)
        if not any(map(jits.is_tracer, call.flat)):
            choice = CompiledChoice(call, program, self._options)
            if program.undecided:
                compare = functools.partial(faster, choice)
            elif self._options.memory is not None and program.cost is not None:
                compare = functools.partial(checked, choice)
        return Lowered(
            lowered_as(call, program),
            program.plan,
            self._wrapped_jit,
            program.cost or program.cluster,
            program.ordering,
            faster=compare,
            speedup=program.speedup or predicted(program.plan),
            plain=plain,
        )

    def _inferred(self, args: tuple, kwargs: dict) -> jits.Call:
        """Trace the step, once a signature; for a pod as if its chip were here."""
        values = (*jax.tree.leaves((args, kwargs)), *jits.stated_shardings(self._jitted))
        with fused_attention.tracing_for(capability_of(values)):
            return jits.infer(self._jitted, args, kwargs)

    def _rewritten(self, call: jits.Call, *, compiles: bool = False) -> StepProgram:
        """Rewrite the step for arguments like these; later calls with such get the same program.

        Args:
            call: the call with such arguments.
            compiles: whether it is going to be compiled by itself.
        """
        key = _key(call)
        if (program := self._seen.get(key)) is not None:
            return program
        with self._lock:
            if (program := self._seen.get(key)) is not None:
                return program
            find_plan = None
            if self._tuning is not None:
                find_plan = functools.partial(self._tuned, call, self._tuning)
            search = found_to_compile if compiles else found
            shows = self._tuning is None  # a tuning has a line of its own
            with working(f"deciding {call.name}") if shows else nullcontext():
                program = step_program(call, self._options, search, find_plan)
            self._seen.put(key, program, at_most=_MAX_SEEN)
            if program.notice:
                self._tell(*program.notice)
        return program

    def _tell(self, topic: str, text: str) -> None:
        """Warn the user, at most once per topic."""
        if topic not in self._told:
            self._told.add(topic)
            warn(text)

    def _agreed(
        self, call: jits.Call, *, runs: bool = False, compiles: bool = False
    ) -> StepProgram:
        """Return the rewritten step once all processes are about to compile the same.

        One that `runs` is refused on GPUs that are not there; `compiles` as in `_rewritten`.
        """
        program = self._seen.get(_key(call))
        if runs and (program is None or program.on_pod):
            refuse_on_pod(call)
        if program is not None and program.agreement is None:
            return program
        with self._lock:
            try:
                program = self._rewritten(call, compiles=compiles)
            except Exception as error:
                tell(call, error, self._options)
                raise
            if program.agreement is not None:
                program = agree(program, self._options)
                self._seen.put(_key(call), program, at_most=_MAX_SEEN)
        return program

    def _decided(self, call: jits.Call, *, runs: bool = False) -> StepProgram:
        """Return the agreed step with rings or without, whichever is faster on the GPUs here.

        For a pod both are compiled when it is compiled: see `Lowered.compile`.
        """
        program = self._agreed(call, runs=runs, compiles=True)
        if not program.undecided or any(map(jits.is_tracer, call.flat)) or is_pod(mesh_of(call)):
            return program
        with self._lock:
            program = self._agreed(call)
            if program.undecided:
                with working(f"choosing a program of {call.name}"):
                    program = decided(CompiledChoice(call, program, self._options))
                self._seen.put(_key(call), program, at_most=_MAX_SEEN)
            return program

    def _tuned(self, call: jits.Call, tuning: Tuning, out: Path | None = None) -> Plan:
        """The plan under which the step is fastest: process 0's, where there are many."""
        start = prepare(call, self._options)
        target = TuningTarget(call, start, replace(self._options, by_rule=True))
        search = functools.partial(tuned, target, tuning, TrialsOnCopies(call, self._options), out)
        if not processes_of(start.mesh):
            return search()
        if tuning.measure:
            raise ValueError(
                "measure=True in several processes: each would go by a clock of its own. Give "
                "overlap() tune=True and start='plain': the processes agree on its trial steps"
            )
        return agreed(search, within_s=tuning.budget_s + _BESIDE_BUDGET_S)


def _bound(call: jits.Call, program: StepProgram) -> list[Any]:
    """Compile a program, if it has not been, and run it."""
    with program.compiling():
        return jits.bind_jit(call.flat, program.named_params)


def _key(call: jits.Call) -> Hashable:
    """Return a hash key for a call's signature, the shardings of its arguments and its context."""
    params = call.params
    # A jaxpr is equal to itself alone; jit gives the same one for every call of a signature.
    inside = not jits.at_top_level()  # there rows are not cut
    return params["jaxpr"], params["ctx_mesh"], inside, *map(jits.placement, call.flat)
