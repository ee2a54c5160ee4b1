"""Search for the fastest step: stage by stage, and a few candidates at a time.

    for each stage:  for each candidate that is left:  propose, evaluate, keep what gains

A beam search: as tinygrad's `beam_search`, with a list of actions for each stage in place of one.
`search` goes by estimates, `search_compiled` by compiled steps, for both of `overlap()` and `tune`.
Seconds of two candidates are compared in this file and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from jaxoverlap._jax.thread_config import inheriting
from jaxoverlap._util import progress
from jaxoverlap.passes.evaluated import Evaluated, Proposal
from jaxoverlap.passes.scheduling.reorder import SAME
from jaxoverlap.plan.edits import Edit, MakeRing, ReadGathered, SplitBatch
from jaxoverlap.plan.limits import (
    CLOSE_ESTIMATES,
    CLOSE_UNROLLED,
    EXPOSED,
    GAIN,
    RIVAL_LAYOUT,
    UNROLL_GAIN,
)
from jaxoverlap.plan.speedup import milliseconds
from jaxoverlap.search.candidate import Candidate

Propose = Callable[[Evaluated], Iterable[Proposal]]
Evaluate = Callable[["Stage", Candidate, Proposal], Candidate]
_SIDE_BY_SIDE = 2  # candidates: each holds its partitioned program
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

    @property
    def close(self) -> Iterator[Candidate]:
        """The candidates with another batch split that may be as fast as the one that is taken.

        By estimates that are so close either may be the faster one. The fastest comes first.
        """
        taken = self.taken
        for one in sorted(self.left, key=lambda one: one.seconds):
            same_parts = split_of(one)[0] == split_of(taken)[0]
            share = CLOSE_UNROLLED if same_parts else CLOSE_ESTIMATES
            apart = gains(taken.seconds, one.seconds, share)
            apart = apart or gains(one.seconds, taken.seconds, share)
            if split_of(one) != split_of(taken) and one.seconds < math.inf and not apart:
                yield one

    def of(self, *stages: str) -> Iterator[Candidate]:
        """Yield the candidates that some stages have proposed."""
        return (row for row in self.rows if row.stage in stages)


def gains(after_s: float, before_s: float, least: float) -> bool:
    """Return whether a step is faster than another by this share of its seconds, or more."""
    return least == ANYWAY or after_s < before_s * (1 - least)


def near(candidates: Iterable[Candidate], share: float) -> list[Candidate]:
    """Return candidates, the fastest first, but for those that it gains more than a share on."""
    known = sorted(candidates, key=lambda one: one.seconds)
    return [one for one in known if not gains(known[0].seconds, one.seconds, share)]


def ranked(compiled: Iterable[Candidate], most_bytes: float) -> list[Candidate]:
    """Return compiled candidates, the fastest first; equally fast ones as they came.

    Those that need more memory than there is come behind those that do not, and those that were
    refused behind all.

    Args:
        compiled: the candidates; seconds that differ by less than `SAME` are equal.
        most_bytes: the bytes of memory that one may need.
    """
    rows = list(compiled)
    unit = next((one.seconds for one in rows if one.seconds < math.inf), 1.0) * SAME

    def key(one: Candidate) -> tuple[bool, bool, float]:
        known = one.seconds < math.inf
        too_large = one.evaluation.peak_bytes > most_bytes
        return not known, too_large, round(one.seconds / unit) if known else math.inf

    return sorted(rows, key=key)


def quickest(rows: Iterable[Candidate], *, anyway: bool = False) -> Candidate | None:
    """Return the candidate with the fewest seconds; None if none are known.

    Args:
        rows: the candidates.
        anyway: whether one without known seconds is returned, where there is no other.
    """
    may = (row for row in rows if not row.evaluation.refusal)
    one = min(may, key=lambda row: row.seconds, default=None)
    return one if anyway or (one is not None and one.seconds < math.inf) else None


def falls_short(after: Candidate, before: Candidate) -> str:
    """Say why a candidate is not taken while another one is."""
    return "it is slower" if after.seconds >= before.seconds else f"it gains less than {GAIN:.0%}"


def exposes(taken: Candidate, compiled: Iterable[Candidate]) -> bool:
    """Return whether a compiled step takes longer than kernels alone, where these are fastest.

    Args:
        taken: the step.
        compiled: all compiled steps of the function.
    """
    compute_s = min(one.evaluation.simulated.compute_s for one in compiled)
    return taken.seconds > compute_s * (1 + EXPOSED)


def outcome(row: Candidate, taken: Candidate) -> str:
    """Say why a candidate was not taken: it may not be, gains too little, or another is faster."""
    before = row.parent
    if row.evaluation.refusal:
        return row.evaluation.refusal
    if row.evaluation.step_s is None:
        return "other edits send fewer bytes"
    if before is not None and row.seconds >= before.seconds:
        return f"not faster than without: {milliseconds(before.seconds)}"
    if before is None or row.seconds > taken.seconds:
        return "another is faster"
    return f"it gains too little on {milliseconds(before.seconds)}"


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


Batches = Callable[[Sequence[Candidate]], Iterable[Sequence[Candidate]]]


def search_compiled(
    stages: Sequence[Batches], compiled: Callable[[Sequence[Candidate]], list[Candidate]]
) -> list[Candidate]:
    """Search among candidates that are compiled; return all of them, in order.

    Args:
        stages: each yields batches of candidates, and goes by the list of all that are compiled,
            which has those of its last batch when it goes on.
        compiled: compiles candidates, and returns those that it has evaluated: all, in time.
    """
    rows = list[Candidate]()
    for propose in stages:
        for batch in filter(None, propose(rows)):
            progress.compiling(len(batch))
            made = compiled(batch)
            rows += made
            if len(made) < len(batch):
                return rows
    return rows


def _through(stage: Stage, trail: Trail, evaluate: Evaluate) -> None:
    """Propose for the candidates that are left, and keep what gains."""
    kept: dict[Candidate, list[Candidate]] = {}
    expanded = 0
    order = sorted(trail.left, key=lambda one: one.seconds)
    with ThreadPoolExecutor(_SIDE_BY_SIDE, initializer=inheriting(lambda: None)) as pool:
        begun = _begun(stage, order, evaluate, pool)
        for candidate in order:
            if stage.expands is not None and expanded >= stage.expands:
                break
            best_s = min(
                one.seconds for one in (*trail.left, *(c for some in kept.values() for c in some))
            )
            before = len(trail.rows)
            made, proposals = begun.get(candidate) or ((), iter(stage.propose(candidate.known)))
            kept[candidate] = _after(stage, candidate, trail, evaluate, best_s, made, proposals)
            expanded += len(trail.rows) > before
    trail.left = [one for candidate in trail.left for one in kept.get(candidate, [candidate])]
    if stage.narrows:
        trail.left = list(_best_of_each_kind(trail.left))


def _begun(
    stage: Stage, order: Sequence[Candidate], evaluate: Evaluate, pool: ThreadPoolExecutor
) -> dict[Candidate, tuple[Iterator[Candidate], Iterator[Proposal]]]:
    """Begin with the proposals that are evaluated in any case, a few at a time.

    XLA partitions a step and leaves the interpreter free meanwhile, for the edits and the estimate
    of another.

    Returns:
        For each candidate those that are evaluated, and the proposals that are left.
    """
    begun: dict[Candidate, tuple[Iterator[Candidate], Iterator[Proposal]]] = {}
    if stage.takes != "best" or stage.expands is not None:
        return begun
    counts = [stage.budget.left if stage.budget else None, stage.first]
    limits = [max(0, count) for count in counts if count is not None]
    for candidate in order if stage.budget is None else order[:1]:
        proposals = iter(stage.propose(candidate.known))
        sure = itertools.islice(proposals, min(limits)) if limits else proposals
        made = pool.map(functools.partial(evaluate, stage, candidate), sure)
        begun[candidate] = made, proposals
    return begun


def _after(
    stage: Stage,
    candidate: Candidate,
    trail: Trail,
    evaluate: Evaluate,
    best_s: float,
    begun: Iterable[Candidate],
    proposals: Iterator[Proposal],
) -> list[Candidate]:
    """Return what stays of a candidate and of what a stage proposes for it."""
    made: dict[tuple[tuple[Edit, ...], str], Candidate] = {}
    now = candidate

    def is_new(one: Candidate) -> bool:
        key = one.edits, one.proposal.why_not
        if key in made:
            return False
        made[key] = one
        trail.rows.append(one)
        if stage.budget is not None:
            stage.budget.left -= 1
        progress.tried(stage.name, stage.budget.left if stage.budget else None)
        return True

    for one in begun:
        is_new(one)
    while (proposal := next(proposals, None)) is not None:
        if _is_enough(stage, [candidate, *made.values()], best_s):
            break
        one = evaluate(stage, now, proposal)
        if is_new(one) and stage.takes != "best" and gains(one.seconds, now.seconds, stage.gain):
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
