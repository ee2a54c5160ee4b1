"""Show the program of a step after each edit: what a pass was given, and what it made of it."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass
from typing import Any

from jaxoverlap._jax import compat
from jaxoverlap.passes.analysis.errors import RewriteError
from jaxoverlap.passes.analysis.mesh import unread
from jaxoverlap.passes.edited import EditedStep
from jaxoverlap.passes.rewriting.one_view import with_one_view
from jaxoverlap.step.context import StepContext
from jaxoverlap.step.pipeline import PassResult

ORIGINAL = "the original step"


@dataclass(frozen=True)
class Program:
    """The program of a step after an edit.

    Attributes:
        edit: the edits that were done to the program before it, a line each; of the first, that it
            is the original step.
        jaxpr: the program, a jaxpr.
        step_s: its estimated seconds; None where the GPUs have no prices, or XLA does not partition
            it.
        text: the jaxpr as text. A value has the same name in all programs of a step.
        diff: the lines in which it differs from the program before, with three lines around each
            difference, as `diff -u` prints them; the whole text of the first program.
    """

    edit: str
    jaxpr: Any
    step_s: float | None
    text: str
    diff: str

    def __str__(self) -> str:
        took = "" if self.step_s is None else f", {self.step_s * 1e3:.4g} ms (estimated)"
        lines = "\n".join(f"# {line}" for line in self.edit.splitlines())
        return f"{lines}{took}\n{self.diff}"


def programs_of(result: PassResult) -> tuple[Program, ...]:
    """Print a step after each kind of edits; edits that changed nothing are left out."""
    stages, names = [result.edited.stages[0]], [ORIGINAL]
    for before, stage in itertools.pairwise(result.edited.stages):
        if stage.jaxpr is not before.jaxpr:
            stages.append(stage)
            names.append("\n".join(map(str, stage.edits[len(before.edits) :])))
    jaxprs, seconds = [s.jaxpr for s in stages], [_seconds(result.step, s) for s in stages]
    if result.edited.untyped is not None:
        names.append("put the shardings of arguments and results back into types")
        jaxprs.append(result.jaxpr)
        seconds.append(seconds[-1])
    texts = compat.jaxpr_texts(jaxprs)
    diffs = [*texts[:1], *map(_diff, texts, texts[1:])]
    return tuple(map(Program, names, jaxprs, seconds, texts, diffs))


def _seconds(step: StepContext, stage: EditedStep) -> float | None:
    """Estimate a step after some edits."""
    if step.cost is None or unread(stage.mesh):
        return None
    try:
        return step.seconds(step.partitioned_after(stage.to(with_one_view(stage.jaxpr))))
    except RewriteError:
        return None


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    return "\n".join(list(lines)[2:])  # without the names of two files
