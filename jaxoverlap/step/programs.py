"""Show the program of a step after each edit: what a pass was given, and what it made of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxoverlap._jax import compat


class Edited(NamedTuple):
    """A step after an edit.

    Attributes:
        edit: what was done to the step before it, in words.
        jaxpr: the step.
        seconds: estimates it, which takes longer than to keep it: only `programs_of` asks. None
            where it was not partitioned.
    """

    edit: str
    jaxpr: Any
    seconds: Callable[[], float | None] | None = None


@dataclass(frozen=True)
class Program:
    """The program of a step after an edit.

    Attributes:
        edit: what was done to the program before it; of the first, that it is the original step.
        jaxpr: the program, a jaxpr.
        step_s: its estimated seconds; None where that was not asked of XLA's partitioner, or the
            GPUs have no prices.
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
        return f"# {self.edit}{took}\n{self.diff}"


def programs_of(edited: Sequence[Edited]) -> tuple[Program, ...]:
    """Print a step after each edit; an edit that changed nothing is left out."""
    kept: list[Edited] = []
    for one in edited:
        if not kept or one.jaxpr is not kept[-1].jaxpr:
            kept.append(one)
        elif kept[-1].seconds is None:
            kept[-1] = kept[-1]._replace(seconds=one.seconds)
    texts = compat.jaxpr_texts([one.jaxpr for one in kept])
    diffs = [*texts[:1], *map(_diff, texts, texts[1:])]
    return tuple(
        Program(one.edit, one.jaxpr, one.seconds and one.seconds(), text, diff)
        for one, text, diff in zip(kept, texts, diffs, strict=True)
    )


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    return "\n".join(list(lines)[2:])  # without the names of two files
