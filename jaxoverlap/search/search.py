"""Search for the fastest step: stage by stage, and a few candidates at a time.

    for each stage:  for each candidate that is left:  propose, evaluate, keep what gains

A beam search: as tinygrad's `beam_search`, with a list of actions for each stage in place of one.
Whether an estimate is faster than another is said by `gains`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.plan.edits import Edit, MakeRing, ReadGathered, SplitBatch
from jaxoverlap.plan.limits import CLOSE_ESTIMATES, GAIN, RIVAL_LAYOUT, UNROLL_GAIN
from jaxoverlap.search.candidate import Candidate

Propose = Callable[[Evaluated], Iterable[Proposal]]
Evaluate = Callable[["Stage", Candidate, Proposal], Candidate]
ANYWAY = -math.inf  # the gain of what is not the search's to decide


@dataclass
class Budget:
    """The evaluations that some stages may make in all: seconds would differ between processes."""

    left: int


@dataclass(frozen=True)
class Stage:
    """One question to the search: whether some edits make a step faster.

    Attributes:
        name: as it is printed.
        propose: proposes edits for a candidate.
        gain: the share of a candidate's seconds that a proposal has to save; ANYWAY: none.
        fits: returns why a candidate needs too much memory for its gain; empty if it does not.
        takes: "best": the best proposal. "first": the first that gains, and then those for the step
            with it, as long as one does. "each": each that gains, one after the other.
        ties: whether estimates that differ by less than `GAIN` are equal, so that the first is
            taken.
        rivals: how many proposals stay together with the candidate that they are for; 0: the better
            of both stays.
        first: how many proposals are evaluated for a candidate that has fallen behind the best.
        expands: for how many candidates there are proposals, the fastest first.
        budget: the evaluations that it may make.
        narrows: whether only the best candidate of a kind goes on: with a batch split, and without.
    """

    name: str
    propose: Propose
    gain: float = GAIN
    fits: Callable[[Candidate], str] = lambda candidate: ""
    takes: Literal["best", "first", "each"] = "best"
    ties: bool = False
    rivals: int = 0
    first: int | None = None
    expands: int | None = None
    budget: Budget | None = None
    narrows: bool = False


@dataclass
class Trail:
    """All candidates of a search, in order, and those that are left.

    Attributes:
        rows: the candidates.
        left: those that may be taken, the simplest first.
        taken: the one that is.
    """

    rows: list[Candidate] = field(default_factory=list)
    left: list[Candidate] = field(default_factory=list)

    @property
    def taken(self) -> Candidate:
        """The fastest candidate that is left; a less simple one has to gain."""
        best, *others = self.left
        for other in others:
            # Estimates of steps with rings are a hundredth too short on the suite's 7B steps.
            least = 0 if best.has(MakeRing, ReadGathered) else GAIN
            if best.has(SplitBatch) and other.has(SplitBatch):
                least = UNROLL_GAIN
            if gains(other.seconds, best.seconds, least):
                best = other
        return best

    def of(self, *stages: str) -> Iterator[Candidate]:
        """Yield the candidates that some stages have proposed."""
        return (row for row in self.rows if row.stage in stages)


def gains(after_s: float, before_s: float, least: float) -> bool:
    """Return whether a step is faster than another by this share of its seconds, or more."""
    return least == ANYWAY or after_s < before_s * (1 - least)


def search(start: Candidate, stages: Sequence[Stage], evaluate: Evaluate) -> Trail:
    """Search from a step, stage by stage.

    Args:
        start: the step as it is.
        stages: the stages, in order.
        evaluate: evaluates a proposal of a stage for a candidate.
    """
    trail = Trail([start], [start])
    for stage in stages:
        _through(stage, trail, evaluate)
    return trail


def _through(stage: Stage, trail: Trail, evaluate: Evaluate) -> None:
    """Propose for the candidates that are left, and keep what gains."""
    kept: dict[Candidate, list[Candidate]] = {}
    expanded = 0
    for candidate in sorted(trail.left, key=lambda one: one.seconds):
        if stage.expands is not None and expanded >= stage.expands:
            break
        best_s = min(
            one.seconds for one in (*trail.left, *(c for some in kept.values() for c in some))
        )
        before = len(trail.rows)
        kept[candidate] = _after(stage, candidate, trail, evaluate, best_s)
        expanded += len(trail.rows) > before
    trail.left = [one for candidate in trail.left for one in kept.get(candidate, [candidate])]
    if stage.narrows:
        trail.left = list(_best_of_each_kind(trail.left))


def _after(
    stage: Stage, candidate: Candidate, trail: Trail, evaluate: Evaluate, best_s: float
) -> list[Candidate]:
    """Return what stays of a candidate and of what a stage proposes for it."""
    made: dict[tuple[Edit, ...], Candidate] = {}
    now = candidate
    proposals = iter(stage.propose(candidate.known))
    while (proposal := next(proposals, None)) is not None:
        if _is_enough(stage, [candidate, *made.values()], best_s):
            break
        one = evaluate(stage, now, proposal)
        if one.edits in made:
            continue
        made[one.edits] = one
        trail.rows.append(one)
        if stage.budget is not None:
            stage.budget.left -= 1
        if stage.takes != "best" and gains(one.seconds, now.seconds, stage.gain):
            now = one
            if stage.takes == "first":
                proposals = iter(stage.propose(now.known))
    if stage.takes != "best":
        return [now]
    return _best(stage, candidate, list(made.values()))


def _is_enough(stage: Stage, known: Sequence[Candidate], best_s: float) -> bool:
    """Return whether no other proposal for a candidate is evaluated.

    Args:
        stage: the stage.
        known: the candidate, and what was proposed for it.
        best_s: the seconds of the best candidate.
    """
    if stage.budget is not None and stage.budget.left <= 0:
        return True
    if stage.first is None or len(known) <= stage.first:
        return False
    return gains(best_s, min(one.seconds for one in known), CLOSE_ESTIMATES)


def _best(stage: Stage, candidate: Candidate, made: Sequence[Candidate]) -> list[Candidate]:
    """Return the best of a stage's proposals, or what they were for; or both."""
    may = [one for one in made if not one.evaluation.refusal]
    least_s = min((one.seconds for one in may), default=math.inf)
    if not may or not gains(least_s, candidate.seconds, stage.gain):
        return [candidate]
    if not stage.rivals:
        most_s = least_s * (1 + GAIN) if stage.ties else least_s
        return [next(one for one in may if one.seconds <= most_s)]
    close = [one for one in may if one.seconds <= least_s * RIVAL_LAYOUT]
    close.sort(key=lambda one: one.seconds)
    return [candidate, *close[: stage.rivals]]


def _best_of_each_kind(left: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the fastest candidate of each kind that is not far behind the fastest of all."""
    best_s = min(one.seconds for one in left)
    kinds: dict[tuple[int, int], Candidate] = {}
    for one in left:
        kind = split_of(one)
        if kind not in kinds or one.seconds < kinds[kind].seconds:
            kinds[kind] = one
    for one in kinds.values():
        if not gains(best_s, one.seconds, CLOSE_ESTIMATES):
            yield one


def split_of(candidate: Candidate) -> tuple[int, int]:
    """Return the parts of a candidate's batch, and how often its scans are unrolled."""
    split = next((edit for edit in candidate.edits if isinstance(edit, SplitBatch)), None)
    return (split.parts, split.unroll) if split else (1, 1)
