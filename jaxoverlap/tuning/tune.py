"""Run a tuning from end to end: cached results, the search, the channels."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from jaxoverlap._util.expect import expect, expect_flag, expect_seconds
from jaxoverlap._util.files import kept_folder, opened, sealed, write_atomically
from jaxoverlap._util.source_hash import source_hash
from jaxoverlap._util.text import WIDTH
from jaxoverlap.plan.plan import Nccl, Plan, Predictions
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.compiled import Compiler
from jaxoverlap.search.search import ranked
from jaxoverlap.simulation.simulation import simulate
from jaxoverlap.tuning.by_clock import Clock, Clocked, corrected, reported, row_of, without_a_model
from jaxoverlap.tuning.candidates import RULES, with_batch_split_of
from jaxoverlap.tuning.lagom.channels import CoTuned, co_tune
from jaxoverlap.tuning.lagom.granularity import GranularityModel, granularity
from jaxoverlap.tuning.search import TuningSearch
from jaxoverlap.tuning.table import progress, tried_table
from jaxoverlap.tuning.target import TuningTarget, every_ring

_FORMAT = "jaxoverlap tuning"
_TIMEOUT_S = 900.0  # for one candidate


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a tuning.

    Attributes:
        budget_s: seconds after which no other candidate is tried. The step as it is and the one
            that overlap() gives are compiled however long that takes.
        measure: whether to time candidates on the devices that are here, in trial steps on copies
            of the arguments. Where the step starts as it is, trial steps of the training do.
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


def tuned(target: TuningTarget, tuning: Tuning, clock: Clock, out: Path | None = None) -> Plan:
    """Find the plan under which a step is fastest.

    Args:
        target: the step.
        tuning: the settings.
        clock: times candidates, if `tuning.measure`.
        out: a file for the best plan so far, for whoever ends the search; None: it is not written.

    Raises:
        ValueError: if there is neither a cost model to simulate by nor a clock to go by.
    """
    if target.cost is None and not tuning.measure:
        raise ValueError(
            f"no cost model of {_where(target)}: name GPUs that have one in cluster=, or time the "
            "step on the devices that are here: measure=True, or overlap(tune=True, start='plain')"
        )
    path = _folder(tuning, "plans") / f"{_key(target, tuning)}.json"
    console = Console(stderr=True, quiet=not tuning.show)
    known = _read(path)
    if known is None or not (known.complete or known.budget_s >= tuning.budget_s):
        plan, complete = _searched(target, tuning, clock, console, out)
        known = _Kept(plan, complete, tuning.budget_s)
        write_atomically(path, sealed(_FORMAT, msgspec.json.encode(known)))
    width = console.width if console.is_terminal else WIDTH
    shown = tried_table(f"tuning for {_where(target)}", known.plan.tried, width=width)
    console.out(shown, highlight=False)
    return known.plan


def worth_a_trial(target: TuningTarget, tuning: Tuning) -> list[Candidate]:
    """Return the candidates of a tuning with a program of their own, for trial steps.

    The fastest by simulation comes first; without a cost model they come as they are tried. A line
    on stderr says of each that it was simulated, unless `tuning.show` is off.
    """
    if target.cost is None:
        return [one for one in without_a_model(target) if one.plan is not None]
    # No live display: it would write over what the training prints.
    console = Console(stderr=True, quiet=not tuning.show, force_terminal=False)
    search, _ = _simulated(target, tuning, console)
    # The clock needs no simulation; what XLA does not compile in a child is not compiled here.
    may = [
        one
        for one in search.tried
        if one.plan is not None and (not one.evaluation.refusal or one.evaluation.peak_bytes)
    ]
    return ranked(may, target.memory_bytes)


def _folder(tuning: Tuning, part: str) -> Path:
    """Return a folder of what a tuning keeps, which is there."""
    folder = tuning.folder / part
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    target: TuningTarget, tuning: Tuning, clock: Clock, console: Console, out: Path | None
) -> tuple[Plan, bool]:
    """Search for the best plan in the budget; return it, and whether the search was complete."""

    def timed(candidates: Sequence[Candidate]) -> Clocked:
        with console.status(f"trial steps of {len(candidates)} candidates"):
            return clock(candidates)

    if target.cost is None:
        candidates = without_a_model(target)
        return reported(timed(candidates), candidates, None), True
    search, best = _simulated(target, tuning, console, out)
    if tuning.measure:
        return corrected(search.tried, _all_of(search), timed), search.complete
    assert best.text is not None
    chosen = co_tune(best.text(), target.cost)
    plan = _predicted(_plan_of(best, search.tried), chosen, best, search.tried[0])
    rows = tuple(row_of(one, best) for one in _all_of(search))
    return msgspec.structs.replace(plan, trail=rows), search.complete


def _simulated(
    target: TuningTarget, tuning: Tuning, console: Console, out: Path | None = None
) -> tuple[TuningSearch, Candidate]:
    """Search by simulation; return the search, which has what was tried, and the best candidate."""
    with progress(tuning.budget_s, console=console) as show:

        def write(best: Candidate) -> None:
            if out is not None:
                _plan_of(best, search.tried).write(out)

        search = TuningSearch(
            target.decide,
            target.estimate,
            Compiler(target.lower, _folder(tuning, "trials"), _TIMEOUT_S),
            target.base,
            target.memory_bytes,
            deadline=time.monotonic() + tuning.budget_s,
            model=lambda rules: _model(target, rules),
            show=show,
            so_far=write,
        )
        return search, search.run()


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
