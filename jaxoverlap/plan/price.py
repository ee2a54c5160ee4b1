"""Record the estimated time of a step, and how much of it each tool saves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from jaxoverlap.plan.speedup import milliseconds


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds of the original and of the planned step, estimated from partitioned programs.

    An estimate assumes that collectives hide as well as they can: XLA's own order of the original
    step may be slower.

    Attributes:
        plain_s: seconds of the original step.
        plain_exposed_s: those of them in which kernels wait for collectives.
        step_s: seconds of the step as planned.
        saved_s: the seconds that each tool saves, by its name: layouts, halves, rings, ...
    """

    plain_s: float
    plain_exposed_s: float
    step_s: float
    saved_s: Mapping[str, float] = {}

    @property
    def lost_share(self) -> float:
        """The share of the original step's seconds that repairs of its shardings save."""
        saved_s = (self.saved_s.get(tool, 0.0) for tool in ("matrices", "layouts"))
        return max(sum(saved_s), 0.0) / self.plain_s

    @property
    def verdict(self) -> str:
        """The gain of the step, or the most that it could gain, in words."""
        if not self.saved_s:
            exposed, step = (f"{s * 1e3:.3g}" for s in (self.plain_exposed_s, self.plain_s))
            most = self.plain_s / max(self.plain_s - self.plain_exposed_s, 1e-12)
            return f"{exposed} of {step} ms are exposed: at most {most:.2f} x to gain (estimated)"
        took = f"{milliseconds(self.plain_s)} -> {milliseconds(self.step_s)} (estimated)"
        saved = _listed({tool: s for tool, s in self.saved_s.items() if s >= 0})
        lost = _listed({tool: -s for tool, s in self.saved_s.items() if s < 0})
        return took + f": saved by {saved}" * bool(saved) + f"; lost to {lost}" * bool(lost)


def _listed(seconds: Mapping[str, float]) -> str:
    """List tools, each with its milliseconds."""
    return ", ".join(f"{tool} {s * 1e3:.3g}" for tool, s in seconds.items())
