"""Run a tuning from end to end: cached results, the search, the channels, the clock."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from rich.console import Console

from jaxoverlap._util.expect import expect, expect_flag, expect_seconds
from jaxoverlap._util.files import kept_folder, opened, sealed, write_atomically
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import WIDTH
from jaxoverlap.plan.plan import Attempt, Measured, Nccl, Plan, Predictions
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.step.trial import Failure, Trial, schedule_of
from jaxoverlap.tuning import clock
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    TuningCandidate,
    seeds,
    ways,
    with_batch_split_of,
)
from jaxoverlap.tuning.correction import Correction, correction
from jaxoverlap.tuning.lagom.channels import CoTuned, co_tune
from jaxoverlap.tuning.lagom.granularity import GranularityModel, granularity
from jaxoverlap.tuning.search import Search, Tried
from jaxoverlap.tuning.table import progress, tried_table
from jaxoverlap.tuning.target import TuningTarget

_FORMAT = "jaxoverlap tuning"
_TIMED = 3  # candidates that are timed on hardware at first, of those that were simulated
_MOST_TIMED = 12  # in all; each is compiled here, and takes its memory


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a tuning.

    Attributes:
        budget_s: seconds after which no other candidate is tried. The step as it is and the one
            that overlap() gives are compiled however long that takes.
        measure: whether to time candidates on the devices that are here.
        cache: the folder that keeps what was tried; by default one in the user's cache.
        show: whether to show the progress and a table of what was tried, on stderr.
    """

    budget_s: float = 240.0
    measure: bool = False
    cache: str | None = None
    show: bool = True

    def __post_init__(self) -> None:
        expect_seconds("budget_s", self.budget_s)
        is_path = isinstance(self.cache, str | os.PathLike | None)
        expect(is_path, "cache", self.cache, "the path of a folder, or None")
        expect_flag("measure", self.measure)
        expect_flag("show", self.show)

    @property
    def folder(self) -> Path:
        """The folder that keeps what was tried."""
        if self.cache is not None:
            return Path(self.cache)
        return kept_folder()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tuning's result, as it is cached: the plan, and whether the search was complete."""

    plan: Plan
    complete: bool
    budget_s: float


def tuned(target: TuningTarget, tuning: Tuning) -> Plan:
    """Find the plan under which a step is fastest.

    Raises:
        ValueError: if there is neither a cost model to simulate by nor a clock to go by.
    """
    if target.cost is None and not tuning.measure:
        raise ValueError(
            f"no cost model of {target.origin.cluster or target.origin.devices}: name GPUs that "
            "have one in cluster=, or time the step on the devices that are here: measure=True"
        )
    folder = tuning.folder
    for part in ("plans", "trials"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    path = folder / "plans" / f"{_key(target, tuning)}.json"
    console = Console(stderr=True, quiet=not tuning.show)
    known = _read(path)
    if known is None or not (known.complete or known.budget_s >= tuning.budget_s):
        plan, complete = _searched(target, tuning, folder / "trials", console)
        known = _Kept(plan, complete, tuning.budget_s)
        write_atomically(path, sealed(_FORMAT, msgspec.json.encode(known)))
    where = target.origin.cluster or target.origin.devices
    width = console.width if console.is_terminal else WIDTH
    shown = tried_table(f"tuning for {where}", known.plan.tried, width=width)
    console.out(shown, highlight=False)
    return known.plan


def _key(target: TuningTarget, tuning: Tuning) -> str:
    """Hash all that the plan depends on, except the budget."""
    origin, flags = msgspec.json.encode(target.origin), os.environ.get("XLA_FLAGS", "")
    depends = (origin, repr(target.base), repr(target.cost), flags, tuning.measure)
    return hashlib.sha256(repr((depends, source_hash())).encode()).hexdigest()[:24]


def _read(path: Path) -> _Kept | None:
    """Read a cached tuning; None if it is missing or damaged, so that it is made anew."""
    try:
        return msgspec.json.decode(opened(_FORMAT, path.read_bytes()), type=_Kept)
    except (FileNotFoundError, ValueError):
        return None


def _searched(
    target: TuningTarget, tuning: Tuning, trials: Path, console: Console
) -> tuple[Plan, bool]:
    """Search for the best plan in the budget; return it, and whether the search was complete."""
    if target.cost is None:
        candidates = _without_a_model(target)
        tried = tuple(Attempt(name=c.name) for c in candidates)
        return _report(_Steps(target, console).time(candidates), tried, None), True
    with progress(tuning.budget_s, console=console) as show:
        deadline = time.monotonic() + tuning.budget_s
        search = Search(
            target.lower,
            target.base,
            trials,
            target.memory_bytes,
            deadline,
            look=target.look,
            model=lambda rules: _model(target, rules, trials),
            show=show,
        )
        best = search.run()
    tried = tuple(_attempt(t, taken=t is best) for t in search.tried)
    compiled = {t.candidate.name for t in search.tried}
    others = (one for one in search.looked.values() if one.name not in compiled)
    tried += tuple(map(_looked_at, others))
    if tuning.measure:
        return _corrected(target, search, tried, console), search.complete
    assert best.request is not None
    chosen = co_tune(schedule_of(best.request, trials), target.cost)
    plan = _predicted(_plan_of(best, search.tried), chosen, best, search.tried[0])
    return msgspec.structs.replace(plan, tried=tried), search.complete


def _model(target: TuningTarget, rules: Tried, trials: Path) -> GranularityModel:
    """Model the step's possible rings, with all other kernels of its schedule by rules."""
    assert rules.request and rules.plan and target.cost
    step = simulate(schedule_of(rules.request, trials), target.cost)
    sites, every = target.every(with_batch_split_of(target.base, rules.plan))
    model = granularity(sites, rules.plan, step, target.cost)
    return replace(model, every=every)


def _attempt(tried: Tried, *, taken: bool) -> Attempt:
    """Return a plan's record of a candidate that was tried."""
    name, result = tried.candidate.name, tried.result
    if isinstance(result, Failure):
        return Attempt(name=name, why=result.why)
    return Attempt(
        name=name,
        taken=taken,
        step_s=result.step_s,
        compute_s=result.compute_s,
        exposed_s=result.exposed_s,
        peak_bytes=result.peak_bytes,
        hops=result.hops,
        hops_covered=result.hops_covered,
    )


def _looked_at(one: TuningCandidate) -> Attempt:
    """Return a plan's record of a candidate that was estimated and not compiled."""
    if one.step_s is None:
        return Attempt(name=one.name, why="could not be rewritten")
    why = f"about {one.step_s * 1e3:.4g} ms before it is compiled: left at that"
    return Attempt(name=one.name, why=why)


# -- by simulation --------------------------------------------------------------------------------


def _plan_of(best: Tried, tried: Sequence[Tried]) -> Plan:
    if best.plan is not None:
        return best.plan
    rules = next(t.plan for t in tried if t.candidate.name == RULES)
    if rules is None:
        raise ValueError(f"the step is not rewritten: {tried[1].result}; there is nothing to tune")
    return rules.left_alone()


def _predicted(plan: Plan, chosen: CoTuned, best: Tried, plain: Tried) -> Plan:
    """Return the plan with its channels and its predictions by simulation."""
    assert isinstance(best.result, Trial)
    step, reference = chosen.step, plain.result
    predictions = Predictions(
        step_s=step.step_s,
        compute_s=step.compute_s,
        communication_s=step.communication_s,
        exposed_s=step.exposed_s,
        bound_s=step.bound_s,
        peak_bytes=best.result.peak_bytes,
        plain_step_s=reference.step_s if isinstance(reference, Trial) else None,
        plain_peak_bytes=reference.peak_bytes if isinstance(reference, Trial) else None,
    )
    return msgspec.structs.replace(plan, predictions=predictions, nccl=Nccl(channels=chosen.rows))


# -- by the clock ---------------------------------------------------------------------------------


def _without_a_model(target: TuningTarget) -> list[TuningCandidate]:
    """List the candidates to time without a cost model: seeds, and one variant for all rings."""
    _, rules = target.compiled(target.base)
    assert rules is not None
    return [
        TuningCandidate(PLAIN, None),
        TuningCandidate(RULES, target.base),
        *seeds(target.base, rules),
        *ways(target.base),
    ]


def _corrected(
    target: TuningTarget, search: Search, tried: Sequence[Attempt], console: Console
) -> Plan:
    """Find the plan that is fastest by the clock, among those the corrected simulation prefers.

    The step as it is, the rules and the fastest few are timed. That corrects the simulation; where
    it then predicts others to be faster than the best so far, all are timed in turns again.
    """
    simulated = {t.candidate.name: t.result for t in search.tried if isinstance(t.result, Trial)}
    candidates = {t.candidate.name: t.candidate for t in search.tried}
    plain, rules, *others = candidates
    fastest = sorted(simulated.keys() & others, key=lambda n: (simulated[n].step_s, n))
    chosen, steps = [plain, rules, *fastest[:_TIMED]], _Steps(target, console)
    while True:
        timed = steps.time([candidates[name] for name in chosen])
        known = [(simulated[n], t.seconds) for n, t in timed.items() if n in simulated]
        factors = correction(known) if known else None
        best_s = min(t.seconds for t in timed.values())
        said = {n: factors.step_s(simulated[n]) for n in fastest if factors and n not in timed}
        more = sorted((n for n in said if said[n] < best_s), key=lambda n: (said[n], n))
        if not more or len(chosen) >= _MOST_TIMED:
            return _report(timed, tried, factors)
        chosen += more[: _MOST_TIMED - len(chosen)]


@dataclass(frozen=True)
class _Timed:
    """A candidate's measured seconds, and its plan."""

    seconds: float
    plan: Plan | None


class _Steps:
    """Candidates that are compiled here, each once."""

    def __init__(self, target: TuningTarget, console: Console):
        self._subject, self._console = target, console
        self._made: dict[str, tuple[Callable[..., Any], Plan | None]] = {}

    def time(self, candidates: Sequence[TuningCandidate]) -> dict[str, _Timed]:
        """Time all candidates in turns."""
        target = self._subject
        with self._console.status(f"timing {len(candidates)} candidates"):
            for c in candidates:
                if c.name not in self._made:
                    self._made[c.name] = target.compiled(c.source)
            steps = [self._made[c.name] for c in candidates]
            seconds = clock.medians_s([run for run, _ in steps], target.args, target.kwargs)
        return {
            c.name: _Timed(s, plan)
            for c, s, (_, plan) in zip(candidates, seconds, steps, strict=True)
        }


def _report(
    timed: Mapping[str, _Timed],
    tried: Sequence[Attempt],
    factors: Correction | None,
) -> Plan:
    """Return the plan of the fastest candidate, with what was measured.

    Args:
        timed: the timed candidates by name, the step as it is and the rules among them.
        tried: all candidates to report on, the timed ones among them.
        factors: how far the simulation was off, if there was one.
    """
    best = min(timed, key=lambda name: timed[name].seconds)
    plan, rules = timed[best].plan, timed[RULES].plan
    if plan is None:
        assert rules is not None
        plan = rules.left_alone()
    devices = jax.devices()
    measured = Measured(
        step_s=timed[best].seconds,
        plain_step_s=timed[PLAIN].seconds,
        runs=clock.REPEATS,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        compute_factor=factors and factors.compute,
        exposed_factor=factors and factors.exposed,
    )
    reported = tuple(
        msgspec.structs.replace(
            a, measured_s=timed[a.name].seconds if a.name in timed else None, taken=a.name == best
        )
        for a in tried
    )
    return msgspec.structs.replace(plan, measured=measured, tried=reported)
