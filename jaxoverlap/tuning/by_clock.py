"""Choose among a tuning's candidates by the clock, and correct the simulation by it.

How they are timed is the clock's: trial steps, as in a training that starts as it is
(jaxoverlap/start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import msgspec

from jaxoverlap.plan.plan import Measured, Plan
from jaxoverlap.plan.trail import Proposed
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.search import gains, outcome, ranked
from jaxoverlap.tuning.candidates import PLAIN, RULES, seeds, ways
from jaxoverlap.tuning.correction import Correction, correction
from jaxoverlap.tuning.target import TuningTarget

_TIMED = 3  # candidates that are timed at first, of those that were simulated
_MOST_TIMED = 12  # in all; each is compiled here, and takes its memory


@dataclass(frozen=True)
class Clocked:
    """Holds candidates that were timed in turns.

    Attributes:
        candidates: each with its seconds, or why it was dropped, and its plan.
        fastest: the one of these that is kept.
        runs: the fewest runs that the seconds of one are the median of.
    """

    candidates: Sequence[Candidate]
    fastest: Candidate
    runs: int


Clock = Callable[[Sequence[Candidate]], Clocked]
"""Times candidates on the devices that are here; the first, the step as it is, is not dropped."""


def measured(candidate: Candidate, seconds: float | None, dropped: str = "") -> Candidate:
    """Return a candidate with seconds by the clock, next to its simulated times.

    Args:
        candidate: the candidate.
        seconds: the median of its runs; None if it was not timed.
        dropped: why it was dropped; empty if it was not.
    """
    answer = candidate.evaluation
    answer = msgspec.structs.replace(answer, step_s=seconds, refusal=dropped, by="measured")
    return replace(candidate, evaluation=answer)


def without_a_model(target: TuningTarget) -> list[Candidate]:
    """List the candidates to time without a cost model: seeds, and one variant for all rings."""
    rules = target.decide(RULES, target.base)
    assert rules.plan is not None
    others = [*seeds(target.base, rules.plan, target.decide), *ways(target.base, target.decide)]
    return [Candidate(PLAIN, ()), rules, *(one for one in others if one.plan is not None)]


def corrected(tried: Sequence[Candidate], rows: Sequence[Candidate], clock: Clock) -> Plan:
    """Find the plan that is fastest by the clock, among those the corrected simulation prefers.

    The step as it is, the rules and the fastest few are timed. That corrects the simulation; where
    it then predicts others to be faster than the best so far, all are timed in turns again.

    Args:
        tried: the candidates that were simulated, the step as it is and the rules first.
        rows: all candidates to report on.
        clock: times candidates.
    """
    plain, rules, *others = tried
    fastest = [c for c in ranked(others, math.inf) if c.evaluation.times]
    chosen = [plain, rules, *fastest[:_TIMED]]
    while True:
        timed = clock(chosen)
        known = [
            (c.evaluation.times, c.seconds)
            for c in timed.candidates
            if c.evaluation.times and c.seconds < math.inf
        ]
        factors = correction(known) if known else None
        more = [c for c in fastest if c not in chosen] if factors else []
        if factors:
            predicted = [measured(c, factors.step_s(c.evaluation.simulated)) for c in more]
            better = [c for c in predicted if gains(c.seconds, timed.fastest.seconds, 0)]
            names = {c.stage for c in ranked(better, math.inf)[: _MOST_TIMED - len(chosen)]}
            more = [c for c in fastest if c.stage in names]
        if not more:
            return reported(timed, rows, factors)
        chosen += more


def reported(timed: Clocked, tried: Sequence[Candidate], factors: Correction | None) -> Plan:
    """Return the plan of the fastest candidate, with what was measured.

    Args:
        timed: the timed candidates, the step as it is and the rules first.
        tried: all candidates to report on.
        factors: how far the simulation was off, if there was one.
    """
    best, (plain, rules) = timed.fastest, timed.candidates[:2]
    plan = best.plan
    if plan is None:
        assert rules.plan is not None
        plan = rules.plan.left_alone()
    times = None
    if best.seconds < math.inf:  # not where all but the step as it is were dropped
        devices = jax.devices()
        times = Measured(
            step_s=best.seconds,
            plain_step_s=plain.seconds,
            runs=timed.runs,
            devices=f"{len(devices)} x {devices[0].device_kind}",
            compute_factor=factors and factors.compute,
            exposed_factor=factors and factors.exposed,
        )
    by_clock = {one.stage: one for one in timed.candidates}
    rows = tuple(row_of(by_clock.get(one.stage, one), best) for one in tried)
    return msgspec.structs.replace(plan, measured=times, trail=rows)


def row_of(one: Candidate, best: Candidate) -> Proposed:
    """Return a plan's record of a candidate.

    Args:
        one: the candidate.
        best: the one that is taken.
    """
    answer = one.evaluation
    why_not = "" if one is best else outcome(one, best)
    if answer.by == "estimate":
        why_not = "could not be rewritten"
        if answer.step_s is not None:
            why_not = f"about {answer.step_s * 1e3:.4g} ms before it is compiled: left at that"
    times = answer.times and msgspec.structs.replace(answer.times, waited=())
    answer = msgspec.structs.replace(answer, times=times)
    return Proposed(stage=one.stage, evaluation=answer, why_not=why_not)
