"""Compare an overlapped step with the original one, by simulation, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

Overlapped = Literal["overlapped", "other rows", "other loops"]
CandidateName = Literal[Overlapped, "reordered", "O1", "gpu-recipes", "plain"]
_NAMES = {
    "overlapped": "overlapped",
    "other rows": "overlapped",
    "other loops": "overlapped",
    "reordered": "scheduler pass alone",
    "O1": "published options O1",
    "gpu-recipes": "published options of gpu-recipes",
    "plain": "as it is",
}


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled step compared with the original one; print it.

    Attributes:
        taken: how the step was compiled: "overlapped"; "other rows": overlapped, with the batch
            split where the estimate was against it, or the other way round; "other loops": the same
            with scans unrolled; "reordered": the original step in the scheduler pass's order; "O1",
            "gpu-recipes": the original step with these published options (`flags/published.py`) and
            that pass; or "plain": the original.
        step_s: simulated seconds of the step that was taken; None if unknown.
        plain_s: those of the original step, by XLA's defaults; None if unknown.
        overlapped_s: those of the overlapped step; None if unknown.
        why: why the overlapped step was not taken, or why the original one was not simulated; else
            empty.
        lost: which rules lost how much, where the overlapped step was slower than plain.
        repaired: how many times as fast the step is by its repaired shardings alone, as an expert
            would have written it, estimated; None where it loses little as written.
        joined: XLA options that it has beyond its candidate's, which join gathers and scatters of
            unrolled layers (`search/joining.py`).
        room: the bytes that may be kept, where `memory=` left fewer than was estimated; else None.
    """

    taken: CandidateName
    step_s: float | None
    plain_s: float | None
    overlapped_s: float | None = None
    why: str = ""
    lost: str = ""
    repaired: float | None = None
    joined: Mapping[str, str] = {}
    room: int | None = None

    @property
    def is_overlapped(self) -> bool:
        """Return whether the step was compiled overlapped."""
        return self.taken in get_args(Overlapped)

    @property
    def times(self) -> float | None:
        """The original step's seconds over those of the step that was taken; None if unknown."""
        if self.plain_s is None or self.step_s is None:
            return None
        return self.plain_s / self.step_s

    @property
    def name(self) -> str:
        """The candidate that was taken, in words."""
        return _NAMES[self.taken] + ", collectives joined" * bool(self.joined)

    def __str__(self) -> str:
        taken = self.name if self.step_s is None else f"{self.name} {milliseconds(self.step_s)}"
        why = f" ({self.why})" if self.why else ""
        if self.plain_s is None or self.times is None:
            return taken + why
        alone = ""
        if self.repaired is not None:
            alone = f", {min(self.repaired, self.times):.2f} x of it by shardings (estimated)"
        return f"plain {milliseconds(self.plain_s)} -> {taken}, {self.times:.2f} x{alone}{why}"

    def warning(self, step: str) -> str:
        """Return the warning to the user that the overlapped step was not taken."""
        joined = " and options that join its collectives" * bool(self.joined)
        instead = {
            "reordered": "with the scheduler pass alone",
            "O1": "with the published XLA options O1, and is not overlapped",
            "gpu-recipes": "with the XLA options of gpu-recipes, and is not overlapped",
            "plain": "as it is",
        }[self.taken]
        plain, taken = (milliseconds(s or 0.0) for s in (self.plain_s, self.step_s))
        lost = f" What lost: {self.lost}." if self.lost else ""
        return (
            f"{step} runs {instead}{joined}, which takes {taken} by simulation (plain {plain}; "
            f"{self.why}).{lost} overlap(never_slower=False) keeps the overlapped step"
        )


def milliseconds(seconds: float) -> str:
    """Seconds as a step's are shown: 10.2 ms."""
    ms = seconds * 1e3
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.3g} ms"
