"""The answers to the questions: the fastest row without jaxoverlap, and with it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.frame import Row
from benchmarks.pods.rows import unfinished
from benchmarks.questions.asked import MEASURED, QUESTIONS
from benchmarks.questions.measure import (
    FREE_POLICY,
    OVERLAPPED,
    PLAIN_OPTIONS,
    WITH_MEMORY,
    fastest,
)

COLUMNS = (
    "question", "best without", "ms", "tokens/s", "best with", "ms", "tokens/s", "MFU", "GB",
    "times",
)  # fmt: skip
NUMBERS = ("ms", "tokens/s", "MFU", "GB", "times")
PART_COLUMNS = (
    "question", "", "ms", "matmuls at peak", "compute", "slowed", "exposed", "GB", "of",
)  # fmt: skip
MEASURED_COLUMNS = (
    "question", "simulated, without", "measured by others", "ratio", "what", "source",
)  # fmt: skip
MESH_COLUMNS = ("question", "mesh", "recomputed", "without", "options", "with", "memory=")
MESH_NUMBERS = ("without", "with", "memory=")


class Answer(NamedTuple):
    """The fastest rows of a question."""

    without: Row
    overlapped: Row


def answers(rows: Sequence[Row]) -> dict[str, Answer]:
    """Return the best without and with, of each question that has both."""
    found = {}
    for question in QUESTIONS:
        own = [row for row in rows if row["step"] == question]
        without = _fastest(own, PLAIN_OPTIONS)
        with_it = _fastest(own, (OVERLAPPED, WITH_MEMORY))
        if without and with_it:
            found[question] = Answer(without, with_it)
    return found


def _fastest(rows: Sequence[Row], options: Sequence[str]) -> Row | None:
    return next(iter(fastest(row for row in rows if row["options"] in options)), None)


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """Return how many times as fast each question's best is with jaxoverlap."""
    return {
        question: without["step_s"] / with_it["step_s"]
        for question, (without, with_it) in answers(rows).items()
    }


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the answers under COLUMNS."""
    times = gains(rows)
    return [
        (
            question,
            *_named(without),
            *_named(with_it),
            f"{with_it['model_s'] / with_it['step_s']:.0%}",
            f"{with_it['peak_bytes'] / 1e9:.0f}",
            f"{times[question]:.2f}",
        )
        for question, (without, with_it) in answers(rows).items()
    ]


def _named(row: Row) -> tuple[str, str, str]:
    return setting(row), f"{row['step_s'] * 1e3:.0f}", f"{tokens_per_second(row):.0f}"


def tokens_per_second(row: Row) -> float:
    """Return the tokens, or patches of images, of a second and a GPU."""
    asked = QUESTIONS[row["step"]]
    return asked.model.batch * asked.model.sequence / asked.cluster.num_devices / row["step_s"]


def setting(row: Row) -> str:
    """Name a row: its mesh, what is kept, and options."""
    if row["policy"] == FREE_POLICY:
        return f"{row['mesh']}; {row['options']}"
    kept = "all recomputed" if row["policy"] == "full" else f"{row['policy']} saved"
    return f"{row['mesh']}; {kept}; {row['options']}"


def parts(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield where the seconds of each answer go, in milliseconds under PART_COLUMNS.

    Without what is exposed a step would take its compute and what slows it; without either, its
    compute.
    """
    for question, (without, with_it) in answers(rows).items():
        for name, row in ((question, without), ("", with_it)):
            times = (row[n] for n in ("step_s", "model_s", "compute_s", "slowdown_s", "exposed_s"))
            memory = (f"{row[n] / 1e9:.0f}" for n in ("peak_bytes", "chip_bytes"))
            side = "without" if name else "with"
            yield name, side, *(f"{s * 1e3:.0f}" for s in times), *memory


def measured(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield published tokens a second and GPU next to the best without, under MEASURED_COLUMNS."""
    for question, (without, _) in answers(rows).items():
        if (theirs := MEASURED.get(question)) is None:
            continue
        own = tokens_per_second(without)
        figures = (f"{own:.0f}", f"{theirs.tokens:.0f}", f"{own / theirs.tokens:.2f}")
        yield question, *figures, theirs.what, theirs.source


def by_mesh(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield each question's meshes under MESH_COLUMNS: the best of each, in milliseconds."""
    for question in QUESTIONS:
        own = [row for row in rows if row["step"] == question]
        for mesh in dict.fromkeys(row["mesh"] for row in own):
            here = [row for row in own if row["mesh"] == mesh]
            best = _fastest(here, PLAIN_OPTIONS)
            others = (_ms(_fastest(here, (kind,))) for kind in (OVERLAPPED, WITH_MEMORY))
            kept, options = (best["policy"], best["options"]) if best else ("none fits", "")
            yield question, mesh, kept, _ms(best), options, *others


def _ms(row: Row | None) -> str:
    return f"{row['step_s'] * 1e3:.0f}" if row else ""


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the geometric mean and the least, in a sentence."""
    times = gains(rows)
    if not times:
        return ["No question has both answers yet."]
    worst = min(times, key=lambda name: times[name])
    mean = statistics.geometric_mean(times.values())
    return [
        f"{mean:.2f} times as fast in geometric mean over {len(times)} questions; "
        f"the least is {times[worst]:.2f} ({worst}).",
    ]


def without_figure(rows: Sequence[Row]) -> str:
    """Name the rows that have no seconds, and why, in a sentence; empty if all have."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if why := unfinished(row):
            kinds.setdefault((row["step"], why.partition(":")[0]), []).append(row["options"])
    failed = [
        f"{question}, {', '.join(dict.fromkeys(options))} ({why})"
        for (question, why), options in kinds.items()
    ]
    return f"No figure, so not among the answers: {'; '.join(failed)}." if failed else ""
