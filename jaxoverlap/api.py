"""`overlap`: the one line at the call site, and the objects it returns."""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, overload

import jax
import msgspec

from jaxoverlap._jax import compat
from jaxoverlap._jax.jit_wrappers import Found, arguments_reach, find_jit
from jaxoverlap._util.text import warn
from jaxoverlap.hardware import hosts
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.hardware.pods import is_pod
from jaxoverlap.passes.analysis.errors import own_faults
from jaxoverlap.passes.analysis.partitioned import partitioned
from jaxoverlap.passes.analysis.partitioner_collectives import partitioner_collectives
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.plan import FSDP, Plan, Variant
from jaxoverlap.step.choice import decided, rival_of
from jaxoverlap.step.context import mesh_of, prepare
from jaxoverlap.step.never_slower import predicted
from jaxoverlap.step.options import OnError, Options
from jaxoverlap.step.processes import agreed, processes_of
from jaxoverlap.step.program import StepProgram, agree, pass_result, step_program, tell
from jaxoverlap.step.stages import Lowered
from jaxoverlap.tuning.subject import subject_of
from jaxoverlap.tuning.tune import Tuning, tuned

Granularity = str | Variant | Mapping[str, str | Variant] | None
_SCHEDULER = Scheduler()
_MAX_SEEN = 128  # signatures that a step remembers; a run has a few
_BESIDE_BUDGET_S = 3600.0  # that a tuning may take beside its budget: two candidates have none


@overload
def overlap(
    fn: Callable[..., Any],
    *,
    cluster: str | Cluster | None = ...,
    skip: Collection[str] = ...,
    on_error: OnError = ...,
    granularity: Granularity = ...,
    fsdp: FSDP | None = ...,
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
) -> Overlapped: ...
@overload
def overlap(
    fn: None = ...,
    *,
    cluster: str | Cluster | None = ...,
    skip: Collection[str] = ...,
    on_error: OnError = ...,
    granularity: Granularity = ...,
    fsdp: FSDP | None = ...,
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
) -> Callable[[Callable[..., Any]], Overlapped]: ...
def overlap(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    skip: Collection[str] = (),
    on_error: OnError = "raise",
    granularity: Granularity = None,
    fsdp: FSDP | None = None,
    schedule: Scheduler | None = _SCHEDULER,
    plan: str | os.PathLike[str] | Plan | None = None,
    tune: bool | Tuning = False,
    agree_within_s: float = 20.0,
    never_slower: bool = True,
) -> Overlapped | Callable[[Callable[..., Any]], Overlapped]:
    """Hide a train step's collectives behind its matmuls.

    Matmuls whose shardings imply a collective, or that stand beside one of your own in the body of
    a `jax.shard_map`, become rings of permutes, each hop under a chunk of the matmul; the step
    computes what it computed, and `explain()` names the matmuls that are left alone. Sums that are
    wanted whole may stay scattered up to the next matmuls, which then gather them; pin them with
    `jax.lax.with_sharding_constraint` if they must not. Use it on the jitted step, forward,
    backward and optimizer in one:

        step = jaxoverlap.overlap(train_step)

    or as `@jaxoverlap.overlap` or `@jaxoverlap.overlap(cluster="h100-sxm:8x8")`. Where a step
    runs on one device, on no mesh or on two, it stays as it is, and a warning says so once.

    Args:
        fn: a function from `jax.jit` or flax's `nnx.jit`, a `functools.partial` of one, or a plain
            function, which is then jitted. The jit's static and donated arguments, shardings and
            name stay; what nnx.jit changes in its arguments, it still changes.
        cluster: the GPUs that the step is for, as "chip:hosts x GPUs a host", with how many
            processes a host runs behind it where that is not one ("h100-sxm:8x8/8"); the step's
            mesh must have as many devices. Default: the devices of the mesh, whatever they are, on
            the hosts that their processes say they are on.
        skip: source lines ("gpt.py:88") whose matmuls are to be left alone.
        on_error: what to do when the rewrite fails on a step, for whatever reason: "raise", or
            "plain" to run the step as it is and warn once of each failure. What the step itself
            raises, and mistakes in these arguments, are raised all the same.
        granularity: how the pieces of every collective travel: a `Variant`, or its name, as in
            "two_way", "direct x 2" (two slices a chunk), "sliced x 4" (no ring: the whole
            collective in four slices) or "plain" (left alone); or one by source line, as in
            {"gpt.py:88": "two_way"}. Default: "one_way" rings; sums between hosts "direct".
        fsdp: what becomes of the gathers of sharded weights in a scan over layers: "prefetch", the
            default, runs them one step ahead, through the scan's carry, at the price of a second
            buffer; "ring" takes them into the matmuls, where no other collective is there already.
        schedule: how the scheduler pass may order the compiled step on GPUs; None for XLA's order.
        plan: a plan, or its file. It says all that skip, granularity, fsdp and schedule say, and
            is for one step, mesh, cluster and version: the first call refuses any other.
        tune: find the plan first, at the first call with arguments of a kind, as `tune` does; a
            `Tuning` says how. What was tried is kept, so that later runs find it at once. Of many
            processes process 0 tunes, and the others wait for its plan.
        agree_within_s: where the mesh spans processes, how long the first that comes to the step,
            or to `lower`, waits there for the last: none compiles before all are about to compile
            the same. If they are not, or one does not come, all raise `DisagreementError`. As long
            it waits, once, for each process to say on which host it is.
        never_slower: where the GPUs' prices are known, compile the step as it is too, in a child
            process, and take what is faster by simulation; warn if that is not what has the rings.
            `Compiled.speedup` has both. False compiles the overlapped step alone, as does `plan`.

    Raises:
        ValueError: if an argument is not one of these, `cluster` does not parse, the file is no
            whole plan, or an argument says what the plan says.
        OSError: if the plan's file cannot be read.
    """
    lines = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else None
    if lines is None or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"skip={skip!r}: expected source lines, as in skip=('gpt.py:88',)")
    if on_error not in ("raise", "plain"):
        raise ValueError(f"on_error={on_error!r}: expected 'raise' or 'plain'")
    if not isinstance(cluster, str | Cluster | None):
        raise ValueError(
            f"cluster={cluster!r}: expected a string like 'h100-sxm:8x8', or a Cluster"
        )
    if fsdp not in ("prefetch", "ring", None):
        raise ValueError(f"fsdp={fsdp!r}: expected 'prefetch' or 'ring'")
    if not isinstance(schedule, Scheduler | None):
        raise ValueError(f"schedule={schedule!r}: expected a jaxoverlap.Scheduler, or None")
    if not isinstance(tune, bool | Tuning):
        raise ValueError(f"tune={tune!r}: expected True, False or a jaxoverlap.Tuning")
    if not agree_within_s > 0:
        raise ValueError(f"agree_within_s={agree_within_s!r}: expected seconds, more than zero")
    if not isinstance(never_slower, bool):
        raise ValueError(f"never_slower={never_slower!r}: expected True or False")
    tuning = Tuning() if tune is True else tune or None
    named = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if plan is not None:
        if tuning:
            raise ValueError(_said_twice(["tune"]))
        said = {"skip": lines, "granularity": granularity, "fsdp": fsdp}
        if twice := [name for name, value in said.items() if value]:
            raise ValueError(_said_twice(twice))
        if schedule is not _SCHEDULER:
            raise ValueError(_said_twice(["schedule"]))
        options = Options.of(
            _read(plan), cluster=named, on_error=on_error, agree_within_s=agree_within_s
        )
    else:
        options = Options(
            cluster=named,
            skip=lines,
            on_error=on_error,
            granularity=_variants(granularity),
            fsdp=fsdp or "prefetch",
            schedule=schedule,
            agree_within_s=agree_within_s,
            never_slower=never_slower,
        )
    if fn is None:
        return lambda fn: Overlapped(fn, options, tuning)
    return Overlapped(fn, options, tuning)


def tune(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    budget_s: float = Tuning().budget_s,
    measure: bool = False,
    cache: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Plan:
    """The plan under which a train step is fastest, for `overlap(fn, plan=...)`.

    Compiles candidates for the cluster in child processes, simulates their schedules and takes the
    fastest whose memory fits; the step as it is is one of them. What was tried is kept, so that a
    second run, or one after a kill, goes on from there.

    Args:
        fn: as in `overlap`.
        args, kwargs: what it is called with: arrays or ShapeDtypeStructs, as for `lower`.
        cluster: as in `overlap`.
        budget_s, measure, cache, show: as in `Tuning`.

    Raises:
        ValueError: if an argument is wrong, the step has no mesh, there is no cost model of the
            cluster (and measure is False), or the step does not compile.
        RewriteError: if the rewrite fails.
    """
    folder = None if cache is None else os.fspath(cache)
    tuning = Tuning(budget_s=budget_s, measure=measure, cache=folder, show=show)
    step = overlap(fn, cluster=cluster)
    return arguments_reach(
        step._found, functools.partial(step._tune, tuning), tuple(args), dict(kwargs or {})
    )


def _said_twice(names: Sequence[str]) -> str:
    return (
        f"{', '.join(names)} beside plan=: a plan says that already. Leave out either; a plan with "
        "another answer is what explain() gives for overlap() with that argument and no plan"
    )


def _read(plan: Any) -> Plan:
    """A plan, or the one in a file."""
    if not isinstance(plan, str | os.PathLike | Plan):
        raise ValueError(f"plan={plan!r}: expected a jaxoverlap.Plan, or the path of its file")
    return plan if isinstance(plan, Plan) else Plan.read(plan)


def _variants(granularity: Any) -> Any:
    """Every name parsed."""
    if isinstance(granularity, Mapping):
        return {line: _variants(variant) for line, variant in granularity.items()}
    if not isinstance(granularity, str | Variant | None):
        raise ValueError(
            f"granularity={granularity!r}: expected a Variant or its name, or these by source line"
        )
    return Variant.parse(granularity) if isinstance(granularity, str) else granularity


class Overlapped:
    """A train step whose collectives hide behind its matmuls; made by `overlap`.

    Call it as the step it was made from. It traces once per signature and sharding.
    """

    def __init__(self, fn: Callable[..., Any], options: Options, tuning: Tuning | None = None):
        if not callable(fn):
            raise ValueError(f"overlap() was given {fn!r}; expected a function, jitted or not")
        if isinstance(fn, Overlapped):
            fn = fn._fn  # overlapped twice is overlapped once, with the outer options
        found = find_jit(fn)
        if found is None and (hasattr(fn, "lower") or hasattr(fn, "jitted_fn")):
            raise ValueError(
                f"overlap() was given {type(fn).__module__}.{type(fn).__qualname__}: expected a "
                "function from jax.jit or nnx.jit, a functools.partial of one, or a plain "
                "function. What wraps a jitted function goes around overlap(): "
                "nnx.cached_partial(overlap(step), model)"
            )
        hosts.announce()  # so that one process may explain a step before the others come to it
        self._fn = fn
        self._found = found or Found(jax.jit(fn), lambda new: new)
        self._jitted: Any = self._found.jitted
        self._options = options
        self._tuning = tuning
        self._seen: compat.Cache[StepProgram] = compat.Cache()
        self._lock = threading.RLock()  # one thread at a time decides what a signature becomes
        self._told: set[str] = set()
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, as functions in classes do."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """What else the given function has: `eval_shape` of a jit, `func` of a partial."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fn, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, shallow or deep, and pickles are new steps: they decide for themselves."""
        return Overlapped, (self._fn, self._options, self._tuning)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        return self._found.around(self._run)(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        """What is done with each matmul, for arguments like these; print it.

        A row a matmul that waits for a collective: its source line, einsum, mesh axis, kind, bytes,
        chunks and the decision; why each other is left alone; and a row for each collective that
        stays XLA's. Takes arrays or ShapeDtypeStructs; compiles nothing and runs nothing.

        Raises:
            ValueError: if the step has no mesh, or one that does not fit.
            RewriteError: if the rewrite fails, whatever `on_error` says.
        """
        return arguments_reach(self._found, self._explain, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The rewritten step as `jax.jit(...).trace` gives it; processes do not agree on it."""
        return arguments_reach(self._found, self._trace, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The rewritten step, lowered; takes arrays or ShapeDtypeStructs, as in `jax.stages`.

        Where the mesh spans processes, all have to come here or call the step.
        """
        return arguments_reach(self._found, self._lower, args, kwargs)

    def clear_cache(self) -> None:
        """Forget all that was traced, decided and compiled, as `clear_cache` of a jit does."""
        self._seen.cache_clear()
        self._jitted.clear_cache()

    def _tune(self, tuning: Tuning, *args: Any, **kwargs: Any) -> Plan:
        return self._tuned(compat.infer(self._jitted, args, kwargs), args, kwargs, tuning)

    # What follows is given the arguments of the jit inside; nnx.jit has taken its models apart.

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # for debuggers: the user's own Python, on values
            return self._jitted(*args, **kwargs)
        call = compat.infer(self._jitted, args, kwargs)
        outermost = compat.at_top_level()
        found = (self._decided if outermost else self._agreed)(call, args, kwargs)
        if found.params is found.source:  # the step as it is: jit's own errors are its best
            return self._jitted(*args, **kwargs)
        if not outermost:
            flat = compat.bind_jit(call.flat, found.inner)
        elif found.ordering is None:
            flat = compat.bind_jit(call.flat, found.params)
        else:
            with found.ordering.compiling():
                flat = compat.bind_jit(call.flat, found.ordering.named(found.params))
        return jax.tree.unflatten(call.out_tree, flat)

    def _explain(self, *args: Any, **kwargs: Any) -> Plan:
        call = compat.infer(self._jitted, args, kwargs)
        found = self._rewritten(call, args, kwargs)
        if found.error is not None:
            raise found.error
        plan = found.plan or pass_result(self._jitted, call, args, kwargs, self._options).plan
        traced = self._jitted.trace(*args, **kwargs)
        with own_faults(plan.step):
            after = partitioned(traced, found.inner["jaxpr"], mesh_of(call), ask=False)
            return msgspec.structs.replace(
                plan, remaining=partitioner_collectives(after.module, plan.mesh)
            )

    def _trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        call = compat.infer(self._jitted, args, kwargs)
        found = self._rewritten(call, args, kwargs)
        return compat.traced_with(self._jitted.trace(*args, **kwargs), found.params)

    def _lower(self, *args: Any, **kwargs: Any) -> Lowered:
        call = compat.infer(self._jitted, args, kwargs)
        found = self._decided(call, args, kwargs)
        ordering, params = found.ordering, found.params
        if ordering:
            params = ordering.named(params)
        lowered = compat.traced_with(self._jitted.trace(*args, **kwargs), params).lower()
        rival = None
        if found.undecided and not any(map(compat.is_tracer, call.flat)):
            rival = rival_of(self._jitted, call, args, kwargs, found, self._options)
        return Lowered(
            lowered,
            found.plan,
            self._found,
            found.cluster,
            ordering,
            rival=rival,
            speedup=found.speedup or predicted(found.plan),
        )

    def _rewritten(self, call: compat.Call, args: tuple, kwargs: dict) -> StepProgram:
        """What the step became for arguments like these, from the first call with such on."""
        key = _key(call)
        if (found := self._seen.get(key)) is not None:
            return found
        with self._lock:
            if (found := self._seen.get(key)) is not None:
                return found
            find_plan = None
            if self._tuning is not None:
                find_plan = functools.partial(self._tuned, call, args, kwargs, self._tuning)
            found = step_program(self._jitted, call, args, kwargs, self._options, find_plan)
            self._seen.put(key, found, at_most=_MAX_SEEN)
            if found.notice and found.notice.topic not in self._told:
                self._told.add(found.notice.topic)
                warn(found.notice.text)
        return found

    def _agreed(self, call: compat.Call, args: tuple, kwargs: dict) -> StepProgram:
        """The same, once all processes are about to compile it."""
        found = self._seen.get(_key(call))
        if found is not None and found.stand is None:
            return found
        with self._lock:
            try:
                found = self._rewritten(call, args, kwargs)
            except Exception as error:
                tell(call, error, self._options)
                raise
            if found.stand is not None:
                found = agree(found, self._options)
                self._seen.put(_key(call), found, at_most=_MAX_SEEN)
        return found

    def _decided(self, call: compat.Call, args: tuple, kwargs: dict) -> StepProgram:
        """The same, with rings or without, as is faster on the GPUs that are here.

        For a pod both are compiled when it is compiled: see `Lowered.compile`.
        """
        found = self._agreed(call, args, kwargs)
        if not found.undecided or any(map(compat.is_tracer, call.flat)) or is_pod(mesh_of(call)):
            return found
        with self._lock:
            found = self._agreed(call, args, kwargs)
            if found.undecided:
                found = decided(self._jitted, call, args, kwargs, found, self._options)
                self._seen.put(_key(call), found, at_most=_MAX_SEEN)
            return found

    def _tuned(self, call: compat.Call, args: tuple, kwargs: dict, tuning: Tuning) -> Plan:
        """The plan under which the step is fastest: process 0's, where there are many."""
        start = prepare(call, self._options)
        subject = subject_of(self._jitted, start, call, args, kwargs, self._options)
        if not processes_of(start.mesh):
            return tuned(subject, tuning)
        if tuning.measure:
            raise ValueError(
                "measure=True in several processes: each would go by a clock of its own. Tune "
                "without it, or the same step in one process, and give its plan to all"
            )
        wait_s = tuning.budget_s + _BESIDE_BUDGET_S
        return agreed(lambda: tuned(subject, tuning), within_s=wait_s)


def _key(call: compat.Call) -> Hashable:
    """What tells a signature and its shardings from others."""
    params = call.params
    # A jaxpr is equal to itself alone; jit gives the same one for every call of a signature.
    return params["jaxpr"], params["ctx_mesh"], *map(compat.placement, call.flat)
