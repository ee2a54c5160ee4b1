"""Errors of predicted steps, against published ones that had no part in any fit."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxoverlap._util.files import packaged

Kind = tuple[str, str, bool]  # the chip, the dtype of a layer's matmuls, whether there are experts


@dataclass(frozen=True)
class Band:
    """|predicted / measured - 1| of published steps.

    Attributes:
        rows: number of steps.
        mean, worst: their error.
    """

    rows: int
    mean: float
    worst: float

    def __str__(self) -> str:
        return f"{self.mean:.0%} in the mean, {self.worst:.0%} at worst, of {self.rows}"


def _read() -> dict[Kind, Band]:
    """Read bands.json; `python -m benchmarks.accuracy --bands` writes it, and a test compares."""
    text = packaged("jaxoverlap.parallelism.published", "bands.json")
    rows = msgspec.json.decode(text, type=list[tuple[str, str, bool, Band]])
    return {(chip, dtype, experts): band for chip, dtype, experts, band in rows}


BANDS = _read()


def band(chip: str, dtype: str, *, experts: bool) -> str:
    """Return in words how far published steps of a kind were off."""
    steps = f"{chip} in {dtype}" + (", with experts" if experts else "")
    found = BANDS.get((chip, dtype, experts))
    if found is None:
        return f"Error band: none, as no published step on {steps} was compared."
    return f"Error band, published steps on {steps} without part in a fit: {found}."
