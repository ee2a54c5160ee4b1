"""Show the progress of a tuning, and a table of the candidates that it tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

from jaxoverlap._util.text import WIDTH, table
from jaxoverlap.plan.trail import Proposed
from jaxoverlap.search.candidate import Candidate
from jaxoverlap.search.search import quickest


class _Spent(ProgressColumn):
    """A bar of the seconds spent out of the budget."""

    def render(self, task: Task) -> ProgressBar:
        return ProgressBar(total=task.total, completed=task.elapsed or 0.0, width=30)


@contextmanager
def progress(budget_s: float, *, console: Console) -> Iterator[Callable[[Candidate], None]]:
    """Show how many candidates were tried, and the fastest; yields a function to call with each.

    Where the console is no terminal, each is a line.
    """
    first = f"{budget_s:.0f} s; the original step and overlap()'s own choice take what they need"
    began = time.monotonic()
    if not console.is_terminal:
        console.out(f"tuning for {first}", highlight=False)
    columns = (_Spent(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task(f"of {first}", total=budget_s)
        rows = list[Candidate]()

        def show(tried: Candidate) -> None:
            rows.append(tried)
            best = quickest(rows)
            fastest = f"; {best.seconds * 1e3:.1f} ms: {best.stage}" if best else ""
            shown.update(row, description=f"of {budget_s:.0f} s; {len(rows)} tried{fastest}")
            if not console.is_terminal:
                spent = f"{time.monotonic() - began:.0f} s: {tried.stage}"
                console.out(f"{spent}; {len(rows)} tried{fastest}", highlight=False)

        yield show


_SIMULATED = ("step ms", "compute", "exposed", "hops covered", "peak GB")
_MEASURED = ("measured ms", "of plain")


def tried_table(title: str, tried: Sequence[Proposed], *, width: int = WIDTH) -> str:
    """Write a row for each candidate, in the order tried; a star marks the one taken."""
    plain_s = next((_clock_s(row) for row in tried if _clock_s(row) is not None), None)
    simulated = any(row.evaluation.times or row.evaluation.by != "measured" for row in tried)
    numbers = (*(_SIMULATED if simulated else ()), *(_MEASURED if plain_s else ()))
    rows = [
        (
            "*" if row.taken else "",
            row.stage,
            *(_simulated(row) if simulated else ()),
            *(_measured(row, plain_s) if plain_s else ()),
            "" if row.evaluation.times else row.why_not,
        )
        for row in tried
    ]
    return table(title, ("", "candidate", *numbers, ""), rows, right=numbers, width=width)


def _clock_s(row: Proposed) -> float | None:
    return row.evaluation.step_s if row.evaluation.by == "measured" else None


def _simulated(row: Proposed) -> tuple[str, ...]:
    if (times := row.evaluation.times) is None:
        return ("",) * len(_SIMULATED)
    seconds = (f"{s * 1e3:.1f}" for s in (times.step_s, times.compute_s, times.exposed_s))
    hops = f"{times.hops_covered} of {times.hops}" if times.hops else ""
    return (*seconds, hops, f"{row.evaluation.peak_bytes / 1e9:.1f}")


def _measured(row: Proposed, plain_s: float) -> tuple[str, ...]:
    if (seconds := _clock_s(row)) is None:
        return ("", "")
    return (f"{seconds * 1e3:.2f}", f"{seconds / plain_s:.2f} x")
