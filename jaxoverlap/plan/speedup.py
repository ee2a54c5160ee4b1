"""Compare an overlapped step with the same step as it is, by simulation, in one sentence."""

from __future__ import annotations

from typing import Literal

import msgspec

Way = Literal["overlapped", "reordered", "plain"]
_NAMES = {"overlapped": "overlapped", "reordered": "scheduler pass alone", "plain": "as it is"}


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled step beside the same step as it is; print it.

    Attributes:
        taken: how the step was compiled: "overlapped"; "reordered": as it is, in the order of the
            scheduler pass; or "plain": as it is.
        step_s: simulated seconds of what was taken; None where that is not known.
        plain_s: those of the step as it is, by XLA's defaults; None where that is not known.
        overlapped_s: those of the overlapped step; None where that is not known.
        why: what spoke against the overlapped step, or why nothing is known of plain; empty where
            neither is.
        lost: which rules lost how much, where the overlapped step was slower than plain.
    """

    taken: Way
    step_s: float | None
    plain_s: float | None
    overlapped_s: float | None = None
    why: str = ""
    lost: str = ""

    @property
    def times(self) -> float | None:
        """Return the speedup over the step as it is; None where that is not known."""
        if self.plain_s is None or self.step_s is None:
            return None
        return self.plain_s / self.step_s

    @property
    def name(self) -> str:
        """Name what was taken, in words."""
        return _NAMES[self.taken]

    def __str__(self) -> str:
        taken = self.name if self.step_s is None else f"{self.name} {milliseconds(self.step_s)}"
        why = f" ({self.why})" if self.why else ""
        if self.plain_s is None or self.times is None:
            return taken + why
        return f"plain {milliseconds(self.plain_s)} -> {taken}, {self.times:.2f} x{why}"

    def warning(self, step: str) -> str:
        """Word the warning to the user where the overlapped step was not taken."""
        instead = {"reordered": "with the scheduler pass alone", "plain": "as it is"}[self.taken]
        plain, taken = (milliseconds(s or 0.0) for s in (self.plain_s, self.step_s))
        lost = f" What lost: {self.lost}." if self.lost else ""
        return (
            f"{step} runs {instead}, which takes {taken} by simulation (plain {plain}; {self.why})."
            f"{lost} overlap(never_slower=False) keeps the overlapped step"
        )


def milliseconds(seconds: float) -> str:
    """Seconds as a step's are shown: 10.2 ms."""
    ms = seconds * 1e3
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"
