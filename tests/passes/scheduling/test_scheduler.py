"""The scheduler pass runs inside XLA, on schedules compiled for pods: no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import xla_schedule
from jaxoverlap.passes.scheduling import scheduler
from jaxoverlap.passes.scheduling.scheduler import Scheduled, SchedulerCallback
from jaxoverlap.simulation import hlo
from tests.support.pods import pytestmark as pods

pytestmark = [*pods, pytest.mark.filterwarnings("ignore:overlap.. rewrites nothing")]

SCHEDULER = jaxoverlap.Scheduler()
POD = "h100-sxm:2x8"
# XLA, unlike overlap(), overlaps one collective at a time: its order leaves something to gain.
ONE_AT_A_TIME = {"xla_gpu_experimental_parallel_collective_overlap_limit": "1"}
ROWS, WIDE, LAYERS = 65536, 4096, 4


def fsdp(name: str = "step") -> tuple[Callable, tuple[Any, ...]]:
    """Build layers with weights gathered over two hosts; XLA's order hides two gathers of four."""
    mesh = jaxoverlap.pod_mesh(POD, {"data": 16})
    at = NamedSharding(mesh, P("data"))

    def step(x, weights):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x

    step.__name__ = name
    x, w = (jax.ShapeDtypeStruct((n, WIDE), jnp.bfloat16, sharding=at) for n in (ROWS, WIDE))
    return jax.jit(step, out_shardings=at), (x, [w] * LAYERS)


def overlapped(schedule: jaxoverlap.Scheduler | None = SCHEDULER, name: str = "step", **options):
    """Lower the step with no rings, so that the gathers are XLA's to place."""
    step, args = fsdp(name)
    given = {"cluster": POD, "schedule": schedule, "granularity": "plain"} | options
    return jaxoverlap.overlap(step, never_slower=False, **given).lower(*args)


def compiled(schedule: jaxoverlap.Scheduler | None = SCHEDULER, name: str = "step"):
    return overlapped(schedule, name).compile(ONE_AT_A_TIME)


def report_of(step: jaxoverlap.Compiled) -> Scheduled:
    assert step.schedule is not None
    return step.schedule


def covered(step: jaxoverlap.Compiled) -> tuple[int, int]:
    return step.audit().total.covered, step.audit().total.count


def module_of(lowered: Any) -> str:
    return lowered.as_text().split("module @")[1].split()[0]


@pytest.fixture(scope="module")
def ordered() -> jaxoverlap.Compiled:
    return compiled()


@pytest.fixture(scope="module")
def plain() -> jaxoverlap.Compiled:
    return compiled(None)


def test_xla_compiles_in_the_order_that_the_pass_gives(plain, ordered):
    report = report_of(ordered)
    assert plain.schedule is None and not report.reason
    assert report.xla and report.step and report.step.step_s < report.xla.step_s
    module = hlo.parse(ordered.as_text())
    for name, order in report.orders.items():
        kernels = [i.name for i in module.body(name) if i.opcode in ("fusion", "custom-call")]
        assert kernels == [i for i in order.names if i in kernels] != []
    assert (covered(plain), covered(ordered)) == ((2, 4), (3, 4))
    assert str(report).startswith("jit_step_") and "reordered" in str(report)


def test_it_needs_no_more_memory_than_the_slack(plain, ordered):
    temp = [step.memory_analysis().temp_size_in_bytes for step in (plain, ordered)]
    assert temp[1] <= temp[0] * (1 + SCHEDULER.slack)
    for order in report_of(ordered).orders.values():
        assert order.after.peak_bytes <= order.before.peak_bytes * (1 + SCHEDULER.slack)


def test_what_the_order_depends_on_is_in_the_modules_name(ordered):
    names = [module_of(overlapped(s)) for s in (SCHEDULER, jaxoverlap.Scheduler(slack=0.1), None)]
    assert names[2] == "jit_step" and len(set(names)) == 3
    assert hlo.parse(ordered.as_text()).name == names[0]
    step, args = fsdp()
    traced = jaxoverlap.overlap(step, cluster=POD).trace(*args)
    assert module_of(traced.lower()) == "jit_step"  # JAX alone compiles it, without the pass


def test_a_slower_order_is_not_taken(monkeypatch):
    """Seconds are inverted here, as if collectives cost more beside matmuls than they hide."""

    def swapped(module, cost):
        timeline = replay(module, cost)
        return replace(timeline, step_s=1 / timeline.step_s)

    replay = scheduler.replay
    monkeypatch.setattr(scheduler, "replay", swapped)
    report = report_of(compiled())
    assert report.reason.startswith("it is faster by simulation") and not report.orders
    assert "XLA's order kept: it is faster" in str(report)


def test_an_order_that_costs_more_than_it_gains_is_left_out(monkeypatch):
    """Order a makes the step slower; b and c help together only."""
    slower = {"a": 0.002, "b": 0.001, "c": 0.0, "d": -0.004}

    def replayed(names: tuple[str, ...], cost) -> Any:
        together = -0.002 if {"b", "c"} <= {*names} else 0.0
        return SimpleNamespace(step_s=1.0 + together + sum(slower[n] for n in names))

    monkeypatch.setattr(scheduler, "reordered", lambda module, orders: tuple(orders))
    monkeypatch.setattr(scheduler, "replay", replayed)
    orders: Any = dict.fromkeys(slower, "an order")
    kept, step, _ = scheduler._faster((), orders, replayed((), None), None)  # type: ignore[arg-type]
    assert list(kept) == ["b", "c", "d"] and step.step_s == pytest.approx(0.995)


def test_a_pass_that_raises_leaves_xlas_order(monkeypatch, plain):
    def broken(*args, **kwargs):
        raise RuntimeError("no idea")

    monkeypatch.setattr(scheduler, "schedule", broken)
    with pytest.warns(UserWarning, match="XLA's order kept: RuntimeError: no idea"):
        step = compiled()
    assert report_of(step).reason == "RuntimeError: no idea"
    assert covered(step) == covered(plain)


@pytest.mark.parametrize("wrong", ["backwards", "short"])
def test_an_order_that_does_not_verify_leaves_xlas(monkeypatch, plain, wrong: str):
    def orders(self, text: str) -> Mapping[str, Sequence[str]]:
        module = hlo.parse(text)
        names = [i.name for i in module.body(module.entry)]
        return {module.entry: names[::-1] if wrong == "backwards" else names[1:]}

    monkeypatch.setattr(SchedulerCallback, "orders", orders)
    with pytest.warns(UserWarning, match="XLA's order kept: ValueError: not a schedule"):
        step = compiled()
    assert covered(step) == covered(plain)


def test_two_compilations_at_once_each_get_their_order(ordered):
    names, executables = ("one", "two"), {}

    def work(name: str) -> None:
        executables[name] = compiled(name=name)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        report = report_of(executables[name])
        assert report.xla and report.xla.module.startswith(f"jit_{name}_")
        assert covered(executables[name]) == covered(ordered)
    assert not xla_schedule._wanted


def test_a_compilation_that_fails_leaves_nothing_registered():
    with pytest.raises(Exception, match="xla_no_such_option"):
        overlapped().compile({"xla_no_such_option": "1"})
    assert not xla_schedule._wanted


def test_what_comes_from_a_cache_says_so():
    """A second compile of one lowering takes the executable that JAX kept."""
    lowered = overlapped()
    lowered.compile()
    assert "came from a cache" in report_of(lowered.compile()).reason


def test_a_chip_without_a_cost_model_keeps_xlas_order_and_says_so():
    h100 = jaxoverlap.parse_cluster(POD)
    strange = replace(h100, chip=replace(h100.chip, name="h800"))
    with pytest.warns(UserWarning, match="no cost model of its GPUs .h800:2x8."):
        assert module_of(overlapped(cluster=strange)) == "jit_step"


def test_the_cluster_is_read_off_the_pod():
    assert module_of(overlapped(cluster=None)) == module_of(overlapped())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(slack=-0.1),
        dict(slack=float("nan")),
        dict(slack="x"),
        dict(in_flight=0),
        dict(extra_bytes=1.5),
        dict(ahead_bytes="x"),
    ],
)
def test_a_scheduler_refuses(wrong: dict[str, Any]):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}={value!r}: expected a .* or more"):
        jaxoverlap.Scheduler(**wrong)


def test_overlap_refuses_what_is_no_scheduler():
    with pytest.raises(ValueError, match=r"schedule='best': expected a jaxoverlap.Scheduler"):
        jaxoverlap.overlap(lambda x: x, schedule="best")  # type: ignore[arg-type]


def test_the_compiled_step_takes_what_the_pass_says(ordered):
    """XLA makes the first gather synchronous; put behind the second, it would wait for that."""
    report = report_of(ordered)
    assert report.step
    module = hlo.parse(ordered.as_text())
    opcodes = [i.opcode for i in module.body(module.entry)]
    gathers = [opcode for opcode in opcodes if opcode in ("all-gather", "all-gather-start")]
    assert gathers == ["all-gather", *["all-gather-start"] * 3]
    assert ordered.simulate().step_s == pytest.approx(report.step.step_s, rel=1e-3)
