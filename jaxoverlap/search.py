"""The search of a tuning: compile and simulate what could be the fastest plan, and move on from it.

First whole plans (`candidates.seeds`), those of Lagom's search on the model among them
(`granularity.py`); then the best few of these with other settings (`candidates.settings`); then,
from the best, one ring after the other in another way (`candidates.moves`): the one with the
smallest H first, each ring for itself, so that compiles grow with the number of rings and not with
that of combinations (the greedy order of Lagom, arXiv 2602.20656; that a ring's granularity is a
setting like channels is ours). Moves that help are put together and tried again. Every candidate is
compiled in a child process (`trial.py`) and simulated; the step as it is is one of them, so a plan
is never slower than plain by simulation. Nothing is random: what ends early by its budget is a
prefix of what would have been tried.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jaxoverlap._kernels import Kernels
from jaxoverlap.candidates import PLAIN, RULES, Candidate, changed, moves, seeds, settings
from jaxoverlap.granularity import Granularity
from jaxoverlap.options import Options
from jaxoverlap.passes.errors import RewriteError
from jaxoverlap.passes.schedule import SAME
from jaxoverlap.plan import Plan
from jaxoverlap.trial import Failure, Request, Trial, attempt

_TIMEOUT_S = 900.0  # for one candidate
_PLANS = 3  # of the model's best, that are compiled
_WITH_SETTINGS = 2  # of the best that were compiled, with other settings
MOST_MEMORY = 1.15  # times the plain step's: a plan that needs more is not taken


_MOST_WORKERS = 8  # a compile takes gigabytes of memory


def _cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass(frozen=True)
class Ready:
    """A candidate, lowered.

    Attributes:
        request: for the child.
        plan: None for the step as it is.
    """

    request: Request
    plan: Plan | None


Lower = Callable[[Options | None], Ready]


@dataclass(frozen=True)
class Tried:
    """A candidate and what became of it.

    Attributes:
        candidate: what was tried.
        plan: what the rewrite made of it; None for the step as it is, or where the rewrite failed.
        result: of the child; or why there was none.
        request: that the child got.
    """

    candidate: Candidate
    plan: Plan | None
    result: Trial | Failure
    request: Request | None = None


@dataclass
class Search:
    """One tuning.

    Attributes:
        lower: rewrites and lowers a step by some options; None is the step as it is.
        base: the options of the rules.
        kept: the folder of results.
        memory_bytes: of a device.
        model: the unified model of the step, from what the rules made of it.
        deadline: by `time.monotonic`; what has not begun by then is not tried.
        show: called with each result, in order.
        kernels: that the candidates share.
        workers: children at a time.
        tried: all results, in order.
        complete: whether the search ended by itself.
    """

    lower: Lower
    base: Options
    kept: Path
    memory_bytes: int
    deadline: float
    model: Callable[[Tried], Granularity] = lambda rules: Granularity()
    show: Callable[[Tried], None] = lambda tried: None
    kernels: Kernels = field(default_factory=Kernels)
    workers: int = field(default_factory=lambda: min(_MOST_WORKERS, _cores()))
    tried: list[Tried] = field(default_factory=list)
    complete: bool = False

    def run(self) -> Tried:
        """The best candidate.

        Raises:
            ValueError: if neither the step as it is nor the rewritten one compiles.
        """
        plain, rules = self._try(
            [Candidate(PLAIN, None, {}), Candidate(RULES, self.base, {})], needed=True
        )
        if isinstance(plain.result, Failure) and isinstance(rules.result, Failure):
            raise ValueError(
                f"the step does not compile: {plain.result.why}; tune() needs one that does"
            )
        model = Granularity()
        if rules.plan is not None:
            known = rules.result if isinstance(rules.result, Trial) else None
            model = self.model(rules) if known else model
            self._try(seeds(self.base, rules.plan, known, model.plans(_PLANS)))
            for candidate, plan in self._fastest_plans():
                self._try(settings(candidate, plan))
        cut = any(isinstance(t.result, Failure) and t.result.again for t in self.tried)
        self.complete = self._refine(model) and not cut and time.monotonic() < self.deadline
        return self.best

    def _fastest_plans(self) -> list[tuple[Candidate, Plan]]:
        """The best few of what was tried, no two of one plan; the step as it is has none."""
        found: list[tuple[Candidate, Plan]] = []
        for one in sorted(self.tried, key=self._key):
            if one.plan is not None and all(one.plan != plan for _, plan in found):
                found.append((one.candidate, one.plan))
        return found[:_WITH_SETTINGS]

    def _refine(self, model: Granularity) -> bool:
        """Move ring after ring, until nothing is left to try; False if time ran out before."""
        seen: set[tuple[int, str]] = set()
        while True:
            best = self.best
            if best.plan is None or not isinstance(best.result, Trial):
                return True
            batch = moves(best.candidate, best.plan, best.result, seen, model)[: self.workers]
            if not batch:
                return True
            if time.monotonic() >= self.deadline:
                return False
            seen |= {(site, str(way)) for c in batch for site, way in c.changes.items()}
            better = [t for t in self._try(batch) if self._key(t) < self._key(best)]
            if len(better) > 1:
                self._try([_together(best.candidate, better)])

    def _try(self, candidates: Sequence[Candidate], *, needed: bool = False) -> list[Tried]:
        """Lower one after the other, and compile as many at a time as there are workers."""
        deadline = math.inf if needed else self.deadline
        with ThreadPoolExecutor(self.workers) as pool:
            begun = []
            for candidate in candidates:
                if time.monotonic() >= deadline:
                    break
                ready = self._lowered(candidate)
                if isinstance(ready, Failure):
                    begun.append((candidate, None, lambda failed=ready: failed))
                else:
                    running = pool.submit(self._attempt, ready.request, deadline)
                    begun.append((candidate, ready, running.result))
            done = []
            for candidate, ready, get in begun:
                if (result := get()) is not None:
                    one = Tried(candidate, ready and ready.plan, result, ready and ready.request)
                    done.append(one)
                    self.show(one)
        self.tried += done
        return done

    def _attempt(self, request: Request, deadline: float) -> Trial | Failure | None:
        """The result of a candidate; nothing, if it could not begin in time."""
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        return attempt(request, self.kept, min(left, _TIMEOUT_S), self.kernels)

    def _lowered(self, candidate: Candidate) -> Ready | Failure:
        """A candidate that cannot be rewritten is no result; the rules' own error is the user's."""
        try:
            return self.lower(candidate.options)
        except RewriteError as error:
            if candidate.name == RULES:
                raise
            return Failure(why=f"RewriteError: {error.what}")

    @property
    def best(self) -> Tried:
        """The fastest that fits; of equally fast ones the first."""
        return min(self.tried, key=self._key)

    def _key(self, tried: Tried) -> tuple[int, int]:
        """What is made small: seconds, in units that a prediction tells apart, of what fits."""
        if isinstance(tried.result, Failure):
            return 2, 0
        reference = next(t.result for t in self.tried if isinstance(t.result, Trial))
        most = min(self.memory_bytes, MOST_MEMORY * reference.peak_bytes)
        seconds = round(tried.result.step_s / (reference.step_s * SAME))
        return int(tried.result.peak_bytes > most), seconds


def _together(at: Candidate, better: Sequence[Tried]) -> Candidate:
    """All moves that helped, in one candidate."""
    assert at.options is not None
    changes = {site: way for t in better for site, way in t.candidate.changes.items()}
    name = " + ".join(t.candidate.name for t in better)
    return Candidate(name, changed(at.options, changes), changes)
