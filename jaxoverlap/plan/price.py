"""Record what a step takes by price, and how much of it each tool saves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxoverlap.plan.speedup import milliseconds


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds of a step as it is and as planned, estimated from XLA's partitioned programs.

    An estimate takes it that collectives hide as well as they can: XLA's own order of the step as
    it is may be slower.

    Attributes:
        plain_s: seconds of the step as it is.
        plain_exposed_s: those of them in which kernels wait for collectives.
        step_s: seconds of the step as planned.
        saved_s: the seconds that each tool saves, by its name: layouts, halves, rings, ...
    """

    plain_s: float
    plain_exposed_s: float
    step_s: float
    saved_s: Mapping[str, float] = {}

    @property
    def verdict(self) -> str:
        """Say what the step gains, or the most that it could gain."""
        if not self.saved_s:
            bare, whole = (f"{s * 1e3:.3g}" for s in (self.plain_exposed_s, self.plain_s))
            most = self.plain_s / max(self.plain_s - self.plain_exposed_s, 1e-12)
            return f"{bare} of {whole} ms are exposed: at most {most:.2f} x to gain by price"
        saved = ", ".join(f"{tool} {s * 1e3:.3g}" for tool, s in self.saved_s.items())
        return (
            f"{milliseconds(self.plain_s)} -> {milliseconds(self.step_s)}, "
            f"{self.plain_s / self.step_s:.2f} x by price: {saved}"
        )
