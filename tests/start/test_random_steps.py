"""Random steps alternate among their programs for 40 steps; nothing differs from plain's but by
rounding.

The steps are those of tests/differential: scanned and unrolled layers, momentum and Adam's moments,
integer counters, random keys, caches written in place; all, some or none of the state donated;
shardings of results stated, partly stated or left to XLA; automatic and explicit axes.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxoverlap
from jaxoverlap._jax import jits
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.plan.decisions import Variant
from jaxoverlap.search.found import found
from jaxoverlap.start import at_once, race
from jaxoverlap.start.candidates import Offer, Offers
from jaxoverlap.start.record import PLAIN, Trials
from jaxoverlap.step.options import Options
from jaxoverlap.step.program import step_program
from tests.differential import compare
from tests.differential.case import Case, draw
from tests.support.seeds import rotating

STEPS = 40
FIRST_SEED = 10_000  # other tests draw from 0 on
REDRAWS = 10  # of a step that XLA refuses, or of which no other program may run
MOST_S = 300  # that the compilations of a step may take on a busy machine
EDITS: dict[str, dict[str, Any]] = {
    "rules": {},
    "one_way": {"granularity": Variant("one_way")},
    "two_way": {"granularity": Variant("two_way"), "fsdp": "ring"},
    "direct": {"granularity": Variant("direct")},
    "sliced": {"granularity": Variant("sliced", 2)},
    "halves": {"halves": 2},
    "halves of slices": {"halves": 2, "granularity": Variant("sliced", 2)},
    "layers ahead": {"layers_ahead": True, "rings": False, "layouts": None, "halves": None},
    "late sums": {"late_sums": True, "layouts": None, "halves": None},
}


def edited(seed: int, call: jits.Call, options: Options) -> Offers:
    """Return up to three different programs of a step, made by drawn edits."""
    plans = dict[str, Any]()
    for name in random.Random(seed).sample([*EDITS], len(EDITS)):
        try:
            program = step_program(call, dataclasses.replace(options, **EDITS[name]), found)
        except (RewriteError, UserError):
            continue  # this edit is none for this step
        plan = program.plan
        if plan is not None and plan.edits and all(plan.edits != p.edits for p in plans.values()):
            plans[name] = plan
    offers = tuple(Offer(name=name, plan=plan) for name, plan in [*plans.items()][:3])
    return Offers(offers=offers, why="" if offers else "no edit changes it")


def overlapped(case: Case, cache: Path) -> jaxoverlap.Overlapped:
    fn = case.step if case.bare else case.fn
    return jaxoverlap.overlap(
        fn, start="plain", cache=cache, on_trials=lambda _: None, on_error="raise"
    )


def compiles_candidates(case: Case, step: jaxoverlap.Overlapped) -> bool:
    """Call a step until its candidates are compiled; return whether one of them may run."""
    state, end, calls = case.first_state(), time.monotonic() + MOST_S, 0
    while calls < 2 or not _started(step)._board.reports("made"):
        result, _ = case.call(step, state, calls % case.calls)
        state, calls = case.fed_back(state, result), calls + 1
        assert time.monotonic() < end
        time.sleep(0.01)
    return any(one.run for one in _started(step)._programs.values())


def _started(step: jaxoverlap.Overlapped) -> at_once.AtOnce:
    """Return the start of the signature that a step is called with from its second call on."""
    return step._started.values()[-1]


def calls_of(case: Case, fn: Callable) -> list[compare.Call]:
    """Make 40 calls of a step, less how often it was traced and compiled."""
    case.calls = STEPS
    calls = compare._calls(case, fn, case.name)
    return [dataclasses.replace(call, traces=0, compiles=0) for call in calls]


def alternates(seed: int, case: Case, cache: Path) -> tuple[Trials, list[str]] | None:
    """Compare 40 steps, whose programs take turns, with the plain ones.

    Returns:
        The record of the trials, and the differences; None if the step has but one program.
    """
    step = overlapped(case, cache)
    if not compiles_candidates(case, step):
        return None
    got = calls_of(case, step)
    again = case.built(False)
    plain = calls_of(again, again.fn)
    texts = [
        f"call {n}: {text}"
        for n, calls in enumerate(zip(plain, got, strict=True))
        for text in compare._facts_apart(*calls)
    ]
    half = case.computes_in_half
    if not texts and compare._wrong(plain[-1], got[-1], half):
        single = case.built(True)
        exact = calls_of(single, single.fn)[-1]
        off = compare._wrong(exact, got[-1], half, plain=plain[-1])
        theirs = compare._wrong(exact, plain[-1], half)
        texts = [f"{name} off by {by}, plain by {theirs.get(name)}" for name, by in off.items()]
    return _started(step).trials, texts


def is_refused(case: Case, error: Exception) -> bool:
    """Return whether the plain step raises an error of this kind too."""
    try:
        case.call(case.fn, case.first_state(), 0)
    except type(error):
        return True
    return False


def check(seed: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """Compare the first step of a seed's draws that has another program."""
    monkeypatch.setattr(race, "_LEAST", STEPS)  # none is left behind before
    monkeypatch.setattr(at_once, "offers_of", functools.partial(edited, seed))
    for draws in range(REDRAWS):
        number = FIRST_SEED + REDRAWS * seed + draws
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                done = alternates(seed, case := draw(number), cache)
            except Exception as error:
                if is_refused(draw(number), error):
                    continue
                raise
        if done is None:
            continue
        trials, differences = done
        assert differences == [], case
        ran = [one.name for one in trials.ran]
        assert PLAIN in ran and len({*ran}) > 1
        assert len(ran) > STEPS / 2, trials.ran
        return trials
    pytest.fail(f"no step of {REDRAWS} has another program")


@pytest.mark.rotating
@pytest.mark.parametrize("seed", rotating(2, range(300)))
def test_random_steps_alternate_and_are_the_plain_ones(seed, tmp_path, monkeypatch):
    check(seed, tmp_path, monkeypatch)
    jax.clear_caches()
