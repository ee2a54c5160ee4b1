"""Errors of predicted steps, against published ones that had no part in any fit."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxoverlap._util.files import packaged

# The software, the chip, the dtype of a layer's matmuls, and whether there are experts.
Kind = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Band:
    """|predicted / measured - 1| of published steps.

    Attributes:
        rows: number of steps without part in a fit, which the errors are of.
        mean, worst: their error; 0 of no steps.
        fitted: number of steps that had part in a fit.
    """

    rows: int
    mean: float
    worst: float
    fitted: int = 0

    def __str__(self) -> str:
        return f"{self.mean:.0%} in the mean, {self.worst:.0%} at worst, of {self.rows}"


def _read() -> dict[Kind, Band]:
    """Read bands.json; `python -m benchmarks.accuracy --bands` writes it, and a test compares."""
    text = packaged("jaxoverlap.parallelism.published", "bands.json")
    rows = msgspec.json.decode(text, type=list[tuple[str, str, str, bool, Band]])
    return {(stack, chip, dtype, experts): band for stack, chip, dtype, experts, band in rows}


BANDS = _read()


def band(stack: str, chip: str, dtype: str, *, experts: bool) -> str:
    """Return in words how far published steps of a kind were off."""
    steps = f"{stack} on {chip} in {dtype}" + (", with experts" if experts else "")
    found = BANDS.get((stack, chip, dtype, experts), Band(0, 0.0, 0.0))
    if not found.rows:
        also = f"; {found.fitted} had part in a fit" if found.fitted else ""
        return f"Error band: none, as no published step of {steps} was compared{also}."
    return f"Error band, published steps of {steps} without part in a fit: {found}."
