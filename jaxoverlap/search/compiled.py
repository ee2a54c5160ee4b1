"""Evaluate candidates by compiling them in child processes, as a compiler may abort."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxoverlap._jax.kernel_cache import KnownKernels
from jaxoverlap._util import progress
from jaxoverlap._util.text import first_line
from jaxoverlap.passes.analysis.errors import RewriteError, UserError
from jaxoverlap.plan.evaluation import Evaluation
from jaxoverlap.plan.plan import Plan
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.step.trial import Request, attempt, refused, schedule_of


def _cores() -> int:
    """Count the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


MOST_WORKERS = min(8, _cores())  # a compile takes gigabytes of memory


@dataclass(frozen=True)
class Compiler:
    """Compiles candidates of a step, as many at a time as there are workers.

    Attributes:
        lower: lowers a candidate for a child; returns its request, and its plan as it was followed.
        kept: the folder of cached results, which is there.
        timeout_s: the seconds that a child has at most.
        workers: the number of children at a time.
        kernels: the kernels that the candidates share.
    """

    lower: Callable[[Candidate], tuple[Request, Plan | None]]
    kept: Path
    timeout_s: float
    workers: int = MOST_WORKERS
    kernels: KnownKernels = field(default_factory=KnownKernels)

    def evaluated(
        self,
        candidates: Sequence[Candidate],
        *,
        deadline: float = math.inf,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> list[Candidate]:
        """Lower candidates one after the other, and compile them in children.

        Args:
            candidates: the candidates.
            deadline: by `time.monotonic`; what has not begun by then is not returned.
            meanwhile: does a piece of other work while children compile; False if none is left.
        """
        count = progress.counting()
        with ThreadPoolExecutor(self.workers) as pool:
            begun = list[tuple[Candidate, Future[Evaluation | None]]]()
            for candidate in candidates:
                if time.monotonic() >= deadline:
                    break
                lowered, running = self._begun(candidate, pool, deadline)
                running.add_done_callback(lambda _, name=candidate.stage: count(name))
                begun.append((lowered, running))
            while not all(running.done() for _, running in begun) and meanwhile():
                pass
            ended = ((one, running.result()) for one, running in begun)
            return [replace(one, evaluation=found) for one, found in ended if found is not None]

    def _begun(
        self, candidate: Candidate, pool: ThreadPoolExecutor, deadline: float
    ) -> tuple[Candidate, Future[Evaluation | None]]:
        """Lower a candidate and let a child compile it; one that cannot be lowered is refused."""
        if candidate.evaluation.refusal:
            return candidate, pool.submit(lambda: candidate.evaluation)
        try:
            request, plan = self.lower(candidate)
        except (RewriteError, UserError, ValueError) as error:
            said = error.what if isinstance(error, RewriteError) else first_line(error)
            why = said if type(error) is ValueError else f"{type(error).__name__}: {said}"
            return candidate, pool.submit(refused, why)
        text = functools.partial(schedule_of, request, self.kept)
        edits = plan.edits if plan else ()
        lowered = replace(candidate, plan=plan, edits=edits, text=text)
        return lowered, pool.submit(self._attempt, request, deadline)

    def _attempt(self, request: Request, deadline: float) -> Evaluation | None:
        """Compile a candidate in a child; return None if it could not begin in time."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return None
        try:
            return attempt(request, self.kept, min(remaining_s, self.timeout_s), self.kernels)
        except OSError as error:  # no memory for a child, or no disk space for its result
            return refused(f"{type(error).__name__}: {error}", again=True)


def writable(kept: Path) -> Path:
    """Return a folder for results; if it cannot be written, one for this process."""
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    return kept if os.access(kept, os.W_OK | os.X_OK) else Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="jaxoverlap-")
