"""Show the progress of a tuning, and a table of the candidates that it tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

from jaxoverlap._util.text import WIDTH, table
from jaxoverlap.plan.plan import Attempt
from jaxoverlap.step.trial import Trial
from jaxoverlap.tuning.search import Tried


class _Spent(ProgressColumn):
    """A bar of the seconds spent out of the budget."""

    def render(self, task: Task) -> ProgressBar:
        return ProgressBar(total=task.total, completed=task.elapsed or 0.0, width=30)


@contextmanager
def progress(budget_s: float, *, console: Console) -> Iterator[Callable[[Tried], None]]:
    """Show how many candidates were tried, and the fastest; yields a function to call with each.

    Where the console is no terminal, each is a line.
    """
    first = f"{budget_s:.0f} s, after the original step and overlap()'s own choice are compiled"
    began = time.monotonic()
    if not console.is_terminal:
        console.out(f"tuning for {first}", highlight=False)
    columns = (_Spent(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task(f"of {first}", total=budget_s)
        count, best = 0, (float("inf"), "")

        def show(tried: Tried) -> None:
            nonlocal count, best
            count += 1
            if isinstance(tried.result, Trial):
                best = min(best, (tried.result.step_s, tried.candidate.name))
            fastest = f"; {best[0] * 1e3:.1f} ms: {best[1]}" if best[1] else ""
            shown.update(row, description=f"of {budget_s:.0f} s; {count} tried{fastest}")
            if not console.is_terminal:
                spent = f"{time.monotonic() - began:.0f} s: {tried.candidate.name}"
                console.out(f"{spent}; {count} tried{fastest}", highlight=False)

        yield show


_SIMULATED = ("step ms", "compute", "exposed", "hops covered", "peak GB")
_MEASURED = ("measured ms", "of plain")


def tried_table(title: str, tried: Sequence[Attempt], *, width: int = WIDTH) -> str:
    """Write a row for each candidate, in the order tried; a star marks the one taken."""
    plain_s = next((a.measured_s for a in tried if a.measured_s is not None), None)
    simulated = any(a.step_s is not None or a.why for a in tried)
    numbers = (*(_SIMULATED if simulated else ()), *(_MEASURED if plain_s else ()))
    rows = [
        (
            "*" if a.taken else "",
            a.name,
            *(_simulated(a) if simulated else ()),
            *(_measured(a, plain_s) if plain_s else ()),
            a.why,
        )
        for a in tried
    ]
    return table(title, ("", "candidate", *numbers, ""), rows, right=numbers, width=width)


def _simulated(a: Attempt) -> tuple[str, ...]:
    times = ("" if s is None else f"{s * 1e3:.1f}" for s in (a.step_s, a.compute_s, a.exposed_s))
    hops = f"{a.hops_covered} of {a.hops}" if a.hops else ""
    return (*times, hops, "" if a.peak_bytes is None else f"{a.peak_bytes / 1e9:.1f}")


def _measured(a: Attempt, plain_s: float) -> tuple[str, ...]:
    if a.measured_s is None:
        return ("", "")
    return (f"{a.measured_s * 1e3:.2f}", f"{a.measured_s / plain_s:.2f} x")
