"""A tuning runs from end to end: on pods without a GPU, and by the clock on CPU devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap.plan.evaluation import Evaluation, Times
from jaxoverlap.plan.plan import Skip
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.step import program
from jaxoverlap.tuning import clock
from jaxoverlap.tuning import tune as tune_module
from tests.support.megatron import POD, megatron
from tests.support.pods import pytestmark as pods


def tuned(cache: Path, **given: Any) -> jaxoverlap.Plan:
    step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
    return jaxoverlap.tune(
        step, args, **{"cluster": POD, "budget_s": 5, "show": False, "cache": cache} | given
    )


@pytest.fixture(scope="module")
def plan_and_cache(tmp_path_factory) -> tuple[jaxoverlap.Plan, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return tuned(cache), cache


class TestPods:
    pytestmark = pods

    def test_the_plan_is_what_compiles_as_predicted(self, plan_and_cache):
        plan, _ = plan_and_cache
        step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
        compiled = jaxoverlap.overlap(step, plan=plan).lower(*args).compile()
        assert not plan.nccl.channels  # with channels of NCCL's own
        assert compiled.simulate().step_s == pytest.approx(plan.predictions.step_s)
        assert plan.predictions.step_s <= plan.predictions.plain_step_s

    def test_it_is_no_slower_than_what_overlap_does_unasked(self, plan_and_cache):
        plan, _ = plan_and_cache
        step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
        unasked = jaxoverlap.overlap(step, cluster=POD, never_slower=False)
        rules = unasked.lower(*args).compile().simulate()
        assert plan.predictions.step_s <= rules.step_s

    def test_the_second_time_nothing_is_lowered(self, plan_and_cache, monkeypatch):
        plan, cache = plan_and_cache
        monkeypatch.setattr(program, "run_passes", None)
        assert tuned(cache) == plan

    def test_more_time_goes_on_from_what_was_tried(self, plan_and_cache, capfd):
        _, cache = plan_and_cache
        before = {p.name: p.stat().st_mtime_ns for p in (cache / "trials").glob("*.json")}
        tuned(cache, budget_s=6, show=True)
        after = {p.name: p.stat().st_mtime_ns for p in (cache / "trials").glob("*.json")}
        assert before.items() <= after.items()
        assert "plain" in (shown := capfd.readouterr().err) and "rules" in shown

    def test_a_damaged_plan_is_made_anew(self, plan_and_cache):
        """How far a search gets in its budget differs from run to run; what it keeps is whole."""
        _, cache = plan_and_cache
        for path in (kept := list((cache / "plans").iterdir())):
            path.write_bytes(path.read_bytes()[:-40])
        damaged = {path: path.read_bytes() for path in kept}
        anew = tuned(cache)
        assert anew.predictions.step_s <= anew.predictions.plain_step_s
        assert all(path.read_bytes() != damaged[path] for path in kept)
        assert tuned(cache) == anew

    def test_overlap_tunes_at_the_first_call(self, plan_and_cache):
        _, cache = plan_and_cache
        plan = tuned(cache)
        step, args = megatron(jaxoverlap.pod_mesh(POD, {"tp": 8}))
        tuning = jaxoverlap.Tuning(budget_s=5, show=False, cache=str(cache))
        lowered = jaxoverlap.overlap(step, cluster=POD, tune=tuning).lower(*args)
        assert lowered.plan is not None and lowered.plan.entries == plan.entries

    def test_killed_at_any_moment_it_goes_on(self, tmp_path):
        """A tuning is killed twice, the second time later; what it leaves is whole."""
        program = (
            "from tests.tuning.test_tune import tuned; from pathlib import Path;"
            f"tuned(Path({str(tmp_path)!r}), budget_s=60)"
        )
        for seconds in (3.0, 6.0):
            child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
            time.sleep(seconds)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        plan = tuned(tmp_path)
        assert plan.predictions.step_s <= plan.predictions.plain_step_s
        assert not list(tmp_path.rglob("*.tmp"))


# -- by the clock ---------------------------------------------------------------------------------


def on_cpus() -> tuple[Any, tuple[jax.Array, ...], jax.Array]:
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    at = NamedSharding(mesh, P("tp"))

    def step(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), at), x.sum()

    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (64, 64)) for key in keys)
    placed = jax.device_put(x, at), jax.device_put(w, NamedSharding(mesh, P(None, "tp")))
    return jax.jit(step, donate_argnums=0), placed, jnp.tanh(x @ w)


def test_by_the_clock_on_devices_without_a_cost_model(tmp_path):
    step, args, wanted = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    assert plan.measured and plan.predictions is None
    assert plan.measured.step_s <= plan.measured.plain_step_s
    got, _ = jaxoverlap.overlap(step, plan=plan)(*args)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fastest", range(3))
def test_the_fastest_by_the_clock_is_taken(tmp_path, monkeypatch, fastest: int):
    """The clock decides between the step as it is, by the rules, and with no rings."""
    monkeypatch.setattr(
        clock, "medians_s", lambda steps, *_: [1.0 + (i != fastest) for i in range(len(steps))]
    )
    step, args, wanted = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    assert plan.plain == (fastest == 0) and bool(plan.decisions) == (fastest == 1)
    got, _ = jaxoverlap.overlap(step, plan=plan)(*args)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def corrected(monkeypatch, simulated: dict[str, tuple[float, float]], clock_s: dict[str, float]):
    """Tune over candidates of such simulated and timed seconds; return the plan and the turns."""
    plans = {name: jaxoverlap.Plan(step=name, mesh={}, entries=()) for name in simulated}
    turns: list[list[str]] = []

    def tried(name: str) -> Candidate:
        step_s, exposed_s = simulated[name]
        parts = {"compute_s": 0.0, "communication_s": 0.0, "bound_s": 0.0}
        times = Times(step_s=step_s, exposed_s=exposed_s, **parts)
        return Candidate.planned(
            name, plans[name], evaluation=Evaluation(step_s=step_s, by="compiled", times=times)
        )

    def time_them(_, candidates):
        turns.append([c.stage for c in candidates])
        return [tune_module._measured(c, clock_s[c.stage]) for c in candidates]

    monkeypatch.setattr(tune_module._Steps, "time", time_them)
    search: Any = SimpleNamespace(tried=[tried(name) for name in simulated], estimated={})
    return tune_module._corrected(None, search, None), turns  # type: ignore[arg-type]


SIMULATED = {
    **{"plain": (10.0, 4.0), "rules": (6.0, 1.0), "a": (5.0, 1.0), "b": (5.5, 1.5)},
    **{"c": (5.8, 2.0), "d": (7.0, 0.0), "e": (8.0, 0.1)},
}


def test_the_clock_wins_over_the_simulation(monkeypatch):
    """Five candidates are timed: as it is, by the rules, and the three fastest by simulation."""
    measured = {"plain": 10.0, "rules": 7.0, "a": 10.0, "b": 6.0, "c": 11.6}
    plan, (turn,) = corrected(monkeypatch, SIMULATED, measured)
    assert turn == ["plain", "rules", "a", "b", "c"]
    assert plan.step == "b" and [row.stage for row in plan.tried if row.taken] == ["b"]
    answers = [row.evaluation for row in plan.tried]
    assert [a.step_s for a in answers if a.by == "measured"] == [10.0, 7.0, 10.0, 6.0, 11.6]
    assert [a.step_s for a in answers if a.by == "compiled"] == [7.0, 8.0]
    assert "computing" in str(plan) and "as long as simulated" in str(plan)


def test_the_corrected_simulation_says_what_to_time_next(monkeypatch):
    """Waiting takes five times as long here: d, which never waits, was behind and is in front."""
    measured = {n: (step_s - e) + 5 * e for n, (step_s, e) in SIMULATED.items()}
    plan, turns = corrected(monkeypatch, SIMULATED, measured)
    assert turns == [["plain", "rules", "a", "b", "c"], ["plain", "rules", "a", "b", "c", "d", "e"]]
    assert plan.step == "d" and plan.measured
    assert plan.measured.compute_factor == pytest.approx(1)
    assert plan.measured.exposed_factor == pytest.approx(5)


def test_a_plan_to_leave_the_step_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "medians_s", lambda steps, *_: [1.0 + i for i in range(len(steps))])
    step, args, _ = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    plan.write(tmp_path / "plan.json")
    again = jaxoverlap.overlap(step, plan=tmp_path / "plan.json")
    assert all(isinstance(e, Skip) for e in plan.entries) and "The original step is taken" in str(
        plan
    )
    assert again.lower(*args).as_text() == step.lower(*args).as_text()


def test_turns_are_taken_and_arguments_are_fresh():
    seen: list[str] = []

    def run(name: str):
        return lambda x, *, y: seen.append(name) or (x.delete() if name == "a" else None)

    args, kwargs = (jnp.ones(3),), {"y": jax.ShapeDtypeStruct((2,), np.float32)}
    taken = clock.medians_s([run("a"), run("b")], args, kwargs, repeats=3)
    assert seen == ["a", "b"] * 4 and len(taken) == 2 and min(taken) >= 0


# -- what it refuses ------------------------------------------------------------------------------


def test_nothing_to_go_by(tmp_path):
    step, args, _ = on_cpus()
    with pytest.raises(ValueError, match=r"no cost model of cpu: .*measure=True"):
        jaxoverlap.tune(step, args, cache=tmp_path)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tune": 3}, "tune=3: expected True"),
        ({"tune": True, "plan": "p.json"}, "tune beside plan"),
    ],
)
def test_bad_arguments_of_overlap(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        jaxoverlap.overlap(lambda x: x, **given)


def test_a_budget_has_to_be_some_time():
    with pytest.raises(ValueError, match=r"budget_s=0: expected seconds"):
        jaxoverlap.Tuning(budget_s=0)
