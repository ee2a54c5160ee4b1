"""Errors of predicted steps, against published ones that had no part in any fit."""

from __future__ import annotations

from dataclasses import dataclass

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


# `python -m benchmarks.accuracy --bands` makes these; a test holds them to the published rows.
BANDS: dict[Kind, Band] = {
    ("a100-sxm-40", "bf16", False): Band(20, 0.033, 0.077),
    ("a100-sxm-80", "bf16", False): Band(25, 0.05, 0.238),
    ("b300", "mxfp8", True): Band(6, 0.136, 0.456),
    ("gb200", "bf16", False): Band(3, 0.091, 0.098),
    ("gb200", "bf16", True): Band(2, 0.021, 0.024),
    ("gb200", "fp8", False): Band(13, 0.081, 0.203),
    ("gb200", "mxfp8", False): Band(10, 0.064, 0.12),
    ("gb200", "mxfp8", True): Band(3, 0.219, 0.228),
    ("gb200", "nvfp4", False): Band(9, 0.119, 0.179),
    ("gb300", "fp8", False): Band(5, 0.16, 0.193),
    ("gb300", "mxfp8", False): Band(5, 0.11, 0.129),
    ("gb300", "mxfp8", True): Band(17, 0.379, 0.82),
    ("gb300", "nvfp4", False): Band(5, 0.08, 0.116),
    ("h100-sxm", "bf16", False): Band(20, 0.05, 0.197),
    ("h100-sxm", "fp8", False): Band(13, 0.04, 0.155),
    ("h100-sxm", "fp8", True): Band(5, 0.105, 0.409),
    ("h100-sxm-500w", "bf16", False): Band(1, 0.117, 0.117),
    ("h100-sxm-500w", "fp8", False): Band(1, 0.075, 0.075),
    ("h200", "fp8", False): Band(2, 0.092, 0.1),
}


def band(chip: str, dtype: str, *, experts: bool) -> str:
    """Return in words how far published steps of a kind were off."""
    steps = f"{chip} in {dtype}" + (", with experts" if experts else "")
    found = BANDS.get((chip, dtype, experts))
    if found is None:
        return f"Error band: none, as no published step on {steps} was compared."
    return f"Error band, published steps on {steps} without part in a fit: {found}."
