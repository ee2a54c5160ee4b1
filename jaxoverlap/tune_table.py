"""What a tuning shows: how far it is, and a table of what was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxoverlap.candidates import Candidate
from jaxoverlap.search import Tried
from jaxoverlap.trial import Failure, Trial

_NUMBERS = ("step ms", "compute", "exposed", "hops covered", "peak GB", "compile s")


@contextmanager
def progress(budget_s: float, *, console: Console) -> Iterator[Callable[[Tried], None]]:
    """Show how many candidates were tried, and the fastest so far; gives what to call with each."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        row = shown.add_task(f"tuning, for at most {budget_s:.0f} s", total=None)
        count, best = 0, (float("inf"), "")

        def show(tried: Tried) -> None:
            nonlocal count, best
            count += 1
            if isinstance(tried.result, Trial):
                best = min(best, (tried.result.step_s, tried.candidate.name))
            fastest = f"; {best[0] * 1e3:.1f} ms: {best[1]}" if best[1] else ""
            shown.update(
                row, description=f"tuning, for at most {budget_s:.0f} s; {count} tried{fastest}"
            )

        yield show


def table(title: str, tried: Sequence[Tried], best: Tried) -> Table:
    """A row a candidate, in the order in which they were tried."""
    found = Table(title=title)
    found.add_column("candidate")
    for name in _NUMBERS:
        found.add_column(name, justify="right")
    for one in tried:
        style = "bold" if one is best else ""
        found.add_row(one.candidate.name, *_cells(one.result), style=style)
    return found


def timed(candidates: Sequence[Candidate], seconds: Sequence[float], best: int) -> Table:
    """A row a candidate that was timed; the first is the step as it is."""
    found = Table(title=f"measured on {len(jax.devices())} x {jax.devices()[0].device_kind}")
    found.add_column("candidate")
    for name in ("step ms", "of plain"):
        found.add_column(name, justify="right")
    for i, (candidate, s) in enumerate(zip(candidates, seconds, strict=True)):
        cells = (f"{s * 1e3:.2f}", f"{s / seconds[0]:.2f} x")
        found.add_row(candidate.name, *cells, style="bold" if i == best else "")
    return found


def _cells(result: Trial | Failure) -> tuple[str, ...]:
    if isinstance(result, Failure):
        return (result.why,)
    return (
        *(f"{s * 1e3:.1f}" for s in (result.step_s, result.compute_s, result.exposed_s)),
        f"{result.hops_covered} of {result.hops}" if result.hops else "",
        f"{result.peak_bytes / 1e9:.1f}",
        f"{result.compile_s:.0f}",
    )
