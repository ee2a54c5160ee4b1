"""`overlap`: the one line at the call site, and the objects it returns."""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import jax
import msgspec
from jax.sharding import Mesh

from jaxoverlap import _compat, pods
from jaxoverlap._inside import Found, arguments_reach, find_jit
from jaxoverlap._jobs import job_of
from jaxoverlap.cluster import Cluster, parse_cluster
from jaxoverlap.flags import is_gpu, options_for
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.mesh import NoMeshError
from jaxoverlap.passes.remaining import remaining
from jaxoverlap.plan import FSDP, Plan, Schedule, Variant
from jaxoverlap.road import OnError, Options, Travelled, begin, travel
from jaxoverlap.scheduler import Ordering, Scheduler, ordering_for
from jaxoverlap.search import Ready
from jaxoverlap.stages import Lowered
from jaxoverlap.trial import Request
from jaxoverlap.tune import Subject, Tuning, tuned

Granularity = str | Variant | Mapping[str, str | Variant] | None
_SCHEDULER = Scheduler()
_MAX_SEEN = 128  # signatures that a step remembers; a run has a few


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
) -> Overlapped | Callable[[Callable[..., Any]], Overlapped]:
    """Hide a train step's collectives behind its matmuls.

    Matmuls whose shardings imply a collective, or that stand beside one of your own in the body of
    a `jax.shard_map`, become rings of permutes, each hop under a chunk of the matmul; the step
    computes what it computed, and `explain()` names the matmuls that are left alone. Sums that are
    wanted whole may stay scattered up to the next matmuls, which then gather them; pin them with
    `jax.lax.with_sharding_constraint` if they must not. Use it on the jitted step, forward,
    backward and optimizer in one:

        step = jaxoverlap.overlap(train_step)

    or as `@jaxoverlap.overlap` or `@jaxoverlap.overlap(cluster="h100-sxm:8x8")`.

    Args:
        fn: a function from `jax.jit` or flax's `nnx.jit`, a `functools.partial` of one, or a plain
            function, which is then jitted. The jit's static and donated arguments, shardings and
            name stay; what nnx.jit changes in its arguments, it still changes.
        cluster: the GPUs that the step is for, as "chip:hosts x GPUs a host"; the step's mesh must
            have as many devices. Default: the devices of the mesh, whatever they are.
        skip: source lines ("gpt.py:88") whose matmuls are to be left alone.
        on_error: what to do when the rewrite fails on a step: "raise", or "plain" to run the
            step as it is and warn once.
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
            `Tuning` says how. What was tried is kept, so that later runs find it at once.

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
        options = Options.of(_read(plan), cluster=named, on_error=on_error)
    else:
        options = Options(
            cluster=named,
            skip=lines,
            on_error=on_error,
            granularity=_variants(granularity),
            fsdp=fsdp or "prefetch",
            schedule=schedule,
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


@dataclass(frozen=True)
class _Rewritten:
    """What one signature of a step became.

    Attributes:
        plan: None where the step runs as it is.
        params: the jit equation's parameters, with the rewritten jaxpr and options for it.
        inner: the same without our options, which only an outermost jit may have.
        source: the parameters as traced; held so that the id of their jaxpr stays taken.
        cluster: that it runs on, where that is known.
        ordering: the scheduler pass that it is compiled with.
    """

    plan: Plan | None
    params: dict[str, Any]
    inner: dict[str, Any]
    source: dict[str, Any]
    cluster: Cluster | None = None
    ordering: Ordering | None = None


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
        self._fn = fn
        self._found = found or Found(jax.jit(fn), lambda new: new)
        self._jitted: Any = self._found.jitted
        self._options = options
        self._tuning = tuning
        self._seen: dict[Hashable, _Rewritten] = {}
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, as functions in classes do."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """What else the given function has: `eval_shape` of a jit, `func` of a partial."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fn, name)

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
        """The rewritten step as `jax.jit(...).trace` gives it."""
        return arguments_reach(self._found, self._trace, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The rewritten step, lowered; takes arrays or ShapeDtypeStructs, as in `jax.stages`."""
        return arguments_reach(self._found, self._lower, args, kwargs)

    def _tune(self, tuning: Tuning, *args: Any, **kwargs: Any) -> Plan:
        return self._tuned(_compat.infer(self._jitted, args, kwargs), args, kwargs, tuning)

    # What follows is given the arguments of the jit inside; nnx.jit has taken its models apart.

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # for debuggers: the user's own Python, on values
            return self._jitted(*args, **kwargs)
        call = _compat.infer(self._jitted, args, kwargs)
        rewritten = self._rewritten(call, args, kwargs)
        if not _compat.at_top_level():
            flat = _compat.bind_jit(call.flat, rewritten.inner)
        elif rewritten.ordering is None:
            flat = _compat.bind_jit(call.flat, rewritten.params)
        else:
            with rewritten.ordering.compiling():
                flat = _compat.bind_jit(call.flat, rewritten.ordering.named(rewritten.params))
        return jax.tree.unflatten(call.out_tree, flat)

    def _explain(self, *args: Any, **kwargs: Any) -> Plan:
        call = _compat.infer(self._jitted, args, kwargs)
        rewritten = self._rewritten(call, args, kwargs)
        plan = rewritten.plan or travel(self._jitted, call, args, kwargs, self._options).plan
        traced = _compat.traced_with(self._jitted.trace(*args, **kwargs), rewritten.inner)
        return msgspec.structs.replace(plan, remaining=remaining(traced.lower(), plan.mesh))

    def _trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        call = _compat.infer(self._jitted, args, kwargs)
        rewritten = self._rewritten(call, args, kwargs)
        return _compat.traced_with(self._jitted.trace(*args, **kwargs), rewritten.params)

    def _lower(self, *args: Any, **kwargs: Any) -> Lowered:
        call = _compat.infer(self._jitted, args, kwargs)
        rewritten = self._rewritten(call, args, kwargs)
        ordering, params = rewritten.ordering, rewritten.params
        if ordering:
            params = ordering.named(params)
        lowered = _compat.traced_with(self._jitted.trace(*args, **kwargs), params).lower()
        return Lowered(lowered, rewritten.plan, self._found, rewritten.cluster, ordering)

    def _rewritten(self, call: _compat.Call, args: tuple, kwargs: dict) -> _Rewritten:
        """What the step became for arguments like these, from the first call with such on."""
        params = call.params
        context = (id(params["jaxpr"]), params["ctx_mesh"])
        key = (*context, *map(_compat.bound_sharding, call.flat))
        if key not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.pop(next(iter(self._seen)))
            new = self._seen[key] = self._planned(call, args, kwargs)
            unasked = self._options.plan is None and self._tuning is None
            if new.plan and not new.plan.decisions and unasked:
                _warn(f"overlap() changes nothing in {params['name']}:\n{new.plan}")
        return self._seen[key]

    def _planned(self, call: _compat.Call, args: tuple, kwargs: dict) -> _Rewritten:
        """As the options say; or as the plan does that is found now."""
        if self._tuning is None:
            return self._new(call, args, kwargs)
        plan = self._tuned(call, args, kwargs, self._tuning)
        options = Options.of(plan, cluster=self._options.cluster, on_error=self._options.on_error)
        return Overlapped(self._fn, options)._new(call, args, kwargs)

    def _tuned(self, call: _compat.Call, args: tuple, kwargs: dict, tuning: Tuning) -> Plan:
        start = begin(call, self._options)

        def rewritten(options: Options | None) -> tuple[jax.stages.Lowered, _Rewritten]:
            new = self._as_it_is(call, start.mesh)
            if options is not None:
                new = Overlapped(self._fn, options)._new(call, args, kwargs)
            params = new.ordering.named(new.params) if new.ordering else new.params
            traced = _compat.traced_with(self._jitted.trace(*args, **kwargs), params)
            return traced.lower(), new

        def lower(options: Options | None) -> Ready:
            lowered, new = rewritten(options)
            assert start.cost is not None
            return Ready(Request(job_of(lowered), start.cost, new.ordering), new.plan)

        def compiled(options: Options | None) -> tuple[jax.stages.Compiled, Plan | None]:
            lowered, new = rewritten(options)
            with new.ordering.compiling() if new.ordering else nullcontext():
                return lowered.compile(), new.plan

        return tuned(
            Subject(
                lower=lower,
                compiled=compiled,
                args=args,
                kwargs=kwargs,
                base=replace(self._options, on_error="raise"),
                origin=start.origin,
                cost=start.cost,
                memory_bytes=start.cluster.chip.memory_bytes if start.cluster else 0,
            ),
            tuning,
        )

    def _as_it_is(self, call: _compat.Call, mesh: Mesh) -> _Rewritten:
        """The step, not rewritten, by XLA's defaults; with what compiling for a pod needs."""
        params = call.params
        here = pods.compiler_options() if pods.is_pod(mesh) else {}
        plain = _compat.with_jaxpr(params, params["jaxpr"], here)
        return _Rewritten(None, plain, params, params)

    def _new(self, call: _compat.Call, args: tuple, kwargs: dict) -> _Rewritten:
        params, name = call.params, call.params["name"]
        try:
            done = travel(self._jitted, call, args, kwargs, self._options)
        except NoMeshError:
            if not any(map(_compat.is_tracer, call.flat)):
                raise
            _warn(
                f"{name} runs without overlap: it is called under jit, grad or vmap, where the "
                "shardings of its arguments are not known. Overlap the outermost function, or "
                "give the step in_shardings or sharding constraints"
            )
            return _Rewritten(None, params, params, params)
        except RewriteError as error:
            if self._options.on_error == "raise":
                raise
            _warn(f"{name} runs without overlap: {error}")
            return _Rewritten(None, params, params, params)
        own, all_options = self._xla_options(done, dict(params["compiler_options_kvs"]))
        ordering = self._ordering(name, done) if is_gpu(done.mesh) else None
        at = ordering and ordering.options
        plan = msgspec.structs.replace(
            done.plan,
            xla_options=own,
            schedule=at and Schedule(slack=at.slack, in_flight=at.in_flight),
        )
        return _Rewritten(
            plan,
            _compat.with_jaxpr(params, done.jaxpr, all_options),
            _compat.with_jaxpr(params, done.jaxpr, {}),
            params,
            done.cluster,
            ordering,
        )

    def _xla_options(
        self, done: Travelled, users: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The options that a plan names, beyond the user's own; and all, with those of a pod."""
        usual = options_for(done.mesh, rings=bool(done.plan.decisions))
        here = pods.compiler_options() if pods.is_pod(done.mesh) else {}
        chosen = self._options.xla_options
        if chosen is None:
            chosen = {name: value for name, value in usual.items() if name not in here}
        own = {name: value for name, value in chosen.items() if name not in users}
        return own, {**own, **here}

    def _ordering(self, name: str, done: Travelled) -> Ordering | None:
        """The scheduler pass, where XLA's GPU compiler makes the schedule."""
        schedule = self._options.schedule
        if schedule is not None and done.cost is None:
            _warn(
                f"{name} is left in XLA's order: there is no cost model of its GPUs "
                f"({done.cluster or 'not known'}). Name some that have one in overlap(cluster=), "
                "or give schedule=None"
            )
        return ordering_for(name, done.cost, schedule) if schedule and done.cost else None


def _warn(message: str) -> None:
    """Warn at the user's line, however deep in this package it shows."""
    warnings.warn(message, skip_file_prefixes=(str(Path(__file__).parent),))
