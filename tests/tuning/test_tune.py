"""A tuning runs from end to end: on pods without a GPU, and by the clock on CPU devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxoverlap
from jaxoverlap._jax import jits
from jaxoverlap.plan.evaluation import Evaluation, Times
from jaxoverlap.plan.plan import Skip
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.start import candidates, contender
from jaxoverlap.start.contender import Contender
from jaxoverlap.start.copies import TrialsOnCopies
from jaxoverlap.step import program
from jaxoverlap.step.options import Options
from jaxoverlap.tuning import by_clock
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


def run_for(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Have each trial step take the seconds of its program's number; the original step's is 0."""

    def taken(self: TrialsOnCopies, one: Contender) -> float:
        return seconds([*self._made.values()].index(one))

    monkeypatch.setattr(TrialsOnCopies, "_seconds", taken)


@pytest.mark.parametrize("fastest", range(3))
def test_the_fastest_by_the_clock_is_taken(tmp_path, monkeypatch, fastest: int):
    """The clock decides between the step as it is, by the rules, and with no rings."""
    run_for(monkeypatch, lambda number: 1.0 + (number != fastest))
    step, args, wanted = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    assert plan.plain == (fastest == 0) and bool(plan.decisions) == (fastest == 1)
    assert plan.measured and (plan.measured.step_s, plan.measured.runs) == (1.0, 3)
    got, _ = jaxoverlap.overlap(step, plan=plan)(*args)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def corrected(simulated: dict[str, tuple[float, float]], clock_s: dict[str, float]):
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

    def clock(candidates: Sequence[Candidate]) -> by_clock.Clocked:
        turns.append([c.stage for c in candidates])
        timed = [by_clock.measured(c, clock_s[c.stage]) for c in candidates]
        return by_clock.Clocked(timed, min(timed, key=lambda c: c.seconds), 5)

    rows = [tried(name) for name in simulated]
    return by_clock.corrected(rows, rows, clock), turns


SIMULATED = {
    **{"plain": (10.0, 4.0), "rules": (6.0, 1.0), "a": (5.0, 1.0), "b": (5.5, 1.5)},
    **{"c": (5.8, 2.0), "d": (7.0, 0.0), "e": (8.0, 0.1)},
}


def test_the_clock_wins_over_the_simulation():
    """Five candidates are timed: as it is, by the rules, and the three fastest by simulation."""
    measured = {"plain": 10.0, "rules": 7.0, "a": 10.0, "b": 6.0, "c": 11.6}
    plan, (turn,) = corrected(SIMULATED, measured)
    assert turn == ["plain", "rules", "a", "b", "c"]
    assert plan.step == "b" and [row.stage for row in plan.tried if row.taken] == ["b"]
    answers = [row.evaluation for row in plan.tried]
    assert [a.step_s for a in answers if a.by == "measured"] == [10.0, 7.0, 10.0, 6.0, 11.6]
    assert [a.step_s for a in answers if a.by == "compiled"] == [7.0, 8.0]
    assert "computing" in str(plan) and "as long as simulated" in str(plan)


def test_the_corrected_simulation_says_what_to_time_next():
    """Waiting takes five times as long here: d, which never waits, was behind and is in front."""
    measured = {n: (step_s - e) + 5 * e for n, (step_s, e) in SIMULATED.items()}
    plan, turns = corrected(SIMULATED, measured)
    assert turns == [["plain", "rules", "a", "b", "c"], ["plain", "rules", "a", "b", "c", "d", "e"]]
    assert plan.step == "d" and plan.measured
    assert plan.measured.compute_factor == pytest.approx(1)
    assert plan.measured.exposed_factor == pytest.approx(5)


def test_a_plan_to_leave_the_step_as_it_is(tmp_path, monkeypatch):
    run_for(monkeypatch, lambda number: 1.0 + number)
    step, args, _ = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    plan.write(tmp_path / "plan.json")
    again = jaxoverlap.overlap(step, plan=tmp_path / "plan.json")
    assert all(isinstance(e, Skip) for e in plan.entries) and "The original step is taken" in str(
        plan
    )
    assert again.lower(*args).as_text() == step.lower(*args).as_text()


def test_what_fails_is_dropped_with_its_reason(tmp_path, monkeypatch):
    """All but the original step fail: it is taken, and nothing was measured."""

    def compiled(call: Any, program: Any) -> Any:
        raise jax.errors.JaxRuntimeError("no memory for it")

    monkeypatch.setattr(contender, "_compiled", compiled)
    step, args, _ = on_cpus()
    plan = jaxoverlap.tune(step, args, measure=True, show=False, cache=tmp_path)
    assert plan.plain and plan.measured is None
    assert all("no memory for it" in row.why_not for row in plan.tried if not row.taken)


def test_trial_steps_take_turns_on_copies():
    """The arguments stay, though the step donates one; a shape is an array of ones."""
    seen: list[str] = []
    step, (x, w), _ = on_cpus()

    def noted(name: str, call: jits.Call) -> Contender:
        run = contender.original(call).run
        assert run is not None

        def noting(flat: Sequence[Any]) -> list[Any]:
            seen.append(name)
            time.sleep(0.02 * (name == "slow"))
            return run(flat)

        return Contender(noting)

    for given in (x, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)):
        call = jits.infer(step, (given, w), {})
        trials, names = TrialsOnCopies(call, Options()), ("plain", "fast", "slow")
        trials._made |= {name: noted(name, call) for name in names}
        timed = trials([Candidate(name, ()) for name in names])
        assert timed.fastest.stage != "slow" and timed.runs >= 3
        assert seen[:6] == ["plain", "fast", "slow", "slow", "fast", "plain"]
        assert not x.is_deleted()
        seen.clear()


# -- while the step trains ------------------------------------------------------------------------


def test_a_step_that_starts_as_it_is_has_trial_steps_of_a_tunings_programs(tmp_path):
    """Without a cost model too: those that `tune` would time. The next run decides nothing."""
    step, (x, w), wanted = on_cpus()
    tuning = jaxoverlap.Tuning(show=False, cache=str(tmp_path))

    def trained() -> jaxoverlap.Trials:
        trains = jaxoverlap.overlap(
            step, start="plain", tune=tuning, cache=tmp_path, on_trials=lambda _: None
        )
        end, since = time.monotonic() + 100, None
        while since is None:
            got, _ = trains(jnp.copy(x), w)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
            since = trains.trials[0].since
            assert time.monotonic() < end
        return trains.trials[0]

    trials = trained()
    names = [one.name for one in trials.candidates]
    assert names[:2] == ["plain", "rules"] and 3 <= len(names) <= 9 and trials.trial_steps > 0
    assert not any(one.dropped for one in trials.candidates)
    again = trained()
    assert again.cached and again.taken == trials.taken


def test_the_fastest_by_a_tunings_simulation_have_trial_steps(monkeypatch):
    """Eight at most, each program once, and none that XLA does not compile in a child."""
    step, args, _ = on_cpus()
    call = jits.infer(step, args, {})
    plan = jaxoverlap.overlap(step, granularity="one_way").explain(*args)

    def tried(name: str, number: int, **answer: Any) -> Candidate:
        own = msgspec.structs.replace(plan, xla_options={"xla_number": str(number)})
        evaluation = Evaluation(step_s=1.0 + number, by="compiled", **{"peak_bytes": 1} | answer)
        return Candidate.planned(name, own, evaluation=evaluation)

    rows = [
        Candidate("plain", (), Evaluation(step_s=0.5, by="compiled")),
        tried("aborts", 0, peak_bytes=0, refusal="XLA aborts"),
        *(tried(f"number {n}", n) for n in range(11, 0, -1)),
        tried("number 2 again", 2),
    ]
    search = SimpleNamespace(tried=rows)
    monkeypatch.setattr(tune_module, "_simulated", lambda *_: (search, rows[0]))
    monkeypatch.setattr(candidates.TuningTarget, "cost", SimpleNamespace())
    found = candidates.tuned_offers_of(call, Options(), jaxoverlap.Tuning())
    assert [one.name for one in found.offers] == [f"number {n}" for n in range(1, 9)]
    assert [one.simulated_s for one in found.offers] == [1.0 + n for n in range(1, 9)]


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
