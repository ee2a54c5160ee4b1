"""Define `overlap`, the one line at the call site, and `tune`, which finds the fastest plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, overload

from jaxoverlap._jax.jit_wrappers import arguments_reach
from jaxoverlap.api.overlapped import Overlapped
from jaxoverlap.cost.find import cost_model
from jaxoverlap.hardware.cluster import Cluster, parse_cluster
from jaxoverlap.passes.scheduling.scheduler import Scheduler
from jaxoverlap.plan.plan import FSDP, Plan, Variant
from jaxoverlap.step.options import HalvesMode, LayoutMode, OnError, Operations, Options
from jaxoverlap.tuning.tune import Tuning

Granularity = str | Variant | Mapping[str, str | Variant] | None
_SCHEDULER = Scheduler()


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
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    operations: Operations = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
    prices: str | os.PathLike[str] | None = ...,
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
    layouts: LayoutMode | None = ...,
    halves: HalvesMode = ...,
    schedule: Scheduler | None = ...,
    plan: str | os.PathLike[str] | Plan | None = ...,
    tune: bool | Tuning = ...,
    operations: Operations = ...,
    agree_within_s: float = ...,
    never_slower: bool = ...,
    prices: str | os.PathLike[str] | None = ...,
) -> Callable[[Callable[..., Any]], Overlapped]: ...
def overlap(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    skip: Collection[str] = (),
    on_error: OnError = "raise",
    granularity: Granularity = None,
    fsdp: FSDP | None = None,
    layouts: LayoutMode | None = "repair",
    halves: HalvesMode = "auto",
    schedule: Scheduler | None = _SCHEDULER,
    plan: str | os.PathLike[str] | Plan | None = None,
    tune: bool | Tuning = False,
    operations: Operations = "take over",
    agree_within_s: float = 20.0,
    never_slower: bool = True,
    prices: str | os.PathLike[str] | None = None,
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
        layouts: whether to pin the results of matmuls where XLA's choice costs more, by price,
            and memory allows it: "repair", the default, asks XLA's partitioner about a few layouts
            (some seconds); "complete" asks about many, for steps without constraints of their own;
            None keeps XLA's choice. Your own constraints stay. Needs GPUs whose prices are known.
        halves: whether to cut the rows that each device has of the batch in parts that run side by
            side, so that the collectives of one hide behind the matmuls of another: "auto", the
            default, does so where the step is then faster by price; a number of parts, or None.
            Rows that do not divide, or equations that mix them, are named in `explain()`.
        schedule: how the scheduler pass may order the compiled step on GPUs; None for XLA's order.
        plan: a plan, or its file. It says all that skip, granularity, fsdp and schedule say, and
            is for one step, mesh, cluster and version: the first call refuses any other.
        tune: find the plan first, at the first call with arguments of a kind, as `tune` does; a
            `Tuning` says how. What was tried is kept, so that later runs find it at once. Of many
            processes process 0 tunes, and the others wait for its plan.
        operations: what becomes of `jaxoverlap.dot_general`, `einsum` and `matmul` in the step:
            "take over", the default, decides on them as on any matmul; "leave" lets them partition
            themselves, and overlaps the rest. A plan is followed with what it was made with.
        agree_within_s: where the mesh spans processes, how long the first that comes to the step,
            or to `lower`, waits there for the last: none compiles before all are about to compile
            the same. If they are not, or one does not come, all raise `DisagreementError`. As long
            it waits, once, for each process to say on which host it is.
        never_slower: where the GPUs' prices are known, compile the step as it is too, in a child
            process, and take what is faster by simulation; warn if that is not what has the rings.
            `Compiled.speedup` has both. False compiles the overlapped step alone, as does `plan`.
        prices: a file that `python -m jaxoverlap.calibrate --here` wrote of the devices and links
            that the step runs on, where the package has no prices of them: on CPUs, for one. The
            file says what the cluster is, so leave out `cluster`.

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
    if layouts not in ("repair", "complete", None):
        raise ValueError(f"layouts={layouts!r}: expected 'repair', 'complete' or None")
    if halves not in ("auto", None) and not (type(halves) is int and halves > 1):
        raise ValueError(
            f"halves={halves!r}: expected 'auto', None, or a number of parts, two or more"
        )
    if not isinstance(schedule, Scheduler | None):
        raise ValueError(f"schedule={schedule!r}: expected a jaxoverlap.Scheduler, or None")
    if not isinstance(tune, bool | Tuning):
        raise ValueError(f"tune={tune!r}: expected True, False or a jaxoverlap.Tuning")
    if operations not in ("take over", "leave"):
        raise ValueError(f"operations={operations!r}: expected 'take over' or 'leave'")
    if not agree_within_s > 0:
        raise ValueError(f"agree_within_s={agree_within_s!r}: expected seconds, more than zero")
    if not isinstance(never_slower, bool):
        raise ValueError(f"never_slower={never_slower!r}: expected True or False")
    if prices is not None and (cluster is not None or plan is not None):
        raise ValueError("prices= beside cluster= or plan=: give prices alone, which say both")
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
        if layouts != "repair":
            raise ValueError(_said_twice(["layouts"]))
        if halves != "auto":
            raise ValueError(_said_twice(["halves"]))
        options = Options.of(
            _read(plan),
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
            schedule=schedule,
            operations=operations,
            agree_within_s=agree_within_s,
            never_slower=never_slower,
            prices=None if prices is None else cost_model(table=prices),
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
    """Find the plan under which a train step is fastest, for `overlap(fn, plan=...)`.

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
        step._wrapped_jit, functools.partial(step._tune, tuning), tuple(args), dict(kwargs or {})
    )


def _said_twice(names: Sequence[str]) -> str:
    return (
        f"{', '.join(names)} beside plan=: a plan says that already. Leave out either; a plan with "
        "another answer is what explain() gives for overlap() with that argument and no plan"
    )


def _read(plan: Any) -> Plan:
    """Return a plan, or read it from its file."""
    if not isinstance(plan, str | os.PathLike | Plan):
        raise ValueError(f"plan={plan!r}: expected a jaxoverlap.Plan, or the path of its file")
    return plan if isinstance(plan, Plan) else Plan.read(plan)


def _variants(granularity: Any) -> Any:
    """Parse the names of variants, also in a mapping by source line."""
    if isinstance(granularity, Mapping):
        return {line: _variants(variant) for line, variant in granularity.items()}
    if not isinstance(granularity, str | Variant | None):
        raise ValueError(
            f"granularity={granularity!r}: expected a Variant or its name, or these by source line"
        )
    return Variant.parse(granularity) if isinstance(granularity, str) else granularity
