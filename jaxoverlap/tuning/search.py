"""Search for the fastest plan: compile and simulate candidates, then change one ring at a time.

First full plans (`candidates.seeds`), those of Lagom's search on the model among them
(`granularity.py`); then the best few of these with other settings (`candidates.settings`); then,
from the best, one ring after the other with another variant (`candidates.moves`): the one with the
smallest H first, each ring for itself, so that compiles grow with the number of rings and not with
that of combinations (the greedy order of Lagom, arXiv 2602.20656; that a ring's granularity is a
setting like channels is ours). Moves that help are combined and tried again. Candidates compile in
child processes (`trial.py`) and are simulated; the step without overlap is one, so a plan is never
slower than plain by simulation. Full plans and moves are first partitioned and estimated
(`passes/estimation/estimate.py`), many while children compile; those that are slower than the best
by more than `SLOWER_PLAN` or `SLOWER_MOVE` are not compiled. Nothing is random: a search that its
budget ends has tried a prefix of the candidates.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap._util.text import first_line
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.passes.scheduling.reorder import SAME
from jaxoverlap.plan.limits import SLOWER_MOVE, SLOWER_PLAN, TUNED_MEMORY
from jaxoverlap.plan.plan import Plan
from jaxoverlap.step.options import Options
from jaxoverlap.step.trial import Failure, Request, Trial, attempt
from jaxoverlap.tuning.candidates import (
    PLAIN,
    RULES,
    TuningCandidate,
    moves,
    rows,
    seeds,
    settings,
    with_batch_split_of,
    with_variants,
)
from jaxoverlap.tuning.lagom.granularity import GranularityModel
from jaxoverlap.tuning.target import Look, Lower, Ready

_TIMEOUT_S = 900.0  # for one candidate
_PLANS_WITH_SETTINGS = 2  # the fastest plans, which are tried with other settings
_MOVES_AHEAD = 8  # moves to estimate while children compile, for each worker
_MOST_WORKERS = 8  # a compile takes gigabytes of memory


def _cores() -> int:
    """Count the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass(frozen=True)
class Tried:
    """A candidate and its result.

    Attributes:
        candidate: the candidate.
        plan: its full plan; None for the step without overlap, or where the rewrite failed.
        result: the child's result, or why there is none.
        request: the request that the child got.
    """

    candidate: TuningCandidate
    plan: Plan | None
    result: Trial | Failure
    request: Request | None = None


@dataclass
class Search:
    """One tuning.

    Attributes:
        lower: rewrites and lowers a step by a plan or options; by None without overlap.
        base: the options of the rules.
        cache: the folder of cached results.
        memory_bytes: bytes of memory of a device.
        look: estimates a step by a plan or options from its partitioned program, in seconds.
        model: makes the unified model of the step, from the result of the rules' plan.
        deadline: by `time.monotonic`; what has not begun by then is not tried.
        show: called with each result, in order.
        kernels: the kernels that the candidates share.
        workers: the number of children at a time.
        tried: all results, in order.
        looked: the candidates that were estimated, by key; their seconds are None where a
            candidate cannot be rewritten or estimated.
        complete: whether the search ended by itself.
    """

    lower: Lower
    base: Options
    cache: Path
    memory_bytes: int
    deadline: float
    look: Look = lambda source: None
    model: Callable[[Tried], GranularityModel] = lambda rules: GranularityModel()
    show: Callable[[Tried], None] = lambda tried: None
    kernels: KnownKernels = field(default_factory=KnownKernels)
    workers: int = field(default_factory=lambda: min(_MOST_WORKERS, _cores()))
    tried: list[Tried] = field(default_factory=list)
    looked: dict[Hashable, TuningCandidate] = field(default_factory=dict)
    complete: bool = False

    def run(self) -> Tried:
        """Search, and return the best candidate.

        Raises:
            ValueError: if neither the step as it is nor the rewritten one compiles.
        """
        plain, rules = self._try(
            [TuningCandidate(PLAIN, None), TuningCandidate(RULES, self.base)], needed=True
        )
        if isinstance(plain.result, Failure) and isinstance(rules.result, Failure):
            raise ValueError(
                f"the step does not compile: {plain.result.why}; tune() needs one that does"
            )
        model = GranularityModel()
        if rules.plan is not None:
            plan = rules.plan
            self.base = with_batch_split_of(self.base, plan)
            known = rules.result if isinstance(rules.result, Trial) else None
            model = self.model(rules) if known else model
            full_plans = [*seeds(self.base, plan, known, model), *rows(self.base, plan)]
            looks = self._looking(moves(plan, known, (), model) if known else [])
            self._try(
                self._worth_compiling(TuningCandidate(RULES, plan), full_plans), meanwhile=looks
            )
            for candidate, plan in self._fastest_plans():
                self._try(settings(candidate, plan), meanwhile=looks)
        interrupted = any(isinstance(t.result, Failure) and t.result.again for t in self.tried)
        self.complete = self._refine(model) and not interrupted and time.monotonic() < self.deadline
        return self.best

    def _fastest_plans(self) -> list[tuple[TuningCandidate, Plan]]:
        """List the fastest candidates with different plans; the step without overlap has none."""
        fastest: list[tuple[TuningCandidate, Plan]] = []
        for one in sorted(self.tried, key=self._key):
            if one.plan is not None and all(one.plan != plan for _, plan in fastest):
                fastest.append((one.candidate, one.plan))
        return fastest[:_PLANS_WITH_SETTINGS]

    def _refine(self, model: GranularityModel) -> bool:
        """Change ring after ring, until no move is left to try; False if time ran out before."""
        seen: set[tuple[int, str]] = set()
        while True:
            best = self.best
            if best.plan is None or not isinstance(best.result, Trial):
                return True
            following = moves(best.plan, best.result, seen, model)
            if not following:
                return True
            if time.monotonic() >= self.deadline:
                return False
            batch = self._promising(
                TuningCandidate(best.candidate.name, best.plan), following, seen
            )
            if not batch:
                return True
            seen |= {(site, str(variant)) for c in batch for site, variant in c.changes.items()}
            looks = self._looking([c for c in following if c not in batch])
            tried = self._try(batch, meanwhile=looks)
            better = [t for t in tried if self._key(t) < self._key(best)]
            if len(better) > 1:
                self._try([_combined(best.plan, better, model)])

    def _worth_compiling(
        self, rules: TuningCandidate, candidates: Sequence[TuningCandidate]
    ) -> list[TuningCandidate]:
        """Return the candidates that may be the fastest by estimate, the fastest first.

        Those without an estimate come last: only a compile can tell.

        Args:
            rules: the rules' plan, whose estimate counts as well.
            candidates: the candidates, all of which are estimated if there is time.
        """
        estimated = [(self._look(rules), rules)]
        for candidate in candidates:
            if time.monotonic() >= self.deadline:
                break
            estimated.append((self._look(candidate), candidate))
        least_s = min((s for s, _ in estimated if s), default=math.inf)
        near = [(s or math.inf, c) for s, c in estimated[1:] if not s or s <= least_s * SLOWER_PLAN]
        return [c for _, c in sorted(near, key=lambda one: one[0])]

    def _promising(
        self,
        base_candidate: TuningCandidate,
        following: Sequence[TuningCandidate],
        seen: set[tuple[int, str]],
    ) -> list[TuningCandidate]:
        """Return the moves to compile next: the fastest by estimate, at most one for each worker.

        Moves slower than the best so far by `SLOWER_MOVE` are added to `seen`, never compiled.
        """
        here_s, promising = self._look(base_candidate), list[tuple[float, TuningCandidate]]()
        for candidate in following:
            known = candidate.key in self.looked
            if len(promising) >= self.workers and not known:
                continue
            step_s = self._look(candidate)
            if here_s and step_s and step_s > here_s * SLOWER_MOVE:
                seen |= {(site, str(variant)) for site, variant in candidate.changes.items()}
            else:
                promising.append((step_s or math.inf, candidate))
            if time.monotonic() >= self.deadline:
                break
        return [c for _, c in sorted(promising, key=lambda one: one[0])][: self.workers]

    def _look(self, candidate: TuningCandidate) -> float | None:
        """Return the estimated seconds of a candidate; each is partitioned once."""
        if (known := self.looked.get(candidate.key)) is None:
            assert candidate.source is not None
            try:
                step_s = candidate.step_s or self.look(candidate.source)
            except (RewriteError, UserError):
                step_s = None
            known = self.looked[candidate.key] = replace(candidate, step_s=step_s)
        return known.step_s

    def _looking(self, candidates: Sequence[TuningCandidate]) -> Callable[[], bool]:
        """Return a function that estimates the next candidate; it returns False at the end."""
        remaining = iter(candidates[: _MOVES_AHEAD * self.workers])

        def look() -> bool:
            candidate = next(remaining, None)
            if candidate is None or time.monotonic() >= self.deadline:
                return False
            self._look(candidate)
            return True

        return look

    def _try(
        self,
        candidates: Sequence[TuningCandidate],
        *,
        needed: bool = False,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> list[Tried]:
        """Lower candidates one after the other; compile as many at a time as there are workers.

        Args:
            candidates: the candidates to try.
            needed: whether to try them after the deadline too.
            meanwhile: does a piece of other work while children compile; False if none is left.
        """
        deadline = math.inf if needed else self.deadline
        with ThreadPoolExecutor(self.workers) as pool:
            begun, pending = [], list[Future[Any]]()
            for candidate in candidates:
                if time.monotonic() >= deadline:
                    break
                ready = self._lowered(candidate)
                if isinstance(ready, Failure):
                    begun.append((candidate, None, lambda failed=ready: failed))
                else:
                    running = pool.submit(self._attempt, ready.request, deadline)
                    pending.append(running)
                    begun.append((candidate, ready, running.result))
            while not all(running.done() for running in pending) and meanwhile():
                pass
            done = []
            for candidate, ready, get in begun:
                if (result := get()) is not None:
                    one = Tried(candidate, ready and ready.plan, result, ready and ready.request)
                    done.append(one)
                    self.show(one)
        self.tried += done
        return done

    def _attempt(self, request: Request, deadline: float) -> Trial | Failure | None:
        """Compile a candidate in a child; return None if it could not begin in time."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        return attempt(request, self.cache, min(remaining_s, _TIMEOUT_S), self.kernels)

    def _lowered(self, candidate: TuningCandidate) -> Ready | Failure:
        """Lower a candidate; one that cannot be rewritten fails, but the rules' error is raised."""
        try:
            return self.lower(candidate.source)
        except (RewriteError, UserError) as error:
            if candidate.name == RULES:
                raise
            what = error.what if isinstance(error, RewriteError) else first_line(error)
            return Failure(why=f"{type(error).__name__}: {what}")

    @property
    def best(self) -> Tried:
        """The fastest candidate that fits; of equally fast ones the first."""
        return min(self.tried, key=self._key)

    def _key(self, tried: Tried) -> tuple[int, int]:
        """Return the key to minimize: failures and too large steps last, then rounded seconds."""
        if isinstance(tried.result, Failure):
            return 2, 0
        reference = next(t.result for t in self.tried if isinstance(t.result, Trial))
        most = min(self.memory_bytes, TUNED_MEMORY * reference.peak_bytes)
        seconds = round(tried.result.step_s / (reference.step_s * SAME))
        return int(tried.result.peak_bytes > most), seconds


def _combined(plan: Plan, better: Sequence[Tried], model: GranularityModel) -> TuningCandidate:
    """Combine all moves that helped in one candidate."""
    changes = {site: variant for t in better for site, variant in t.candidate.changes.items()}
    name = " + ".join(t.candidate.name for t in better)
    return TuningCandidate(name, with_variants(plan, changes, model.rings), changes)
