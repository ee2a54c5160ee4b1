"""Run a tuning from end to end: cached results, the search, the channels, the clock."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from rich.console import Console

from jaxoverlap._util.expect import expect, expect_flag, expect_seconds
from jaxoverlap._util.files import kept_folder, opened, sealed, write_atomically
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import WIDTH
from jaxoverlap.plan.plan import Measured, Nccl, Plan, Predictions
from jaxoverlap.plan.trail import Proposed
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.compiled import Compiler
from jaxoverlap.search.search import gains, outcome, ranked
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.tuning import clock
from jaxoverlap.tuning.candidates import PLAIN, RULES, seeds, ways, with_batch_split_of
from jaxoverlap.tuning.correction import Correction, correction
from jaxoverlap.tuning.lagom.channels import CoTuned, co_tune
from jaxoverlap.tuning.lagom.granularity import GranularityModel, granularity
from jaxoverlap.tuning.search import TuningSearch
from jaxoverlap.tuning.table import progress, tried_table
from jaxoverlap.tuning.target import TuningTarget, every_ring

_FORMAT = "jaxoverlap tuning"
_TIMEOUT_S = 900.0  # for one candidate
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


def tuned(target: TuningTarget, tuning: Tuning, out: Path | None = None) -> Plan:
    """Find the plan under which a step is fastest.

    Args:
        target: the step.
        tuning: the settings.
        out: a file for the best plan so far, for whoever ends the search; None: it is not written.

    Raises:
        ValueError: if there is neither a cost model to simulate by nor a clock to go by.
    """
    if target.cost is None and not tuning.measure:
        raise ValueError(
            f"no cost model of {_where(target)}: name GPUs that "
            "have one in cluster=, or time the step on the devices that are here: measure=True"
        )
    folder = tuning.folder
    for part in ("plans", "trials"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    path = folder / "plans" / f"{_key(target, tuning)}.json"
    console = Console(stderr=True, quiet=not tuning.show)
    known = _read(path)
    if known is None or not (known.complete or known.budget_s >= tuning.budget_s):
        plan, complete = _searched(target, tuning, folder / "trials", console, out)
        known = _Kept(plan, complete, tuning.budget_s)
        write_atomically(path, sealed(_FORMAT, msgspec.json.encode(known)))
    width = console.width if console.is_terminal else WIDTH
    shown = tried_table(f"tuning for {_where(target)}", known.plan.tried, width=width)
    console.out(shown, highlight=False)
    return known.plan


def _where(target: TuningTarget) -> str:
    origin = target.start.origin
    return origin.cluster or origin.devices


def _key(target: TuningTarget, tuning: Tuning) -> str:
    """Hash all that the plan depends on, except the budget."""
    origin, flags = msgspec.json.encode(target.start.origin), os.environ.get("XLA_FLAGS", "")
    depends = (origin, repr(target.base), repr(target.cost), flags, tuning.measure)
    return hashlib.sha256(repr((depends, source_hash())).encode()).hexdigest()[:24]


def _read(path: Path) -> _Kept | None:
    """Read a cached tuning; None if it is missing or damaged, so that it is made anew."""
    try:
        return msgspec.json.decode(opened(_FORMAT, path.read_bytes()), type=_Kept)
    except (FileNotFoundError, ValueError):
        return None


def _searched(
    target: TuningTarget, tuning: Tuning, trials: Path, console: Console, out: Path | None
) -> tuple[Plan, bool]:
    """Search for the best plan in the budget; return it, and whether the search was complete."""
    if target.cost is None:
        candidates = _without_a_model(target)
        return _report(_Steps(target, console).time(candidates), candidates, None), True
    with progress(tuning.budget_s, console=console) as show:

        def write(best: Candidate) -> None:
            if out is not None:
                _plan_of(best, search.tried).write(out)

        search = TuningSearch(
            target.decide,
            target.estimate,
            Compiler(target.lower, trials, _TIMEOUT_S),
            target.base,
            target.memory_bytes,
            deadline=time.monotonic() + tuning.budget_s,
            model=lambda rules: _model(target, rules),
            show=show,
            so_far=write,
        )
        best = search.run()
    if tuning.measure:
        return _corrected(target, search, console), search.complete
    assert best.text is not None
    chosen = co_tune(best.text(), target.cost)
    plan = _predicted(_plan_of(best, search.tried), chosen, best, search.tried[0])
    rows = tuple(_row(one, best) for one in _all_of(search))
    return msgspec.structs.replace(plan, trail=rows), search.complete


def _model(target: TuningTarget, rules: Candidate) -> GranularityModel:
    """Model the step's possible rings, with all other kernels of its schedule by rules."""
    assert rules.text and rules.plan and target.cost
    step = simulate(rules.text(), target.cost)
    sites, every = every_ring(target.call, with_batch_split_of(target.base, rules.plan))
    model = granularity(sites, rules.plan, step, target.cost)
    return replace(model, every=every)


def _all_of(search: TuningSearch) -> list[Candidate]:
    """List the candidates that were compiled, and then those that were only estimated."""
    compiled = {one.stage for one in search.tried}
    return [*search.tried, *(c for c in search.estimated.values() if c.stage not in compiled)]


def _row(one: Candidate, best: Candidate) -> Proposed:
    """Return a plan's record of a candidate."""
    answer = one.evaluation
    why_not = "" if one is best else outcome(one, best)
    if answer.by == "estimate":
        why_not = "could not be rewritten"
        if answer.step_s is not None:
            why_not = f"about {answer.step_s * 1e3:.4g} ms before it is compiled: left at that"
    times = answer.times and msgspec.structs.replace(answer.times, waited=())
    answer = msgspec.structs.replace(answer, times=times)
    return Proposed(stage=one.stage, evaluation=answer, why_not=why_not)


# -- by simulation --------------------------------------------------------------------------------


def _plan_of(best: Candidate, tried: Sequence[Candidate]) -> Plan:
    if best.plan is not None:
        return best.plan
    rules = next(one for one in tried if one.stage == RULES)
    if rules.plan is None:
        why = rules.evaluation.refusal
        raise ValueError(f"the step is not rewritten: {why}; there is nothing to tune")
    return rules.plan.left_alone()


def _predicted(plan: Plan, chosen: CoTuned, best: Candidate, plain: Candidate) -> Plan:
    """Return the plan with its channels and its predictions by simulation."""
    step, reference = chosen.step, plain.evaluation
    predictions = Predictions(
        step_s=step.step_s,
        compute_s=step.compute_s,
        communication_s=step.communication_s,
        exposed_s=step.exposed_s,
        bound_s=step.bound_s,
        peak_bytes=best.evaluation.peak_bytes,
        plain_step_s=None if reference.refusal else reference.step_s,
        plain_peak_bytes=None if reference.refusal else reference.peak_bytes,
    )
    return msgspec.structs.replace(plan, predictions=predictions, nccl=Nccl(channels=chosen.rows))


# -- by the clock ---------------------------------------------------------------------------------


def _without_a_model(target: TuningTarget) -> list[Candidate]:
    """List the candidates to time without a cost model: seeds, and one variant for all rings."""
    rules = target.decide(RULES, target.base)
    assert rules.plan is not None
    others = [*seeds(target.base, rules.plan, target.decide), *ways(target.base, target.decide)]
    return [Candidate(PLAIN, ()), rules, *(one for one in others if one.plan is not None)]


def _corrected(target: TuningTarget, search: TuningSearch, console: Console) -> Plan:
    """Find the plan that is fastest by the clock, among those the corrected simulation prefers.

    The step as it is, the rules and the fastest few are timed. That corrects the simulation; where
    it then predicts others to be faster than the best so far, all are timed in turns again.
    """
    plain, rules, *others = search.tried
    fastest = [c for c in ranked(others, math.inf) if c.evaluation.times]
    chosen, steps = [plain, rules, *fastest[:_TIMED]], _Steps(target, console)
    while True:
        timed = steps.time(chosen)
        known = [(c.evaluation.times, c.seconds) for c in timed if c.evaluation.times]
        factors = correction(known) if known else None
        more = [c for c in fastest if c not in chosen] if factors else []
        if factors:
            corrected = [_measured(c, factors.step_s(c.evaluation.simulated)) for c in more]
            best = ranked(timed, math.inf)[0]
            better = {c.stage for c in corrected if gains(c.seconds, best.seconds, 0)}
            more = [c for c in ranked(corrected, math.inf) if c.stage in better]
        if not more or len(chosen) >= _MOST_TIMED:
            return _report(timed, _all_of(search), factors)
        names = [c.stage for c in more[: _MOST_TIMED - len(chosen)]]
        chosen += [c for name in names for c in fastest if c.stage == name]


def _measured(candidate: Candidate, seconds: float) -> Candidate:
    """Return a candidate with seconds by the clock, next to its simulated times."""
    answer = candidate.evaluation
    answer = msgspec.structs.replace(answer, step_s=seconds, refusal="", by="measured")
    return replace(candidate, evaluation=answer)


class _Steps:
    """Candidates that are compiled here, each once."""

    def __init__(self, target: TuningTarget, console: Console):
        self._target, self._console = target, console
        self._made: dict[str, tuple[Callable[..., Any], Plan | None]] = {}

    def time(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Time all candidates in turns; return each with its seconds, and its plan as followed."""
        call = self._target.call
        with self._console.status(f"timing {len(candidates)} candidates"):
            for one in candidates:
                if one.stage not in self._made:
                    self._made[one.stage] = self._target.compiled(one)
            made = [self._made[one.stage] for one in candidates]
            seconds = clock.medians_s([run for run, _ in made], call.args, call.kwargs)
        timed = zip(candidates, seconds, made, strict=True)
        return [replace(_measured(one, s), plan=plan) for one, s, (_, plan) in timed]


def _report(
    timed: Sequence[Candidate], tried: Sequence[Candidate], factors: Correction | None
) -> Plan:
    """Return the plan of the fastest candidate, with what was measured.

    Args:
        timed: the timed candidates, the step as it is and the rules first.
        tried: all candidates to report on.
        factors: how far the simulation was off, if there was one.
    """
    best, (plain, rules) = ranked(timed, math.inf)[0], timed[:2]
    plan = best.plan
    if plan is None:
        assert rules.plan is not None
        plan = rules.plan.left_alone()
    devices = jax.devices()
    measured = Measured(
        step_s=best.seconds,
        plain_step_s=plain.seconds,
        runs=clock.REPEATS,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        compute_factor=factors and factors.compute,
        exposed_factor=factors and factors.exposed,
    )
    by_clock = {one.stage: one for one in timed}
    rows = tuple(_row(by_clock.get(one.stage, one), best) for one in tried)
    return msgspec.structs.replace(plan, measured=measured, trail=rows)
