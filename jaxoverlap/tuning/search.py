"""Search for the fastest plan: compile and simulate candidates, then change one ring at a time.

First full plans (`candidates.seeds`), those of Lagom's search on the model among them
(`granularity.py`); then the best few of these with other settings (`candidates.settings`); then,
from the best, one ring after the other with another variant (`candidates.moves`): the one with the
smallest H first, each ring for itself, so that compiles grow with the number of rings and not with
that of combinations (the greedy order of Lagom, arXiv 2602.20656; that a ring's granularity is a
setting like channels is ours). Moves that help are combined and tried again. Candidates compile in
child processes (`search/compiled.py`) and are simulated; the step without overlap is one, so a plan
is never slower than plain by simulation. Full plans and moves are first partitioned and estimated
(`passes/estimation/estimate.py`), many while children compile; those that are slower than the best
by more than `SLOWER_PLAN` or `SLOWER_MOVE` are not compiled. Nothing is random: a search that its
budget ends has tried a prefix of the candidates.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.limits import SLOWER_MOVE, SLOWER_PLAN, TUNED_MEMORY
from jaxoverlap.plan.plan import Plan
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.compiled import Compiler
from jaxoverlap.search.search import gains, near, ranked, search_compiled
from jaxoverlap.step.options import Options
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    Decide,
    moves,
    rows,
    seeds,
    settings,
    with_batch_split_of,
    with_variants,
)
from jaxoverlap.tuning.lagom.granularity import GranularityModel

_PLANS_WITH_SETTINGS = 2  # the fastest plans, which are tried with other settings
_MOVES_AHEAD = 8  # moves to estimate while children compile, for each worker


@dataclass
class TuningSearch:
    """One tuning.

    Attributes:
        decide: decides on a step by options: a candidate with a plan, and its estimated seconds.
        estimate: estimates a step by a plan from its partitioned program, in seconds.
        compiler: compiles candidates.
        base: the options of the rules.
        memory_bytes: bytes of memory of a device.
        deadline: by `time.monotonic`; what has not begun by then is not tried.
        model: makes the unified model of the step, from the result of the rules' plan.
        show: called with each result, in order.
        so_far: called with the best candidate so far, whenever another one is.
        tried: all results, in order.
        estimated: the candidates that were estimated, by their edits; without seconds where one
            cannot be rewritten or estimated.
        complete: whether the search ended by itself.
    """

    decide: Decide
    estimate: Callable[[Plan], float | None]
    compiler: Compiler
    base: Options
    memory_bytes: int
    deadline: float
    model: Callable[[Candidate], GranularityModel] = lambda rules: GranularityModel()
    show: Callable[[Candidate], None] = lambda tried: None
    so_far: Callable[[Candidate], None] = lambda best: None
    tried: Sequence[Candidate] = ()
    estimated: dict[Hashable, Candidate] = field(default_factory=dict)
    complete: bool = False
    _granularity: GranularityModel = field(default_factory=GranularityModel)
    _ahead: Iterator[Candidate] = field(default_factory=lambda: iter(()))

    def run(self) -> Candidate:
        """Search, and return the best candidate.

        Raises:
            ValueError: if neither the step as it is nor the rewritten one compiles.
        """
        stages = (self._first, self._whole_plans, self._with_settings, self._moves)
        self.tried = search_compiled(stages, self._compiled)
        interrupted = any(one.evaluation.again for one in self.tried)
        self.complete = not interrupted and self._in_time
        return self.best(self.tried)

    @property
    def _in_time(self) -> bool:
        return time.monotonic() < self.deadline

    def best(self, tried: Sequence[Candidate]) -> Candidate:
        """Return the fastest candidate that fits; of equally fast ones the first."""
        return self._ranked(tried)[0]

    def _ranked(self, tried: Sequence[Candidate]) -> list[Candidate]:
        known = (one.evaluation for one in tried if not one.evaluation.refusal)
        reference = next(known, Evaluation())
        return ranked(tried, min(self.memory_bytes, TUNED_MEMORY * reference.peak_bytes))

    def _compiled(self, batch: Sequence[Candidate]) -> list[Candidate]:
        """Compile a batch; the first, which is needed, in any time. Estimate others meanwhile."""
        deadline = math.inf if batch[0].stage == PLAIN else self.deadline
        done = self.compiler.evaluated(batch, deadline=deadline, meanwhile=self._look_ahead)
        for one in done:
            self.show(one)
        before = self.best(self.tried) if self.tried else None
        self.tried = [*self.tried, *done]
        if (best := self.best(self.tried)) is not before and not best.evaluation.refusal:
            self.so_far(best)
        return done

    # -- the stages -------------------------------------------------------------------------------

    def _first(self, tried: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Propose the step as it is, and what the rules make of it."""
        yield [Candidate(PLAIN, ()), self._estimated(self.decide(RULES, self.base))]
        plain, rules = tried
        if plain.evaluation.refusal and rules.evaluation.refusal:
            raise ValueError(
                f"the step does not compile: {plain.evaluation.refusal}; tune() needs one that does"
            )

    def _whole_plans(self, tried: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        rules = tried[1]
        if rules.plan is None:
            return
        self.base = with_batch_split_of(self.base, rules.plan)
        known = None if rules.evaluation.refusal else rules.evaluation.times
        if known is not None:
            self._granularity = self.model(rules)
        split = rows(self.base, rules.plan, self.decide)
        plans = seeds(self.base, rules.plan, self.decide, known, self._granularity)
        worth = self._worth_compiling(rules, itertools.chain(plans, split))
        if known is not None:
            self._look_at(moves(rules.plan, known, (), self._granularity))
        yield worth

    def _with_settings(self, tried: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Propose other settings for the fastest different plans; the step as it is has none."""
        best = list[Candidate]()
        for one in self._ranked(tried):
            if one.plan is not None and all(one.plan != other.plan for other in best):
                best.append(one)
        for one in best[:_PLANS_WITH_SETTINGS]:
            yield settings(one)

    def _moves(self, tried: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Change ring after ring of the fastest plan, until no move is left to try."""
        seen: set[tuple[int, str]] = set()
        while True:
            best = self.best(tried)
            if best.plan is None or best.evaluation.times is None or not self._in_time:
                return
            following = moves(best.plan, best.evaluation.times, seen, self._granularity)
            batch = self._promising(best, following, seen)
            if not batch:
                return
            seen |= {(site, str(variant)) for c in batch for site, variant in c.changes.items()}
            self._look_at(c for c in following if c not in batch)
            before = len(tried)
            yield batch
            better = [one for one in tried[before:] if self.best([*tried[:before], one]) is one]
            if len(better) > 1:
                yield [_combined(best.plan, better, self._granularity)]

    # -- estimates --------------------------------------------------------------------------------

    def _worth_compiling(
        self, rules: Candidate, candidates: Iterator[Candidate]
    ) -> list[Candidate]:
        """Return the candidates that may be the fastest by estimate, the fastest first.

        Those without an estimate come last: only a compile can tell.

        Args:
            rules: the rules' plan, whose estimate counts as well.
            candidates: the candidates, all of which are decided and estimated if there is time.
        """
        known, unknown = [self._estimated(rules)], list[Candidate]()
        while self._in_time and (candidate := next(candidates, None)) is not None:
            one = self._estimated(candidate)
            (known if one.seconds < math.inf else unknown).append(one)
        return [*(one for one in near(known, SLOWER_PLAN) if one is not known[0]), *unknown]

    def _promising(
        self, best: Candidate, following: Sequence[Candidate], seen: set[tuple[int, str]]
    ) -> list[Candidate]:
        """Return the moves to compile next: the fastest by estimate, at most one for each worker.

        Moves slower than the best so far by `SLOWER_MOVE` are added to `seen`, never compiled.
        """
        here, promising = self._estimated(best), list[Candidate]()
        for candidate in following:
            known = candidate.edits in self.estimated
            if len(promising) >= self.compiler.workers and not known:
                continue
            one = self._estimated(candidate)
            if one.seconds < math.inf and gains(here.seconds, one.seconds, SLOWER_MOVE):
                seen |= {(site, str(variant)) for site, variant in candidate.changes.items()}
            else:
                promising.append(one)
            if not self._in_time:
                break
        return sorted(promising, key=lambda one: one.seconds)[: self.compiler.workers]

    def _estimated(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its estimated seconds; each is partitioned once."""
        if candidate.evaluation.refusal:
            return candidate
        if (known := self.estimated.get(candidate.edits)) is None:
            answer = candidate.evaluation
            if candidate.plan is not None and (answer.step_s is None or answer.by != "estimate"):
                answer = self._estimate(candidate.plan)
            known = self.estimated[candidate.edits] = replace(candidate, evaluation=answer)
        return replace(candidate, evaluation=known.evaluation)

    def _estimate(self, plan: Plan) -> Evaluation:
        try:
            return Evaluation(step_s=self.estimate(plan))
        except (RewriteError, UserError):
            return Evaluation()

    def _look_at(self, candidates: Iterable[Candidate]) -> None:
        """Let some candidates be estimated while the next ones compile."""
        self._ahead = iter([*candidates][: _MOVES_AHEAD * self.compiler.workers])

    def _look_ahead(self) -> bool:
        """Estimate the next candidate; return False at the end."""
        candidate = next(self._ahead, None)
        if candidate is None or not self._in_time:
            return False
        self._estimated(candidate)
        return True


def _combined(plan: Plan, better: Sequence[Candidate], model: GranularityModel) -> Candidate:
    """Combine all moves that helped in one candidate."""
    changes = {site: variant for one in better for site, variant in one.changes.items()}
    name = " + ".join(one.stage for one in better)
    return Candidate.planned(name, with_variants(plan, changes, model.rings), changes=changes)
