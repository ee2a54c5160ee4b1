"""Define `overlap`, the decorator of train steps, and `tune`, which finds their fastest plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from jaxoverlap._jax.jit_wrappers import arguments_reach
from jaxoverlap._util.expect import (
    expect,
    expect_flag,
    expect_memory,
    expect_one_of,
    expect_seconds,
    is_integer,
)
from jaxoverlap._util.files import check_writable
from jaxoverlap.api.overlapped import Overlapped
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import Cluster, cluster_from
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.plan import FSDP, Plan, Variant
from jaxoverlap.start.record import Trials
from jaxoverlap.start.settings import LEAST_TRIALS, TRIAL_STEPS, Start, StartMode
from jaxoverlap.step.options import HalvesMode, LayoutMode, OnError, Operations, Options, StreamMode
from jaxoverlap.tuning.tune import Tuning

Granularity = str | Variant | Mapping[str, str | Variant] | None
_SCHEDULER = Scheduler()
_DECORATES: Any = object()  # no function was given: overlap(...) is a decorator


@overload
def overlap(
    fn: Callable[..., Any],
    *,
    cluster: str | Cluster | None = ...,
    skip: Collection[str] = ...,
    on_error: OnError = ...,
    granularity: Granularity = ...,
    fsdp: FSDP | None = ...,
    layouts: LayoutMode | None = ...,
    halves: HalvesMode = ...,
    streams: StreamMode = ...,
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    operations: Operations = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
    prices: str | os.PathLike[str] | None = ...,
    memory: float | str | None = ...,
    keep: Collection[str] = ...,
    recompute: Collection[str] = ...,
    start: StartMode | None = ...,
    trials: int | None = ...,
    cache: str | os.PathLike[str] | None = ...,
    on_trials: Callable[[Trials], object] | None = ...,
) -> Overlapped: ...
@overload
def overlap(
    *,
    cluster: str | Cluster | None = ...,
    skip: Collection[str] = ...,
    on_error: OnError = ...,
    granularity: Granularity = ...,
    fsdp: FSDP | None = ...,
    layouts: LayoutMode | None = ...,
    halves: HalvesMode = ...,
    streams: StreamMode = ...,
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    operations: Operations = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
    prices: str | os.PathLike[str] | None = ...,
    memory: float | str | None = ...,
    keep: Collection[str] = ...,
    recompute: Collection[str] = ...,
    start: StartMode | None = ...,
    trials: int | None = ...,
    cache: str | os.PathLike[str] | None = ...,
    on_trials: Callable[[Trials], object] | None = ...,
) -> Callable[[Callable[..., Any]], Overlapped]: ...
def overlap(
    fn: Callable[..., Any] = _DECORATES,
    *,
    cluster: str | Cluster | None = None,
    skip: Collection[str] = (),
    on_error: OnError = "raise",
    granularity: Granularity = None,
    fsdp: FSDP | None = None,
    layouts: LayoutMode | None = "repair",
    halves: HalvesMode = "auto",
    streams: StreamMode = "auto",
    schedule: Scheduler | None = _SCHEDULER,
    plan: str | os.PathLike[str] | Plan | None = None,
    tune: bool | Tuning = False,
    operations: Operations = "take over",
    agree_within_s: float = 20.0,
    never_slower: bool = True,
    prices: str | os.PathLike[str] | None = None,
    memory: float | str | None = None,
    keep: Collection[str] = (),
    recompute: Collection[str] = (),
    start: StartMode | None = None,
    trials: int | None = TRIAL_STEPS,
    cache: str | os.PathLike[str] | None = None,
    on_trials: Callable[[Trials], object] | None = None,
) -> Overlapped | Callable[[Callable[..., Any]], Overlapped]:
    """Hide a train step's collectives behind its matmuls.

    Chooses by estimated cost among splitting the batch, rings, pinned layouts and the order of
    XLA's instructions. A matmul whose shardings imply a collective,
    or that is next to a collective of your own in a `jax.shard_map`, may become a ring of permutes,
    each overlapped with a chunk of the matmul. Results change only by the order of floating-point
    sums; `explain()` gives the decision on each matmul. A sum of activations may stay scattered
    until the next matmuls gather it; pin it with `jax.lax.with_sharding_constraint` to prevent
    that. Wrap the jitted step with everything in it (forward, backward, optimizer):

        step = jaxoverlap.overlap(train_step)

    or use `@jaxoverlap.overlap` or `@jaxoverlap.overlap(cluster="h100-sxm:8x8")`. A step on one
    device, or on no single mesh, runs unchanged, with one warning.

    Args:
        fn: a function from `jax.jit`, flax's `nnx.jit` or equinox's `filter_jit`, a method or a
            `functools.partial` of one, or a plain function, which is then jitted by `jax.jit`
            without options: it may take no nnx objects and change no argument in place
            (ValueError). The jit's static and donated arguments, shardings and name stay; what
            nnx.jit changes in its arguments, it still changes.
        cluster: the GPUs that the step is for, as "chip:hosts x GPUs per host", and "/processes
            per host" if that is not one ("h100-sxm:8x8/8"). The mesh must have as many devices.
            Default: the devices of the mesh, on the hosts that their processes report.
        skip: source lines ("gpt.py:88") or modules of flax's linen ("mlp.up") whose matmuls are not
            rewritten. The front of a name may be left out; `*` and `?` match as in file names.
        on_error: "raise", or "plain": if a rewrite fails, run the original step and warn once per
            failure. Errors of the step itself and of these arguments are always raised.
        granularity: how collectives are decomposed: a `Variant` or its name, as in "two_way",
            "direct x 2" (two slices per chunk), "sliced x 4" (no ring: the collective in four
            slices) or "plain" (not decomposed); or a dict of these by source line or module, as in
            {"gpt.py:88": "two_way"}. Default: "one_way", or "direct" for sums between hosts; with a
            cost table, slices or no ring where these are estimated faster.
        fsdp: how sharded weights are gathered in a scan over layers: "prefetch" gathers them one
            iteration ahead, through the scan's carry, which needs a second buffer; "ring" gathers
            them inside the matmul, if that has no other collective.
        layouts: whether to pin results of matmuls if XLA's sharding has a higher estimated cost and
            memory allows it: "repair" runs XLA's partitioner on a few layouts (some seconds);
            "complete" on many, for steps without constraints of their own; None keeps XLA's choice.
            Your own constraints stay. Needs a cost table of the GPU.
        halves: whether to split the batch that each device has into parts, one of which computes
            while another communicates: "auto" does if the estimated step is faster; a number of
            parts; or None. `explain()` names a batch that does not divide and equations that mix
            sequences.
        streams: XLA launches all asynchronous collectives on one stream, where one over NVLink
            waits for those over the network that were started before it. "auto" gives NVLink's a
            stream of their own if the estimated step is 1% faster or more; "one" does not, nor does
            the environment variable JAXOVERLAP_STREAMS=one.
        schedule: how the scheduler pass may order the compiled step on GPUs; None for XLA's order.
        plan: a `Plan` or the path of its file. It replaces skip, granularity, fsdp, layouts,
            halves, streams, schedule, memory and keep, and is for one step, mesh, cluster and
            version: the first call refuses any other.
        tune: search as `tune` does, for arguments of each type; a `Tuning` has its settings. A step
            that starts as it is runs meanwhile, and then has trial steps of the fastest eight
            programs; any other waits for the search at its first call. Results are cached for later
            runs. With several processes, process 0 searches.
        operations: what becomes of `jaxoverlap.dot_general`, `einsum` and `matmul` in the step:
            "take over" decides on them as on any matmul; "leave" lets them partition themselves. A
            plan needs the setting that it was made with.
        agree_within_s: seconds that the first of several processes to reach the step, or `lower`,
            waits for the last: no process compiles before all are about to compile the same
            program. If they are not, or one does not come, all raise `DisagreementError`. The same
            wait applies once to the report on which host each process runs.
        never_slower: if there is a cost table, also compile the original step, in a child process,
            and keep the faster one by simulation, with a warning if that is not the overlapped one.
            `Compiled.speedup` has both times. False, or a plan, compiles the overlapped step alone.
        prices: a file of measured costs that `python -m jaxoverlap.calibrate --here` wrote, for
            devices without a cost table, CPUs included. The file names the cluster, so leave out
            `cluster`.
        memory: the memory that a device may need: a share of its own, as in 0.9, or as in "70GB".
            Values that `jax.checkpoint` would compute again are then kept as long as the step is
            faster for it, and layers of a step that needs more are recomputed; the compiled step
            needs no more, or is refused. None keeps what the program keeps. Needs a cost table of
            the GPU. A step that needs more as it is written does not start at once.
        keep, recompute: values that are kept in any case, or are not kept by `memory`: names of
            `jax.ad_checkpoint.checkpoint_name`, or source lines ("gpt.py:88"), of values that
            `jax.checkpoint` computes again.
        start: "plain" runs the original step at once, as `jax.jit` does, and searches and compiles
            meanwhile, in a thread; then trial steps time the original step and the best few, and
            the fastest runs; if the search fails, a warning says why, whatever `on_error` is.
            "decided" searches and compiles before the first step. Default: "plain" on GPUs, or
            where one of the three arguments below is given; "decided" on other devices, and with
            `trials=None`, `plan` or `never_slower=False`.
        trials: the trial steps at most; None for none: the program is then chosen by estimate and
            simulation, so that a run can be repeated bit by bit.
        cache: the folder that keeps decisions of trials, so that the next run of the same step
            decides nothing. Default: JAXOVERLAP_CACHE of the environment, or ~/.cache/jaxoverlap.
        on_trials: is called with the record (`Trials`) once the trials are over; by default one
            line is printed to stderr.

    Raises:
        ValueError: if an argument has another value than these, `cluster` does not parse, the
            plan's file is damaged, or an argument is given that the plan replaces.
        OSError: if the plan's file cannot be read.
    """
    lines: tuple[str, ...] = _names("skip", skip, "source lines or modules")
    expect_one_of("on_error", on_error, "raise", "plain")
    named = None if cluster is None else cluster_from(cluster)
    expect_one_of("fsdp", fsdp, "prefetch", "ring", None)
    expect_one_of("layouts", layouts, "repair", "complete", None)
    named_mode = isinstance(halves, str | None) and halves in ("auto", None)
    how_many = "'auto', None, or a number of parts, two or more"
    expect(named_mode or is_integer(halves, 2), "halves", halves, how_many)
    expect_one_of("streams", streams, "auto", "one")
    is_schedule = isinstance(schedule, Scheduler | None)
    expect(is_schedule, "schedule", schedule, "a jaxoverlap.Scheduler, or None")
    expect(isinstance(tune, bool | Tuning), "tune", tune, "True, False or a jaxoverlap.Tuning")
    expect_one_of("operations", operations, "take over", "leave")
    expect_seconds("agree_within_s", agree_within_s)
    expect_flag("never_slower", never_slower)
    is_path = isinstance(prices, str | os.PathLike | None)
    expect(is_path, "prices", prices, "the path of a file that jaxoverlap.calibrate wrote")
    if prices is not None and (cluster is not None or plan is not None):
        raise ValueError("prices= with cluster= or plan=: give prices= alone, it replaces both")
    most = expect_memory("memory", memory)
    always, never = _names("keep", keep), _names("recompute", recompute)
    if both := {*always} & {*never}:
        raise ValueError(f"keep= and recompute= both name {sorted(both)[0]!r}: leave it out of one")
    if never and most is None:
        raise ValueError("recompute= without memory=: nothing but memory= keeps more than was said")
    if tune and (most is not None or always):
        raise ValueError(
            "tune= with memory= or keep=: a tuning does not choose what is kept. Leave tune= out"
        )
    tuning = Tuning() if tune is True else tune or None
    fixed = {"plan": plan is not None, "never_slower=False": not never_slower}
    starts = _start(start, trials, cache, on_trials, [name for name, set_ in fixed.items() if set_])
    if plan is not None:
        if tuning:
            raise ValueError(_said_twice(["tune"]))
        said = {"skip": lines, "granularity": granularity, "fsdp": fsdp}
        if twice := [name for name, value in said.items() if value]:
            raise ValueError(_said_twice(twice))
        if schedule is not _SCHEDULER:
            raise ValueError(_said_twice(["schedule"]))
        if layouts != "repair":
            raise ValueError(_said_twice(["layouts"]))
        if halves != "auto":
            raise ValueError(_said_twice(["halves"]))
        if streams != "auto":
            raise ValueError(_said_twice(["streams"]))
        kept = {"memory": most, "keep": always, "recompute": never}
        if twice := [name for name, value in kept.items() if value]:
            raise ValueError(_said_twice(twice))
        options = Options(
            plan=_read(plan),
            cluster=named,
            on_error=on_error,
            operations=operations,
            agree_within_s=agree_within_s,
        )
    else:
        options = Options(
            cluster=named,
            skip=lines,
            on_error=on_error,
            granularity=_variants(granularity),
            fsdp=fsdp or "prefetch",
            layouts=layouts,
            halves=halves,
            streams=streams,
            schedule=schedule,
            operations=operations,
            agree_within_s=agree_within_s,
            never_slower=never_slower,
            prices=None if prices is None else cost_model(table=prices),
            by_rule=fsdp is not None,
            memory=most,
            keep=always,
            recompute=never,
        )
    if fn is _DECORATES:
        return lambda fn: Overlapped(fn, options, tuning, starts)
    return Overlapped(fn, options, tuning, starts)


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
    out: str | os.PathLike[str] | None = None,
) -> Plan:
    """Find the plan under which a train step is fastest, for `overlap(fn, plan=...)`.

    Compiles candidates for the cluster in child processes, simulates their schedules and takes the
    fastest whose memory fits; the unchanged step is one of them. Results are cached, so that a
    second run, or one after a kill, goes on from there.

    Args:
        fn: as in `overlap`.
        args, kwargs: what it is called with: arrays or ShapeDtypeStructs, as for `lower`.
        cluster: as in `overlap`.
        budget_s, measure, cache, show: as in `Tuning`.
        out: a file that has the best plan so far, and in the end the one that is returned.

    Raises:
        ValueError: if an argument is wrong, the step has no mesh, there is no cost model of the
            cluster (and measure is False), or the step does not compile.
        RewriteError: if the rewrite fails.
    """
    listed = isinstance(args, Sequence) and not isinstance(args, str)
    expect(
        listed, "args", args, "the step's positional arguments, as in tune(step, (state, batch))"
    )
    named = isinstance(kwargs, Mapping | None)
    expect(named, "kwargs", kwargs, "the step's keyword arguments, as in {'train': True}")
    check_writable(out)
    folder = os.fspath(cache) if isinstance(cache, os.PathLike) else cache
    tuning = Tuning(budget_s=budget_s, measure=measure, cache=folder, show=show)
    step = overlap(fn, cluster=cluster)
    file = None if out is None else Path(out)
    search = functools.partial(step._tune, tuning, file)
    plan = arguments_reach(step._wrapped_jit, search, tuple(args), dict(kwargs or {}))
    if file is not None:
        plan.write(file)
    return plan


def _names(option: str, given: Any, what: str = "checkpoint names or lines") -> tuple[str, ...]:
    """Return names as a tuple.

    Raises:
        ValueError: if they are something else, as one string is.
    """
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{option}={given!r}: expected {what}, as in {option}=('a.py:8',)")
    return names


def _start(start: Any, trials: Any, cache: Any, on_trials: Any, fixed: Sequence[str]) -> Start:
    """Return how a step starts.

    Args:
        start, trials, cache, on_trials: as in `overlap`.
        fixed: the arguments that fix the program, if any.
    """
    expect_one_of("start", start, "plain", "decided", None)
    counts = trials is None or is_integer(trials, LEAST_TRIALS)
    expect(counts, "trials", trials, f"a number of steps, {LEAST_TRIALS} or more, or None")
    is_path = isinstance(cache, str | os.PathLike | None)
    expect(is_path, "cache", cache, "the path of a folder, or None")
    callback = "a function of the record of the trials, or None"
    expect(on_trials is None or callable(on_trials), "on_trials", on_trials, callback)
    given = [f"trials={trials}"] if trials not in (None, TRIAL_STEPS) else []
    given += [name for name, v in (("cache", cache), ("on_trials", on_trials)) if v is not None]
    given += ["start='plain'"] if start == "plain" else []
    decides = [*fixed, *(["trials=None"] if trials is None else [])]
    decides += ["start='decided'"] if start == "decided" else []
    if given and decides:
        raise ValueError(
            f"{given[0]} with {decides[0]}: only a step that starts as it is has trials, and "
            f"{decides[0]} fixes its program before. Leave out either"
        )
    mode = "decided" if decides else "plain" if given else start
    folder = None if cache is None else Path(cache)
    return Start(mode=mode, trials=trials or TRIAL_STEPS, cache=folder, on_trials=on_trials)


def _said_twice(names: Sequence[str]) -> str:
    return (
        f"{', '.join(names)} beside plan=: a plan says that already. Leave out either; a plan with "
        "another answer is what explain() gives for overlap() with that argument and no plan"
    )


def _read(plan: Any) -> Plan:
    """Return a plan, or read it from its file."""
    if not isinstance(plan, str | os.PathLike | Plan):
        raise ValueError(f"plan={plan!r}: expected a jaxoverlap.Plan, or the path of its file")
    return plan.checked() if isinstance(plan, Plan) else Plan.read(plan)


def _variants(granularity: Any) -> Any:
    """Parse the names of variants, also in a mapping by source line."""
    if isinstance(granularity, Mapping):
        for line, variant in granularity.items():
            fits = isinstance(line, str) and not isinstance(variant, Mapping)
            expect(fits, "granularity", granularity, "source lines or modules, each with a variant")
        return {line: _variants(variant) for line, variant in granularity.items()}
    if not isinstance(granularity, str | Variant | None):
        raise ValueError(
            f"granularity={granularity!r}: expected a Variant or its name, or these by source line"
        )
    return Variant.parse(granularity) if isinstance(granularity, str) else granularity
