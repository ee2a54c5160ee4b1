"""Record the trials of a step: what was tried, how long it took, and which program ran when."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from jaxoverlap._util.text import human_bytes, table
from jaxoverlap.plan.speedup import milliseconds

PLAIN = "plain"


class Timed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program of the trials.

    Attributes:
        name: "plain" for the original step, or the candidate's.
        seconds: of its trial steps, the first not counted, each of the slowest process.
        simulated_s: what the simulation gave; None where there was none.
        peak_bytes: bytes that a device needs at most; 0 where not known.
        dropped: why it was dropped; empty if it was not.
    """

    name: str
    seconds: tuple[float, ...] = ()
    simulated_s: float | None = None
    peak_bytes: int = 0
    dropped: str = ""

    @property
    def median_s(self) -> float | None:
        """The median of its seconds; None if it was not timed."""
        return statistics.median(self.seconds) if self.seconds else None


class Ran(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Successive steps with one program.

    Attributes:
        name: the program's.
        first: the number of the first of them; the step's first call is 0.
        steps: how many.
    """

    name: str
    first: int
    steps: int


class Trials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trials of a step for arguments of one type; print it.

    Attributes:
        step: the step's name.
        candidates: the programs that were tried, the original step first.
        taken: the name of the one that is kept; empty while nothing is decided.
        since: the number of the step from which it runs; None while nothing is decided.
        trial_steps: how many steps were timed.
        trial_s: their seconds in this process, which a loop's own meter may leave out.
        ran: which program ran when, in this process.
        cached: whether an earlier run had decided.
        why: why nothing was tried; empty if something was.
    """

    step: str
    candidates: tuple[Timed, ...] = ()
    taken: str = ""
    since: int | None = None
    trial_steps: int = 0
    trial_s: float = 0.0
    ran: tuple[Ran, ...] = ()
    cached: bool = False
    why: str = ""

    def __str__(self) -> str:
        if not self.taken:
            return f"{self.step}: runs as it is; the decision is not made yet"
        if self.cached:
            return f"{self.step}: {self.taken}, as an earlier run found; {self.times}"
        if self.why:
            return f"{self.step}: runs as it is: {self.why}"
        return f"{self.step}: {self.times}; {self.taken} from step {self.since} on" + "".join(
            f"\n  {one.name} was dropped: {one.dropped}" for one in self.candidates if one.dropped
        )

    def text(self) -> str:
        """Write the record in full: each program with its times, and which ran when."""
        rows = [*self._rows()]
        columns = ("program", "median", "least", "most", "steps", "simulated", "memory", "outcome")
        ran = [(one.name, str(one.first), str(one.steps)) for one in self.ran]
        parts = [str(self), table("trials", columns, rows, right=columns[1:7])]
        if ran:
            parts.append(table("which ran when", ("program", "from step", "steps"), ran))
        if self.trial_steps:
            parts.append(f"{self.trial_steps} trial steps took {self.trial_s:.3g} s.")
        return "\n".join(parts)

    @property
    def times(self) -> str:
        """The medians of all programs, the fastest first, in words."""
        timed = sorted((one.median_s, one) for one in self.candidates if one.median_s is not None)
        shown = [f"{milliseconds(s)} {one.name}" for s, one in timed]
        counts = {len(one.seconds) for _, one in timed}
        fewest, most = min(counts, default=0), max(counts, default=0)
        steps = f"{most} steps each" if fewest == most else f"{fewest} to {most} steps each"
        return f"{', '.join(shown)} ({steps})" if shown else "nothing was timed"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for one in self.candidates:
            shown = ["", "", "", ""]
            if (median := one.median_s) is not None:
                shown = [milliseconds(s) for s in (median, min(one.seconds), max(one.seconds))]
                shown.append(str(len(one.seconds)))
            simulated = "" if one.simulated_s is None else milliseconds(one.simulated_s)
            peak = human_bytes(one.peak_bytes) if one.peak_bytes else ""
            outcome = "taken" if one.name == self.taken else one.dropped
            yield one.name, *shown, simulated, peak, outcome
