"""Record what a tuning found out about a plan: what is predicted, what was measured and tried."""

from __future__ import annotations

import msgspec

from jaxoverlap._util.text import human_bytes


class Predictions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted seconds and bytes of the compiled step, and of the plain one.

    Attributes:
        step_s, compute_s, communication_s, exposed_s, bound_s: as in `Timeline`.
        peak_bytes: XLA's count for one device: arguments + temp + outputs - aliased.
        plain_step_s, plain_peak_bytes: those of the step without jaxoverlap; None if XLA failed on
            it.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    bound_s: float
    peak_bytes: int
    plain_step_s: float | None
    plain_peak_bytes: int | None

    def __str__(self) -> str:
        plain_s, plain_bytes = self.plain_step_s, self.plain_peak_bytes
        return (
            f"Simulated: {self.step_s * 1e3:.1f} ms a step"
            f"{f', plain {plain_s * 1e3:.1f}' if plain_s is not None else ''}"
            f"; exposed {self.exposed_s * 1e3:.1f}"
            f"; the bound {self.bound_s * 1e3:.1f}; "
            f"{human_bytes(self.peak_bytes)}"
            f"{f', plain {human_bytes(plain_bytes)}' if plain_bytes is not None else ''}."
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured times of the step on the devices that it was tuned on.

    Attributes:
        step_s, plain_step_s: medians of `runs` runs, in turns.
        devices: how many of which kind.
        compute_factor, exposed_factor: measured over simulated seconds, of kernels and of waiting
            for collectives; None where nothing was simulated.
    """

    step_s: float
    plain_step_s: float
    runs: int
    devices: str
    compute_factor: float | None = None
    exposed_factor: float | None = None

    def __str__(self) -> str:
        off = ""
        if self.compute_factor is not None:
            off = f"; computing {self.compute_factor:.2f}"
            off += f", waiting {self.exposed_factor:.2f} times as long as simulated"
        return (
            f"Measured: {self.step_s * 1e3:.1f} ms a step, plain "
            f"{self.plain_step_s * 1e3:.1f}; medians of {self.runs}, {self.devices}{off}."
        )
